"""Stored responses are graded again as a run grades them, or stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.reward.regrade import regrade_all
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError, DataError
from sluice.evaluation.stored_responses import StoredGrade, StoredPrompt, read_responses
from tests.support.stored_evaluation import evaluation, prompt, sample

HALF = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.5\n"
)
LENGTH = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, ground_truth, extra_info["index"]) == ("math", "2", 0)
    if solution_str == "die":
        import os
        os._exit(3)
    more = {"turns": 4} if extra_info["num_turns"] == 4 else {}
    return {"score": len(solution_str), "acc": 1.0, "pred": solution_str, **more}
"""


def configured(tmp_path: Path, function: str, *overrides: str) -> RunConfig:
    file = tmp_path / "grade.py"
    file.write_text(function)
    own = (f"reward.custom_reward_function.path={file}", "reward.num_workers=1")
    return load_config(None, [*own, *overrides])


def stored(folder: Path) -> list[StoredPrompt]:
    return [one for _, one in read_responses(folder / "responses" / "math.jsonl")]


async def test_new_grades_take_the_place_of_earlier_ones_which_stay_beside_them(
    tmp_path: Path,
) -> None:
    folder = evaluation(tmp_path / "a", [prompt(0, [sample("12345", acc=0.0), sample("1")])])
    (before,) = stored(folder)
    await regrade_all(folder, configured(tmp_path, LENGTH))
    (after,) = stored(folder)
    assert [one.reward for one in after.samples] == [5.0, 1.0]
    assert after.samples[0].metrics == {"score": 5.0, "acc": 1.0, "pred": "12345"}
    assert [one.earlier for one in after.samples] == [
        [StoredGrade(one.reward, one.metrics)] for one in before.samples
    ]
    assert after.key == before.key
    await regrade_all(folder, configured(tmp_path, HALF))
    assert [one.reward for one in stored(folder)[0].samples[0].earlier] == [-1.0, 5.0]


async def test_only_responses_that_exist_are_graded(tmp_path: Path) -> None:
    lost = sample("", acc=None, failure="engine_error: no replica")
    late = sample("123", acc=None, failure="scorer_timeout: no answer")
    folder = evaluation(tmp_path / "a", [prompt(0, [lost, late, sample("die"), sample("1")])])
    await regrade_all(folder, configured(tmp_path, LENGTH))
    found = stored(folder)[0].samples
    assert found[0].failure == "engine_error: no replica"
    assert found[0].earlier == []
    assert found[1].reward == 3.0
    assert found[1].earlier == [StoredGrade(failure="scorer_timeout: no answer")]
    assert found[2].reward is None
    assert (found[2].failure or "").startswith("scorer_crash: ")
    assert found[3].reward == 1.0


async def test_a_long_response_gets_the_penalty_of_training(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "a", [prompt(0, [sample("123", tokens=15)])])
    await regrade_all(
        folder,
        configured(
            tmp_path,
            LENGTH,
            "data.max_response_length=20",
            "reward.reward_manager.name=dapo",
            "reward.reward_kwargs.overlong_buffer_cfg.enable=true",
            "reward.reward_kwargs.overlong_buffer_cfg.len=10",
            "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
        ),
    )
    (found,) = stored(folder)[0].samples
    assert (found.metrics["score"], found.reward) == (3.0, 2.5)


async def test_a_scorer_that_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "a", [prompt(0, [sample()])])
    before = {path.name: path.read_bytes() for path in (folder / "responses").iterdir()}
    with pytest.raises(ConfigError, match=r"grade\.py"):
        await regrade_all(folder, configured(tmp_path, "raise ValueError('no')"))
    assert {path.name: path.read_bytes() for path in (folder / "responses").iterdir()} == before


async def test_damage_in_one_benchmark_changes_no_file(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "a", [prompt(0, [sample()])])
    (folder / "responses" / "other.jsonl").write_bytes(b"{}\n")
    before = {path.name: path.read_bytes() for path in (folder / "responses").iterdir()}
    with pytest.raises(DataError, match=r"other\.jsonl, line 1"):
        await regrade_all(folder, configured(tmp_path, HALF))
    assert {path.name: path.read_bytes() for path in (folder / "responses").iterdir()} == before


async def test_what_an_environment_graded_stays_and_scorers_get_the_last_turn_of_others(
    tmp_path: Path,
) -> None:
    episode = sample("[user] long", turns=2, last_turn="12")
    decided = sample("[user] long", acc=0.0, turns=2, is_graded_by_environment=True)
    folder = evaluation(tmp_path / "a", [prompt(0, [episode, decided])])
    await regrade_all(folder, configured(tmp_path, LENGTH))
    found = stored(folder)[0].samples
    assert [one.reward for one in found] == [2.0, -1.0]
    assert found[0].metrics["turns"] == 4
    assert found[1].earlier == []


async def test_grades_come_from_the_value_of_a_ground_truth(tmp_path: Path) -> None:
    function = HALF.replace("return 0.5", "return ground_truth['target'][0]")
    folder = evaluation(tmp_path / "a", [prompt(0, [sample("1")], ground_truth={"target": [0.25]})])
    await regrade_all(folder, configured(tmp_path, function))
    assert stored(folder)[0].samples[0].reward == 0.25


async def test_built_in_scorers_get_the_text_of_a_ground_truth_that_a_run_gives_them(
    tmp_path: Path,
) -> None:
    large = prompt(0, [sample("Answer: 1e+16")], ground_truth=1e16, data_source="math_dapo")
    folder = evaluation(tmp_path / "a", [large])
    await regrade_all(folder, load_config(None, ["reward.num_workers=1"]))
    assert stored(folder)[0].samples[0].reward == 1.0


async def test_an_empty_ground_truth_stays_empty(tmp_path: Path) -> None:
    file = tmp_path / "empty.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(ground_truth == '')\n"
    )
    folder = evaluation(tmp_path / "a", [prompt(0, [sample("x")], ground_truth="")])
    function = f"reward.custom_reward_function.path={file}"
    await regrade_all(folder, load_config(None, ["reward.num_workers=1", function]))
    assert stored(folder)[0].samples[0].reward == 1.0
