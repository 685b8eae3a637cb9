"""A model's files, evaluated without a run, against the same weights in a run that trains."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.evaluation.held_run import run_folder, while_held
from benchmarks.evaluation.stored import (
    SLUICE,
    Evaluation,
    differing,
    held_out_file,
    largest_difference,
    responses,
)
from benchmarks.reporting import ROOT, print_line
from sluice.service_contract import CONFIG_NAME

MOST: Mapping[str, float] = {
    "responses_differ": 0.0,
    "metrics_difference": 1e-12,
    "first_sample_s": 10.0,
}
_STARTS = 3
_POLL_S = 0.05


def measure(folder: Path) -> Mapping[str, Any]:
    """Evaluate the policy of a paused run in both ways; then time starts on its checkpoint."""
    found: dict[str, Any] = {}

    def look(run_dir: Path, model: Path, step: int) -> None:
        in_run = _evaluated_in_run(run_dir)
        alone = _alone(folder, model, "alone")
        subprocess.run(alone.command(), cwd=ROOT, check=True)
        ours = {one.question: responses(one) for one in alone.prompts().values()}
        found["responses_differ"] = differing(_dumped(run_dir, step), ours)
        found["metrics_difference"] = largest_difference(in_run, alone.metrics())
        print_line(f"{len(ours)} prompts; in the run {in_run}")

    while_held(folder, look)
    model = folder / "assets" / "model"
    starts = [_first_sample_s(_alone(folder, model, "start")) for _ in range(_STARTS)]
    print_line(f"seconds to the first graded sample: {starts}")
    return {**found, "first_sample_s": median(starts)}


def _alone(folder: Path, model: Path, name: str) -> Evaluation:
    output = folder / name
    shutil.rmtree(output, ignore_errors=True)
    return Evaluation(model, held_out_file(folder), run_folder(folder) / CONFIG_NAME, output)


def _evaluated_in_run(run_dir: Path) -> dict[str, float]:
    command = [*SLUICE, "eval", str(run_dir), "-n", "1", "--temperature", "0", "--json"]
    print_line(" ".join(command[2:]))
    ended = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(ended.stdout)["metrics"])


def _dumped(run_dir: Path, step: int) -> dict[str, list[str]]:
    """Return what the run wrote of its validation: the responses of each prompt's text."""
    found: dict[str, list[str]] = {}
    text = (run_dir / "validation" / f"{step}.jsonl").read_text(encoding="utf-8")
    for row in map(json.loads, text.splitlines()):
        found.setdefault(row["input"], []).append(row["output"])
    return found


def _first_sample_s(evaluation: Evaluation) -> float:
    """Return the seconds from the command's start until its first prompt is stored."""
    began_s = time.monotonic()
    with subprocess.Popen(evaluation.command(), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while not evaluation.lines() and process.poll() is None:
            time.sleep(_POLL_S)
        seconds = time.monotonic() - began_s
        if process.wait() != 0:
            raise SystemExit(f"the evaluation in {evaluation.output} failed")
    return seconds
