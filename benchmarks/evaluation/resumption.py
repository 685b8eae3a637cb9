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

from benchmarks.evaluation.stored import Evaluation, differing, largest_difference, responses
from benchmarks.reporting import ROOT, print_line
from sluice.cli.running_run import is_active, launched_processes
from sluice.quickstart.prepare import prepare

KEYS = ("resume_differs",)
MOST: Mapping[str, float] = {"resume_differs": 0.0}

_SAMPLES = 16
_VICTIMS = ("command", "rollout-0", "reward", "evaluation", "command")
"""What is killed: the command, whose processes end with it, or one of its processes."""
_POLL_S, _MOST_S = 0.05, 300.0


def measure(folder: Path) -> Mapping[str, Any]:
    """Return how many prompts and metrics differ."""
    assets = prepare(folder / "assets", task="quickstart", seed=0, progress=lambda _: None)
    outputs = [folder / name for name in ("whole", "killed")]
    for output in outputs:
        shutil.rmtree(output, ignore_errors=True)
    whole, killed = (
        Evaluation(assets.model_dir, assets.val_file, output, _SAMPLES) for output in outputs
    )
    subprocess.run(whole.command(), cwd=ROOT, check=True)
    prompts = len(whole.prompts())
    for number, victim in enumerate(_VICTIMS, start=1):
        _kill_after(killed, victim, number * prompts // (len(_VICTIMS) + 1))
    _complete(killed)
    if len(killed.lines()) != len(killed.prompts()):
        raise SystemExit("a position is stored twice")
    one, other = ({p: responses(v) for p, v in each.prompts().items()} for each in (whole, killed))
    unequal = largest_difference(whole.metrics(), killed.metrics()) > 0
    return {"resume_differs": differing(one, other) + unequal}


def _kill_after(evaluation: Evaluation, victim: str, prompts: int) -> None:
    """Start or resume, kill a process once so many prompts are stored, and wait for the end."""
    with _started(evaluation) as process:
        until_s = time.monotonic() + _MOST_S
        while len(evaluation.lines()) < prompts:
            if process.poll() is not None or time.monotonic() > until_s:
                process.kill()
                raise SystemExit(f"{evaluation.output}: it ended before {victim} was killed")
            time.sleep(_POLL_S)
        if victim == "command":
            process.kill()
        else:
            os.kill(_process(evaluation.output, victim), signal.SIGKILL)
            # The command may start it again, which is as good, or end.
            time.sleep(1.0)
            process.kill()
        print_line(f"killed {victim} at {len(evaluation.lines())} prompts")
    while asyncio.run(is_active(evaluation.output)):
        time.sleep(_POLL_S)


def _process(output: Path, name: str) -> int:
    found = asyncio.run(launched_processes(output)) or ()
    for one in found:
        if one.name == name and one.pid:
            return one.pid
    raise SystemExit(f"{output}: no process {name} among {[one.name for one in found]}")


def _started(evaluation: Evaluation) -> subprocess.Popen[bytes]:
    return subprocess.Popen(evaluation.command(), cwd=ROOT, stdout=subprocess.DEVNULL)


def _complete(evaluation: Evaluation) -> None:
    with _started(evaluation) as process:
        if process.wait(_MOST_S) != 0:
            raise SystemExit(f"{evaluation.output}: the last part failed")
