"""The job of `make ray-test`: what Ray's command says of it decides."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from tools.compose_test.commands import CommandError
from tools.phases import PhaseError
from tools.ray_test.job_scenario import STEPS, JobReading
from tools.ray_test.submitted_job import JobOutcome, submit_and_wait

# In the words of Ray 2.60. `ray job submit` waits, and fails with the job.
RAY = """#!/bin/sh
echo "$*" >> "$CALLS"
case $2 in
submit) echo "Job 'raysubmit_1a' submitted successfully"; exit $SUBMIT_CODE ;;
status) echo "$SAYS" ;;
esac
"""
SUCCEEDED = "SUCC cli.py:67 -- Job 'raysubmit_1a' succeeded"


def submitted(folder: Path, says: str, code: int = 0) -> JobOutcome:
    (folder / "ray").write_text(RAY, encoding="utf-8")
    (folder / "ray").chmod(0o755)
    (folder / "run").mkdir()
    rows = [{"step": n, "training/global_step": n} for n in (1, 2)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "run" / "metrics.jsonl").write_text(text, encoding="utf-8")
    environment = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "SAYS": says,
        "SUBMIT_CODE": str(code),
    }
    settings = (f"sluice.run_dir={folder / 'run'}",)
    return asyncio.run(submit_and_wait(folder, settings, ("reward=CPU:1",), environment, 20.0))


@pytest.mark.parametrize(
    ("says", "status"),
    [
        (SUCCEEDED, "SUCCEEDED"),
        ("ERR cli.py:75 -- Job 'raysubmit_1a' failed", "FAILED"),
        ("Status for job 'raysubmit_1a': PENDING", "PENDING"),
    ],
)
def test_the_status_is_rays_word_and_the_steps_are_those_of_the_runs_folder(
    tmp_path: Path, says: str, status: str
) -> None:
    assert submitted(tmp_path, says) == JobOutcome(status, 2)
    first, second = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert first.startswith(f"job submit --working-dir {tmp_path} ")
    assert first.endswith(
        f"-- sluice up run.yaml sluice.run_dir={tmp_path / 'run'} --on ray --resources reward=CPU:1"
    )
    assert second == "job status raysubmit_1a"


def test_a_job_that_fails_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="exit code 1"):
        submitted(tmp_path, SUCCEEDED, code=1)


def test_another_jobs_status_is_none_of_this_one(tmp_path: Path) -> None:
    with pytest.raises(PhaseError, match="Ray told no"):
        submitted(tmp_path, "Job 'raysubmit_2b' succeeded")


@pytest.mark.parametrize(
    ("seen", "problems"),
    [
        (JobReading("SUCCEEDED", STEPS, {}), 0),
        (JobReading("SUCCEEDED", STEPS - 1, {}), 1),
        (JobReading("STOPPED", STEPS, {}), 1),
        (JobReading("SUCCEEDED", STEPS, {7: "python -m services.reward"}), 1),
    ],
)
def test_a_job_succeeds_with_all_its_steps_and_leaves_nothing(
    seen: JobReading, problems: int
) -> None:
    assert len(seen.problems()) == problems
