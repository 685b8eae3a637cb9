"""A model's files, evaluated without a run, against the same weights in a run that trains."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.reporting import ROOT, empty_run_folder, print_line
from sluice.api.trainer.v1 import trainer_pb2
from sluice.client.run_address import locate_run
from sluice.evaluation.results import read_results
from sluice.evaluation.stored_responses import read_responses, response_files
from sluice.rpc.client import open_channel, trainer_stub, unary_call
from sluice.service_contract import CONFIG_NAME
from tools.commands import output_of, started
from tools.launched_run import SLUICE, LaunchedRun

MOST: Mapping[str, float] = {
    "responses_differ": 0.0,
    "metrics_difference": 1e-12,
    "first_sample_s": 10.0,
}
_STEP, _STARTS = 3, 3
_START_S, _CALL_S, _POLL_S = 300.0, 600.0, 0.05
_SETTINGS = (
    "trainer.total_training_steps=1000",
    "trainer.val_before_train=false",
    "trainer.test_freq=1000",
    "trainer.save_freq=1000",
    "actor_rollout_ref.rollout.val_kwargs.n=1",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0",
)
Responses = Mapping[str, list[str]]


def measure(folder: Path) -> Mapping[str, Any]:
    """Evaluate the policy of a paused run in both ways; then time starts on its first model."""
    run_dir = folder / "run"
    empty_run_folder(run_dir, folder / "assets", "quickstart", 0)
    checkpoint, in_run, theirs = asyncio.run(_evaluated_in_run(run_dir))
    (config,) = checkpoint.glob("actor/**/config.json")
    output_of(*_command(folder, config.parent), timeout_s=_CALL_S, folder=ROOT)
    (alone,) = read_results(_output(folder)).benchmarks.values()
    ours = _responses(_output(folder))
    print_line(f"{len(ours)} prompts; in the run {in_run}")
    shared = in_run.keys() & alone.metrics.keys()
    found = {
        "responses_differ": sum(theirs.get(k) != ours.get(k) for k in theirs.keys() | ours.keys()),
        "metrics_difference": max(abs(in_run[name] - alone.metrics[name]) for name in shared),
    }
    starts = [_first_sample_s(folder) for _ in range(_STARTS)]
    print_line(f"seconds to the first graded sample: {starts}")
    return {**found, "first_sample_s": median(starts)}


async def _evaluated_in_run(run_dir: Path) -> tuple[Path, dict[str, float], Responses]:
    """Train some steps and pause; return a checkpoint, and what `sluice eval` finds there."""
    dumps = run_dir / "validation"
    settings = (*_SETTINGS, f"trainer.validation_data_dir={dumps}")
    command = (*SLUICE, "quickstart", "--run-dir", str(run_dir), *settings)
    evaluate = (*SLUICE, "eval", str(run_dir), "-n", "1", "--temperature", "0", "--json")
    with started(command, run_dir.with_suffix(".log"), folder=ROOT) as process:
        run = LaunchedRun(run_dir, process)
        await run.until_training(_STEP, 1, _START_S)
        async with run.monitor() as monitor, monitor.held(_CALL_S) as held:
            checkpoint = await _saved(run_dir)
            said = await asyncio.to_thread(output_of, *evaluate, timeout_s=_CALL_S)
            lines = (dumps / f"{held.step}.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[str, list[str]] = {}
    for row in map(json.loads, lines):
        found.setdefault(row["input"], []).append(row["output"])
    return checkpoint, json.loads(said)["metrics"], found


async def _saved(run_dir: Path) -> Path:
    """Save a checkpoint of the paused step; return its folder."""
    async with open_channel(locate_run(run_dir).trainer, max_message_bytes=64 << 20) as channel:
        saved = await unary_call(
            trainer_stub(channel).SaveCheckpoint,
            trainer_pb2.SaveCheckpointRequest(),
            peer="trainer",
            phase="saving a checkpoint",
        )
    return Path(saved.path)


def _output(folder: Path) -> Path:
    return folder / "alone"


def _command(folder: Path, model: Path) -> tuple[str, ...]:
    """Empty the output; return the command that evaluates a model's files without a run."""
    shutil.rmtree(_output(folder), ignore_errors=True)
    benchmark = folder / "assets" / "data" / "test.parquet"
    return (
        *(*SLUICE, "eval", "--model", str(model), "--benchmark", str(benchmark)),
        *("-n", "1", "--temperature", "0", "--engine", "torch", "--replicas", "2"),
        *("--config", str(folder / "run" / CONFIG_NAME), "--output", str(_output(folder))),
    )


def _responses(output: Path) -> Responses:
    """Return the stored responses by question."""
    files = response_files(output).values()
    prompts = [one for file in files for _, one in read_responses(file)]
    return {one.question: [sample.response for sample in one.samples] for one in prompts}


def _first_sample_s(folder: Path) -> float:
    """Return the seconds from the command's start until its first prompt is stored."""
    command, began_s = _command(folder, folder / "assets" / "model"), time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while not _has_line(_output(folder)) and process.poll() is None:
            time.sleep(_POLL_S)
        seconds = time.monotonic() - began_s
        if process.wait() != 0:
            raise SystemExit(f"the evaluation in {_output(folder)} failed")
    return seconds


def _has_line(output: Path) -> bool:
    return any(b"\n" in file.read_bytes() for file in (output / "responses").glob("*.jsonl"))
