"""Routing to scorers, and functions of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.reward.scorers.custom import AsyncScorer, load_custom_scorer
from services.reward.scorers.registry import Scorer, scorer_for
from sluice.errors import ConfigError, DataError


def grade(scorer: Scorer, data_source: str = "mine") -> object:
    return scorer(
        data_source=data_source, solution_str="Answer: 1", ground_truth="1", extra_info={}
    )


@pytest.mark.parametrize("source", ["math_dapo", "math", "math_dapo_reasoning", "aime_2024"])
def test_mathematics_goes_to_math_dapo(source: str) -> None:
    returned = grade(scorer_for(source), source)
    assert returned == {"score": 1.0, "acc": True, "pred": "1"}


def test_an_unknown_source_is_told_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"'openai/gsm8k'.*custom_reward_function\.path"):
        scorer_for("openai/gsm8k")


def write(tmp_path: Path, source: str) -> str:
    path = tmp_path / "score.py"
    path.write_text(source)
    return str(path)


def test_a_custom_function_gets_verls_arguments_and_its_own_win(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def grade(data_source, solution_str, ground_truth, extra_info=None, bonus=0, **kw):\n"
        "    return {'score': bonus, 'acc': float(ground_truth == 'over'), 'pred': data_source}\n",
    )
    scorer = load_custom_scorer(path, "grade", {"bonus": 2, "ground_truth": "over"})
    returned = grade(scorer)
    assert returned == {"score": 2, "acc": 1.0, "pred": "mine"}


def test_a_custom_function_may_be_async(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "import asyncio\n"
        "async def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    await asyncio.sleep(0)\n"
        "    return 0.5\n",
    )
    scorer = load_custom_scorer(path, "compute_score", {})
    assert isinstance(scorer, AsyncScorer)
    assert [grade(scorer) for _ in range(2)] == [0.5, 0.5]
    scorer.close()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import missing_module", "ModuleNotFoundError: No module named 'missing_module'"),
        ("def compute_score(:", "SyntaxError"),
        ("compute_score = 3", "no function 'compute_score'"),
        ("", "no function 'compute_score'"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_told_with_the_reason(
    tmp_path: Path, source: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_custom_scorer(write(tmp_path, source), "compute_score", {})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no file /nowhere/score\.py"):
        load_custom_scorer("/nowhere/score.py", "compute_score", {})
