"""Which scorer a data source goes to, and what every built-in scorer keeps to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.grading.messages import ScorerNumber
from services.reward.grading.scorer_main import answer_of
from services.reward.grading.scorers.registry import (
    MATH_VERIFY,
    RULES,
    TAILS,
    check_routes,
    scored_characters,
    scorer_for,
)
from sluice.data.scoring import DEFAULT_ROUTES, PROGRAM_TESTS, refuses_truth
from sluice.errors import ConfigError, DataError

RIGHT = {
    "openai/gsm8k": ("#### 7", 1.0),
    "lighteval/MATH": (r"\boxed{7}", 1.0),
    "DigitalLearningGmbH/MATH-lighteval": (r"\boxed{7}", 1.0),
    "HuggingFaceH4/MATH-500": (r"\boxed{7}", 1.0),
    "math_dapo": ("Answer: 7", {"score": 1.0, "acc": True, "pred": "7"}),
    "math": ("Answer: 7", {"score": 1.0, "acc": True, "pred": "7"}),
    "math_dapo_reasoning": ("Answer: 7", {"score": 1.0, "acc": True, "pred": "7"}),
    "aime2024": (r"so \boxed{7}", {"score": 1.0, "acc": True, "pred": "7"}),
    "aime": ("Answer: 7", {"score": 1.0, "acc": True, "pred": "7"}),
    "hiyouga/geometry3k": (r"<think>.</think>\boxed{7}", 1.0),
    **{
        f"searchR1_{name}": ("<answer>7</answer>", 1.0)
        for name in (
            *("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"),
        )
    },
}
PROGRAMS = ["codecontests", "apps", "codeforces", "taco"]
NUMINA = [
    *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc"),
    *("numina_cn_k12", "numina_olympiads"),
]


def grade(data_source: str, response: str, routes: dict[str, str] | None = None) -> object:
    scorer = scorer_for(data_source, routes=routes)
    return scorer(
        data_source=data_source, solution_str=response, ground_truth="7", extra_info={"index": 1}
    )


@pytest.mark.parametrize("source", RIGHT)
def test_every_source_goes_where_verl_sends_it(source: str) -> None:
    response, score = RIGHT[source]
    assert grade(source, response) == score


def test_the_routes_are_verls_and_no_others() -> None:
    exact = {source for source in RIGHT if not source.startswith("aime")}
    assert set(DEFAULT_ROUTES) == {*exact, "aime*", *NUMINA, *PROGRAMS}


def test_numina_goes_to_math_verify() -> None:
    assert {DEFAULT_ROUTES[source] for source in NUMINA} == {MATH_VERIFY}


@pytest.mark.parametrize("source", NUMINA)
def test_a_missing_package_is_reported_with_how_to_install_it(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=rf"{source}.*sluice\[math-verify\]"):
        scorer_for(source)


@pytest.mark.parametrize("source", PROGRAMS)
def test_programs_are_refused_without_a_sandbox_and_graded_with_one(source: str) -> None:
    with pytest.raises(DataError, match=rf"'{source}'.*backend=bubblewrap [^;]*, or set reward"):
        scorer_for(source)
    scorer = scorer_for(source, programs=lambda response, truth: len(response + truth))
    assert scorer(data_source=source, solution_str="ab", ground_truth="c", extra_info={}) == 3


@pytest.mark.parametrize("truth", ['["7"]', '{"target": "7"}'])
def test_a_list_or_mapping_is_refused_by_scorers_that_compare_with_one_text(truth: str) -> None:
    with pytest.raises(DataError, match=r"'openai/gsm8k': ground_truth is .*gsm8k compares with"):
        scorer_for("openai/gsm8k", json_truth=truth)
    scorer_for("searchR1_nq", json_truth=truth)
    scorer_for("apps", json_truth=truth, programs=lambda response, truth: 1.0)
    scorer_for("openai/gsm8k", json_truth="7")
    for unread in ('{"target": [7]}', '{"answer": "7"}', '{"target": []}', "[7]", "[]"):
        with pytest.raises(DataError, match="exact_match compares with"):
            scorer_for("searchR1_nq", json_truth=unread)


@pytest.mark.parametrize("truth", ['["7"]', '{"a": 1}', "[]"])
@pytest.mark.parametrize("name", sorted(RULES.keys() - {MATH_VERIFY}))
def test_an_inspection_knows_which_scorers_refuse_a_list(name: str, truth: str) -> None:
    refused = False
    try:
        scorer_for("any", truth, routes={"any": name}, programs=lambda response, truth: 1.0)
    except DataError:
        refused = True
    assert refuses_truth(name, truth, is_json=True) is refused
    assert not refuses_truth(name, truth, is_json=False)


def test_an_unknown_source_is_reported_with_remedy_and_the_known_ones() -> None:
    with pytest.raises(DataError) as refusal:
        scorer_for("openai/gsm9k")
    words = str(refusal.value)
    assert words.startswith("data_source 'openai/gsm9k'")
    assert all(source in words for source in DEFAULT_ROUTES)
    assert "reward.custom_reward_function.path" in words


def test_a_users_route_wins_over_verls_and_the_longest_beginning_wins() -> None:
    routes = {"aime*": "math_dapo_0_6", "aime2024*": "math_boxed", "aime2024x": "gsm8k"}
    boxed = r"\boxed{7}"
    assert grade("aime", boxed, routes) == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert grade("aime2024_1", boxed, routes) == 1.0
    assert grade("aime2024x", "#### 7", routes) == 1.0


def test_a_data_source_of_any_name_can_be_routed() -> None:
    assert grade("/data/choices.jsonl", "It is 7", {"/data/*": "gsm8k_flexible"}) == 1.0


def test_a_route_to_nowhere_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"no scorer is called 'gsm'.*gsm8k_flexible"):
        check_routes({"mine": "gsm"})
    check_routes(dict.fromkeys(map(str, range(len(RULES))), "geo3k"))


def test_tails_are_known_for_those_who_look_at_tails_only() -> None:
    assert scored_characters("aime25", {}) == 300
    assert scored_characters("openai/gsm8k", {}) == 300
    assert scored_characters("mine", {"mine": "gsm8k_flexible"}) == 300
    assert scored_characters("hiyouga/geometry3k", {}) is None
    assert scored_characters("unknown", {}) is None


FRAGMENTS = st.sampled_from(
    [
        *("Answer:", "#### ", "\\boxed{", "\\boxed ", "\\fbox{", "\\frac", "\\sqrt", "\\text{ m}"),
        *("{", "}", "7", "1/2", "0.5", ",", ".", "-", "=", "$", "%", "\\", " ", "\n", "(", ")"),
        *("<answer>", "</answer>", "<think>", "</think>", "A", "\x00", "\u221a2", "^"),
        *("x" * 140, "x" * 290),
    ]
)
TEXTS = st.lists(FRAGMENTS, max_size=24).map("".join)
SCORES = {
    "math_dapo": {-1.0, 1.0},
    "math_dapo_0_6": {-1.0, 1.0},
    "math_dapo_strict_box": {-1.0, 1.0},
    "geo3k": {0.0, 0.1, 0.9, 1.0},
    "exact_match": {0.0, 0.25, 1.0},
}


@pytest.mark.parametrize("name", sorted(set(RULES) - {MATH_VERIFY, PROGRAM_TESTS}))
@settings(deadline=None)
@given(response=TEXTS, truth=TEXTS)
def test_every_response_gets_one_of_the_scorers_scores(
    name: str, response: str, truth: str
) -> None:
    answer = answer_of(RULES[name](response, truth + "A"))
    assert isinstance(answer, ScorerNumber)
    assert math.isfinite(answer.score)
    assert answer.score in SCORES.get(name, {0.0, 1.0})


@pytest.mark.parametrize("name", sorted(TAILS))
@settings(deadline=None)
@given(response=TEXTS, truth=TEXTS)
def test_what_is_left_out_before_sending_changes_no_score(
    name: str, response: str, truth: str
) -> None:
    tail = response[-cast("int", scored_characters("mine", {"mine": name})) :]
    assert RULES[name](tail, truth) == RULES[name](response, truth)


def test_the_page_on_rewards_names_every_scorer_beside_its_sources() -> None:
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(" `"): line for line in page.splitlines() if "| `" in line}
    assert set(RULES) <= set(rows)
    for source, name in DEFAULT_ROUTES.items():
        assert f"`{source}`" in rows[name].split("|")[2], source
