"""What scorers get, and which scorer a data source has: verl's routing, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

ANY_ENDING = "*"
EXACT_MATCH = "exact_match"
PROGRAM_TESTS = "program_tests"
"""The scorer that runs programs, which needs a sandbox."""

DEFAULT_ROUTES: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
        "math_boxed",
    ),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning", "aime*"), "math_dapo"),
    **dict.fromkeys(
        (
            *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime"),
            *("numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"),
        ),
        "math_verify",
    ),
    "hiyouga/geometry3k": "geo3k",
    **dict.fromkeys(
        (
            *("searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa"),
            *("searchR1_2wikimultihopqa", "searchR1_musique", "searchR1_bamboogle"),
        ),
        EXACT_MATCH,
    ),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), PROGRAM_TESTS),
}
"""The scorer's name by data source. A key that ends in ``*`` is the beginning of a data source."""

ROUTED_SCORERS = ("gsm8k_flexible", "math_dapo_0_6", "math_dapo_strict_box", "multiple_choice")
"""The scorers that no data source has without a route of the user's."""


def accepted_answers(ground_truth: str) -> Sequence[str]:
    """Return all answers that exact_match accepts. Text that is not such JSON is the answer."""
    try:
        value = msgspec.json.decode(ground_truth, type=dict[str, object] | list[str])
    except msgspec.DecodeError:
        return [ground_truth]
    if isinstance(value, list):
        return value
    target = value.get("target")
    if isinstance(target, str):
        return [target]
    if isinstance(target, list) and all(isinstance(answer, str) for answer in target):
        return target
    return [ground_truth]


def refuses_truth(scorer: str | None, ground_truth: str, *, is_json: bool) -> bool:
    """Return whether a built-in scorer cannot compare with a ground truth: a list or a mapping."""
    is_list = is_json and ground_truth.startswith(("[", "{"))
    if not is_list or scorer is None or scorer == PROGRAM_TESTS:
        return False
    return scorer != EXACT_MATCH or accepted_answers(ground_truth) in ([], [ground_truth])


def scorer_name(data_source: str, routes: Mapping[str, str] = DEFAULT_ROUTES) -> str | None:
    """Return the scorer of a data source; ``None``: none. The longest beginning counts."""
    if data_source in routes:
        return routes[data_source]
    beginnings = [
        key
        for key in routes
        if key.endswith(ANY_ENDING) and data_source.startswith(key.removesuffix(ANY_ENDING))
    ]
    return routes[max(beginnings, key=len)] if beginnings else None


class ScorerInput(msgspec.Struct, frozen=True, array_like=True):
    """One response to grade. Only reward models look at `question`, the prompt's last turn.

    `num_turns` counts answers and the turns that they answer, as verl does. `truth_is_json` is
    that of a prompt.
    """

    data_source: str
    response: str
    ground_truth: str
    extra_info: Mapping[str, object] = {}
    question: str = ""
    truth_is_json: bool = False
    num_turns: int = 2
