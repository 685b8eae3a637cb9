"""Stand-alone evaluations in real processes: after a kill of any, the results are the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sluice.cli.main import commands
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.small_run import WAIT_S, Assets, LiveRun, processes_naming, run_to_end
from tests.support.threaded_launch import preloaded_launches

PROMPTS, SAMPLES = 40, 3
# Grades no more responses than a file beside it allows, so that kills come before the end.
HELD_SCORER = """
import time
import zlib
from pathlib import Path

HELD, GRADED = (Path(__file__).with_name(name) for name in ("held", "graded"))

def may_grade():
    try:
        return GRADED.stat().st_size < int(HELD.read_text())
    except FileNotFoundError:  # nothing is held, or graded yet
        return True

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    while not may_grade():
        time.sleep(0.02)
    with GRADED.open("a") as file:
        file.write("x")
    right = float(zlib.crc32(solution_str.encode()) & 1)
    return {"score": right, "acc": right}
"""
# At so many graded responses a quarter of the prompts has all of them, and a quarter lacks some.
HELD_AT = PROMPTS * (SAMPLES - 1) + PROMPTS // 4


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "sums.parquet"
    write_prompts(file, prompt_rows([f"{number} + 2 = ?" for number in range(PROMPTS)]))
    return file


@pytest.fixture
def scorer(tmp_path: Path) -> Path:
    file = tmp_path / "scorer.py"
    file.write_text(HELD_SCORER, encoding="utf-8")
    return file


def graded(scorer: Path) -> int:
    file = scorer.with_name("graded")
    return file.stat().st_size if file.is_file() else 0


def hold_at(scorer: Path, most: int) -> None:
    """Let the scorer grade only so many responses."""
    unfinished = scorer.with_name("held.new")
    unfinished.write_text(str(most), encoding="utf-8")
    os.replace(unfinished, scorer.with_name("held"))


def release(scorer: Path) -> None:
    scorer.with_name("held").unlink(missing_ok=True)


def settings(rows: Path, scorer: Path) -> list[str]:
    return [
        f"data.val_files={rows}",
        "data.train_files=null",
        f"actor_rollout_ref.rollout.val_kwargs.n={SAMPLES}",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "sluice.evaluation.benchmarks=[sums]",
        "sluice.rollout.serves_model_files=true",
        "sluice.reward.ledger=memory",
        "sluice.asynchrony.max_staleness=0",
        f"reward.custom_reward_function.path={scorer}",
        "reward.scorer_pool.timeout_s=600",
    ]


def stored(folder: Path) -> dict[int, Any]:
    """Whole lines of the responses by position."""
    try:
        text = (folder / "responses" / "sums.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {line["position"]: line for line in lines}


def results(folder: Path) -> dict[str, Any]:
    """What does not depend on how long it took."""
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    del found["seconds"]
    return dict(found)


async def until_held(run: LiveRun, scorer: Path, most: int) -> None:
    async def reached() -> bool:
        return graded(scorer) >= most and len(stored(run.run_dir)) >= PROMPTS // 4

    await run.until(reached, f"{most} responses graded, and prompts stored")


def test_an_evaluation_whose_processes_are_killed_has_the_results_of_one_left_alone(
    small_assets: Assets, tmp_path: Path, rows: Path, scorer: Path
) -> None:
    whole = run_to_end(small_assets, tmp_path / "whole", settings(rows, scorer))
    assert (whole.end.exit_code, whole.end.failures) == (0, ())
    # The prompts that are not stored have more responses than are graded between two kills.
    held_at = [graded(scorer) + HELD_AT + between for between in (0, 5, 10)]
    hold_at(scorer, held_at[0])

    async def kill_each(run: LiveRun) -> None:
        # After the kill of the service all that is not stored is sampled again: by another replica.
        for name, most in zip(("rollout-0", "reward", "evaluation"), held_at, strict=True):
            hold_at(scorer, most)
            await until_held(run, scorer, most)
            run.send(name, signal.SIGKILL)
        release(scorer)

    killed = run_to_end(small_assets, tmp_path / "killed", settings(rows, scorer), kill_each)
    assert (killed.end.exit_code, killed.end.failures) == (0, ())
    assert killed.left_running == ()
    for name in ("reward", "evaluation", "rollout-0"):
        assert killed.log(name).count("up after") == 2, name
    assert stored(tmp_path / "killed") == stored(tmp_path / "whole")
    found = results(tmp_path / "killed")
    assert found == results(tmp_path / "whole")
    assert found["benchmarks"]["sums"]["prompts"] == PROMPTS
    assert found["benchmarks"]["sums"]["failed_samples"] == 0


def arguments(assets: Assets, rows: Path, output: Path, scorer: Path) -> list[str]:
    return [
        *("eval", "--model", str(assets.folder / "model"), "--benchmark", str(rows)),
        *("--config", str(assets.config), "--output", str(output)),
        *("-n", str(SAMPLES), "--replicas", "1"),
        f"reward.custom_reward_function.path={scorer}",
        "reward.scorer_pool.timeout_s=600",
    ]


def wait_for(condition: Any, what: str) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_s, f"within {WAIT_S} s not: {what}"
        time.sleep(0.05)


def test_the_command_continues_after_a_kill_of_the_command_itself(
    small_assets: Assets, tmp_path: Path, rows: Path, scorer: Path
) -> None:
    words = arguments(small_assets, rows, tmp_path / "out", scorer)
    hold_at(scorer, HELD_AT + 1)
    command = [sys.executable, "-m", "sluice.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as launcher:
        try:
            wait_for(lambda: len(stored(tmp_path / "out")) > PROMPTS // 4, "prompts stored")
        finally:
            launcher.kill()
    wait_for(lambda: not processes_naming(tmp_path / "out"), "all processes ended")
    before = stored(tmp_path / "out")
    assert len(before) < PROMPTS
    release(scorer)
    with preloaded_launches():
        again = CliRunner().invoke(commands, words)
    assert again.exit_code == 0, again.output
    assert "val-core/" in again.stdout
    after = stored(tmp_path / "out")
    assert len(after) == PROMPTS
    assert {position: after[position] for position in before} == before
    found = results(tmp_path / "out")
    assert (found["samples_per_prompt"], found["sampling"]["temperature"]) == (SAMPLES, 1.0)
