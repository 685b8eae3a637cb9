"""An evaluation that is killed five times on its way, and one that is not."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.evaluation.stored import Evaluation, differing, responses
from benchmarks.reporting import ROOT, print_line
from sluice.cli.run.quickstart import asset_settings
from sluice.cli.running_run import is_active
from sluice.launch.servicer import launched_processes
from sluice.quickstart.prepare import prepare

MOST: Mapping[str, float] = {"resume_differs": 0.0}

_SAMPLES = 16
COMMAND = "command"
_VICTIMS = (COMMAND, "rollout-0", "reward", "evaluation", COMMAND)
"""What is killed: the command, whose processes end with it, or a process, which it starts again."""
_POLL_S, _MOST_S = 0.05, 300.0


def measure(folder: Path) -> Mapping[str, Any]:
    """Return how many prompts and metrics differ."""
    assets = prepare(folder / "assets", task="quickstart", seed=0, progress=lambda _: None)
    evaluations = []
    for name in ("whole", "killed"):
        shutil.rmtree(folder / name, ignore_errors=True)
        evaluations.append(
            Evaluation(
                assets.model_dir,
                assets.val_file,
                ROOT / "sluice" / "quickstart" / "quickstart.yaml",
                folder / name,
                _SAMPLES,
                tuple(asset_settings(assets, folder / name, 0)),
            )
        )
    whole, killed = evaluations
    subprocess.run(whole.command(), cwd=ROOT, check=True)
    _evaluate_with_kills(killed, len(whole.prompts()))
    if len(killed.lines()) != len(killed.prompts()):
        raise SystemExit("a position is stored twice")
    one, other = ({p: responses(v) for p, v in each.prompts().items()} for each in evaluations)
    unequal = whole.metrics() != killed.metrics()
    return {"resume_differs": differing(one, other) + unequal}


def _evaluate_with_kills(evaluation: Evaluation, prompts: int) -> None:
    """Evaluate so many prompts; kill once in each of as many equal parts as there are kills."""
    process = _started(evaluation)
    try:
        for number, victim in enumerate(_VICTIMS, start=1):
            if process.poll() is not None:
                process = _started(evaluation)
            _await_stored(evaluation, number * prompts // (len(_VICTIMS) + 1), process)
            if victim == COMMAND:
                process.kill()
                process.wait()
                while asyncio.run(is_active(evaluation.output)):
                    time.sleep(_POLL_S)
            else:
                os.kill(_process(evaluation.output, victim), signal.SIGKILL)
            print_line(f"killed {victim} at {len(evaluation.lines())} of {prompts} prompts")
        if process.poll() is not None:
            process = _started(evaluation)
        if process.wait(_MOST_S) != 0:
            raise SystemExit(f"{evaluation.output}: the last part failed")
    finally:
        process.kill()


def _await_stored(evaluation: Evaluation, prompts: int, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + _MOST_S
    while len(evaluation.lines()) < prompts:
        if process.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(f"{evaluation.output}: it ended before {prompts} prompts")
        time.sleep(_POLL_S)


def _process(output: Path, name: str) -> int:
    """Return a process of an evaluation, once it runs: it may be one that is being restarted."""
    until_s = time.monotonic() + _MOST_S
    while time.monotonic() < until_s:
        for one in asyncio.run(launched_processes(output)) or ():
            if one.name == name and one.pid:
                return one.pid
        time.sleep(_POLL_S)
    raise SystemExit(f"{output}: no process {name}")


def _started(evaluation: Evaluation) -> subprocess.Popen[bytes]:
    return subprocess.Popen(evaluation.command(), cwd=ROOT, stdout=subprocess.DEVNULL)
