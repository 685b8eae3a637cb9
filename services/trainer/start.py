"""The start of rank 0: its checkpoint, the warning about truncated sampling, and the dashboard."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.trainer.learner.checkpoint import resume_point
from sluice.concurrency.process import SUPERVISOR_VARIABLE
from sluice.config.loading.yaml_text import write_config
from sluice.config.run import RunConfig
from sluice.service_contract import CONFIG_NAME, MARK_VARIABLE, checkpoint_mark, restarts

if TYPE_CHECKING:
    from services.trainer.learner.checkpoint import Checkpoint, CheckpointStore
    from sluice.config.schema.trainer import TrainerConfig

logger = logging.getLogger(__name__)

_END_S = 5.0


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The point where this process continues the run.

    `checkpoint` is None at step 0. `replaces_after` is the last step whose metrics stay: an earlier
    process may have recorded later steps, which this one records again. None: there was no earlier
    process.
    """

    checkpoint: Checkpoint | None
    replaces_after: int | None


def start_point(
    trainer: TrainerConfig,
    store: CheckpointStore,
    folder: Path,
    environment: Mapping[str, str] = os.environ,
) -> StartPoint:
    """Choose the checkpoint to continue from.

    ``trainer.resume_mode`` decides where a run begins. A trainer that its supervisor restarts is in
    the middle of a run: it continues from the newest checkpoint of this run, also with ``disable``
    and ``resume_path``. If the run has saved none yet, it starts where the run began.

    Args:
        trainer: the settings.
        store: the checkpoints of `folder`.
        folder: holds the checkpoints.
        environment: variables from the launcher.

    Raises:
        ConfigError, CheckpointError: as `resume_point` and `CheckpointStore.latest`.
    """
    times = restarts(environment)
    if times == 0:
        found = resume_point(trainer, store)
        return StartPoint(found, found.step if found else None)
    has_saved = checkpoint_mark(folder) != environment.get(MARK_VARIABLE)
    found = store.latest() if has_saved else resume_point(trainer, store)
    step = found.step if found else 0
    logger.warning(
        "restarted (%d times so far): the run continues from step %d, %s",
        times,
        step,
        "its last checkpoint" if has_saved else "where it began, since it has saved none",
    )
    return StartPoint(found, step)


def sampling_notice(config: RunConfig) -> str | None:
    """Return a warning if top-p or top-k truncates sampling in training, else None.

    Behavior logprobs belong to the truncated distribution: the remaining tokens share all
    probability. The trainer computes logprobs over the whole vocabulary, which are lower.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    cuts = [f"top_p = {rollout.top_p:g}"] if rollout.top_p < 1.0 else []
    cuts += [f"top_k = {rollout.top_k}"] if rollout.top_k > 0 else []
    if not cuts:
        return None
    correction = config.algorithm.rollout_correction.rollout_is
    if correction is not None:
        effect = (
            f"the importance weights (rollout_correction.rollout_is = {correction}) are below 1 by "
            "the mass that was cut off, whatever the staleness"
        )
    elif actor.use_rollout_log_probs:
        effect = (
            "the loss's ratio (use_rollout_log_probs = true) starts below 1 by the mass that was "
            "cut off and may be clipped before any update"
        )
    else:
        effect = (
            "old logprobs are recomputed over all tokens, so the loss takes samples of the "
            "truncated policy for samples of the whole one"
        )
    return (
        f"actor_rollout_ref.rollout: {' and '.join(cuts)} truncate sampling in training: {effect}; "
        "set top_p=1 and top_k=-1 for training (val_kwargs keep their own), or watch "
        "training/rollout_probs_diff_mean"
    )


@asynccontextmanager
async def live_page(config: RunConfig) -> AsyncIterator[None]:
    """Serve the run's page during the block, if `sluice.dashboard.port` is set.

    The page has its own process and ends with the trainer. Training never waits for it: a page
    that cannot start or ends early leaves a log line.
    """
    process = await _start_page(config)
    if process is None:
        yield
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_log_end(process), name="dashboard")
            try:
                yield
            finally:
                watching.cancel()
    finally:
        await _end(process)


async def _start_page(config: RunConfig) -> asyncio.subprocess.Process | None:
    page = config.sluice.dashboard
    if page.port is None:
        return None
    command = ["-m", "sluice.cli.main", "dashboard", config.sluice.run_dir]
    command += ["--host", page.host, "--port", str(page.port)]
    environment = {**os.environ, SUPERVISOR_VARIABLE: str(os.getpid())}
    try:
        # `sluice up` has written the configuration, which the page reads; torchrun has not.
        file = Path(config.sluice.run_dir) / CONFIG_NAME
        if not file.exists():
            write_config(config, file)
        return await asyncio.create_subprocess_exec(
            sys.executable, *command, env=environment, stdin=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        logger.warning("the dashboard cannot be started: %s", error)
        return None


async def _log_end(process: asyncio.subprocess.Process) -> None:
    code = await process.wait()
    logger.warning(
        "the dashboard has ended with exit code %d and training continues; `sluice dashboard` with "
        "the run's folder shows the page again",
        code,
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """Send SIGTERM, then SIGKILL if the process does not end in time."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
