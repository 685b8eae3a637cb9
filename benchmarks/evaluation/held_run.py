"""A quickstart that is paused after some steps, so that several evaluations see one policy."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from benchmarks.evaluation.stored import SLUICE
from benchmarks.reporting import ROOT, empty_run_folder
from sluice.api.trainer.v1 import trainer_pb2
from sluice.client.run_address import RunLocation, locate_run
from sluice.client.run_monitor import RunMonitor, RunSnapshot
from sluice.errors import SluiceError
from sluice.rpc.client import open_channel, trainer_stub, unary_call

_STEP = 3
_START_S, _CALL_S = 300.0, 600.0
_MAX_MESSAGE_BYTES = 64 << 20
_SETTINGS = (
    "trainer.total_training_steps=1000",
    "trainer.val_before_train=false",
    "trainer.test_freq=1000",
    "trainer.save_freq=1000",
    "actor_rollout_ref.rollout.val_kwargs.n=1",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0",
)


def run_folder(folder: Path) -> Path:
    """Return the folder of the run, in that of the benchmark."""
    return folder / "run"


def while_held(folder: Path, look: Callable[[Path, Path, int], None]) -> None:
    """Train some steps, pause, save a checkpoint, and look at the run; then end it.

    Args:
        folder: of the run and of the quickstart's files, which are made once.
        look: called with the run's folder, the model of the checkpoint, and the step.
    """
    run_dir = run_folder(folder)
    empty_run_folder(run_dir, folder / "assets", "quickstart", 0)
    command = [*SLUICE, "quickstart", "--run-dir", str(run_dir), "--quiet", *_SETTINGS]
    command.append(f"trainer.validation_data_dir={run_dir / 'validation'}")
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            asyncio.run(_held(run_dir, process, look))
        finally:
            process.terminate()


async def _held(
    run_dir: Path, process: subprocess.Popen[bytes], look: Callable[[Path, Path, int], None]
) -> None:
    location = await _started(run_dir, process)
    async with RunMonitor(location.trainer, location.reward) as monitor:
        async with aclosing(monitor.steps(1)) as steps:
            async for step, _ in steps:
                if step >= _STEP:
                    break
        async with monitor.held(_CALL_S) as held:
            model = _model_of(await _saved(location))
            await asyncio.to_thread(look, run_dir, model, held.step)


async def _started(run_dir: Path, process: subprocess.Popen[bytes]) -> RunLocation:
    until_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until_s:
        try:
            location = locate_run(run_dir)
            await _snapshot(location)
        except SluiceError:
            await asyncio.sleep(0.5)
        else:
            return location
    raise SystemExit(f"the quickstart in {run_dir} did not start")


async def _snapshot(location: RunLocation) -> RunSnapshot:
    async with RunMonitor(location.trainer, location.reward) as monitor:
        return await monitor.snapshot()


async def _saved(location: RunLocation) -> Path:
    """Save a checkpoint of the paused step; return its folder."""
    async with open_channel(location.trainer, max_message_bytes=_MAX_MESSAGE_BYTES) as channel:
        saved = await unary_call(
            trainer_stub(channel).SaveCheckpoint,
            trainer_pb2.SaveCheckpointRequest(),
            peer="trainer",
            phase="saving a checkpoint",
        )
    return Path(saved.path)


def _model_of(checkpoint: Path) -> Path:
    (config,) = checkpoint.glob("actor/**/config.json")
    return config.parent
