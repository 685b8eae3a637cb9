"""`sluice stop` on a run of `sluice up`, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.test_scale_command import ENVIRONMENT, running, serving_after_step
from tests.support.small_run import WAIT_S, Assets, processes_naming

SLUICE = (sys.executable, "-m", "sluice")


def sluice(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SLUICE, *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env=ENVIRONMENT,
    )


@pytest.mark.parametrize("now", [False, True])
def test_a_stopped_run_leaves_no_process_and_says_from_which_step_it_resumes(
    small_assets: Assets, tmp_path: Path, *, now: bool
) -> None:
    run_dir = tmp_path / "run"
    with running(small_assets, run_dir) as process:
        asyncio.run(serving_after_step(process, run_dir, 2))
        listed = json.loads(sluice("runs", str(tmp_path), "--json").stdout)["runs"]
        assert [(one["run"], one["state"]) for one in listed] == [(str(run_dir), "running")]
        stopped = sluice("stop", str(run_dir), "--json", *(["--now"] if now else []))
        assert stopped.returncode == 0, stopped.stderr
        assert process.wait(WAIT_S) == (130 if now else 0)
    found = json.loads(stopped.stdout)
    assert found["resume"] == f"sluice up {run_dir / 'config.yaml'}"
    saved = sorted(path.name for path in (run_dir / "checkpoints").glob("global_step_*"))
    if now:
        assert (found["step"], saved) == (None, [])
    else:
        assert found["step"] >= 2
        assert saved == [f"global_step_{found['step']}"]
    assert not processes_naming(str(run_dir))
    (listed,) = json.loads(sluice("runs", str(tmp_path), "--json").stdout)["runs"]
    assert listed["state"] == "stopped"
    assert sluice("stop", str(run_dir)).stderr.endswith("is not active; there is nothing to stop\n")
