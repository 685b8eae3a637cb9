"""Functions of the user's: how they are called and how they are refused."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from services.reward.grading.scorers.custom import load_custom_scorer
from services.reward.grading.scorers.registry import Scorer
from sluice.errors import ConfigError


def grade(scorer: Scorer, data_source: str = "mine") -> object:
    return scorer(
        data_source=data_source, solution_str="Answer: 1", ground_truth="1", extra_info={}
    )


def write(tmp_path: Path, source: str) -> str:
    path = tmp_path / "score.py"
    path.write_text(source)
    return str(path)


def test_a_function_gets_verls_arguments_and_its_own_win(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def grade(data_source, solution_str, ground_truth, extra_info=None, bonus=0, **kw):\n"
        "    return {'score': bonus, 'acc': float(ground_truth == 'over'), 'pred': data_source}\n",
    )
    scorer = load_custom_scorer(path, "grade", {"bonus": 2, "ground_truth": "over"})
    assert grade(scorer) == {"score": 2, "acc": 1.0, "pred": "mine"}


ASYNC = """
import asyncio, functools

async def plain(data_source, solution_str, ground_truth, extra_info=None, worth=0.5):
    await asyncio.sleep(0)
    return worth

half = functools.partial(plain, worth=0.25)

def returns_one(**call):
    return plain(**call)

class Model:
    async def __call__(self, **call):
        return await plain(**call)

model = Model()
"""


@pytest.mark.parametrize(
    ("name", "worth"), [("plain", 0.5), ("half", 0.25), ("returns_one", 0.5), ("model", 0.5)]
)
def test_a_function_may_be_async_in_any_dress(tmp_path: Path, name: str, worth: float) -> None:
    scorer = load_custom_scorer(write(tmp_path, ASYNC), name, {})
    assert [grade(scorer) for _ in range(2)] == [worth, worth]


def test_all_calls_of_an_async_function_share_one_event_loop(tmp_path: Path) -> None:
    source = "import asyncio\nasync def loop_id(**call):\n    return id(asyncio.get_running_loop())"
    scorer = load_custom_scorer(write(tmp_path, source), "loop_id", {})
    assert grade(scorer) == grade(scorer)


def test_the_event_loop_is_closed_with_the_scorer(tmp_path: Path) -> None:
    source = "import asyncio\nloops = []\nasync def note(**call):\n"
    source += "    loops.append(asyncio.get_running_loop())\n    return 1.0"
    scorer = load_custom_scorer(write(tmp_path, source), "note", {})
    grade(scorer)
    (loop,) = sys.modules["sluice_file_score"].loops
    assert not loop.is_closed()
    del scorer
    gc.collect()
    assert loop.is_closed()


@pytest.mark.parametrize("path", ["pkg://my_rewards.length", "pkg://my_rewards/length"])
def test_a_function_may_come_from_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / "my_rewards").mkdir()
    (tmp_path / "my_rewards" / "__init__.py").touch()
    (tmp_path / "my_rewards" / "length.py").write_text(
        "def compute_score(solution_str, **call):\n    return len(solution_str)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert grade(load_custom_scorer(path, "compute_score", {})) == 9
    finally:
        for name in ("my_rewards", "my_rewards.length"):
            sys.modules.pop(name, None)


def test_a_file_may_be_named_by_its_url(tmp_path: Path) -> None:
    path = write(tmp_path, "def compute_score(**call):\n    return 1\n")
    assert grade(load_custom_scorer(f"file://{path}", "compute_score", {})) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\nimport missing_module", r"No module named 'missing_module'.*score\.py, line 2"),
        ("from verl.utils.reward_score import gsm8k", r"scorers are built in .*scorer_routes"),
        ("\n\ndef compute_score(:", r"SyntaxError.*score\.py, line 3"),
        ("compute_score = 3", "no function 'compute_score'"),
        ("", "no function 'compute_score'"),
        ("def compute_score(text, truth): return 1", r"compute_score\(text, truth\).*data_source"),
        ("def compute_score(data_source, solution_str, ground_truth): return 1", "extra_info"),
    ],
)
def test_a_function_that_cannot_be_used_is_reported_with_the_reason(
    tmp_path: Path, source: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_custom_scorer(write(tmp_path, source), "compute_score", {})


def test_kwargs_that_the_function_does_not_take_are_refused_before_the_first_sample(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, "def compute_score(**kw): return 1\ndef bare(): return 1")
    load_custom_scorer(path, "compute_score", {"any": 1})
    source = "def f(data_source, solution_str, ground_truth, extra_info=None): return 1"
    with pytest.raises(ConfigError, match=r"reward_kwargs \['bonus'\].*unexpected.*'bonus'"):
        load_custom_scorer(write(tmp_path, source), "f", {"bonus": 1})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/score.py", r"no file /nowhere/score\.py"),
        ("file:///nowhere/score.py", r"no file /nowhere/score\.py"),
        ("pkg://no_such_package_here.score", "No module named 'no_such_package_here'"),
        ("pkg://../score", "names no module"),
        ("pkg://", "names no module"),
    ],
)
def test_what_is_not_there_is_named(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_custom_scorer(path, "compute_score", {})
