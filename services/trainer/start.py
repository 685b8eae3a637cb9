"""What rank 0 does before the first step: choose a checkpoint, reserve the port, warn, and open
the live page.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from services.trainer.learner.checkpoint import resume_point
from sluice.client.run_address import CONFIG_NAME
from sluice.concurrency.process import SUPERVISOR_VARIABLE
from sluice.config.loading.yaml_text import write_config
from sluice.config.run import RunConfig
from sluice.rpc.ports import bound_socket
from sluice.service_contract import MARK_VARIABLE, checkpoint_mark, restarts

if TYPE_CHECKING:
    from services.trainer.learner.checkpoint import Checkpoint, CheckpointStore
    from sluice.config.schema.trainer import TrainerConfig


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where this process begins.

    `replaces_after` is the step after which it records steps anew that a process before it, in the
    same run or in an earlier one, may have recorded; None if there was none.
    """

    checkpoint: Checkpoint | None
    replaces_after: int | None


def start_point(
    trainer: TrainerConfig,
    store: CheckpointStore,
    folder: Path,
    environment: Mapping[str, str] = os.environ,
) -> StartPoint:
    """Chooses the checkpoint to go on from.

    ``trainer.resume_mode`` says where a run begins. A trainer that its supervisor starts again is
    in the middle of a run: it goes on from the newest checkpoint that this run has saved, also with
    ``disable`` and ``resume_path``, and if there is none yet, from where the run began.

    Args:
        trainer: the settings.
        store: the checkpoints of `folder`.
        folder: where checkpoints are.
        environment: what the launcher has set.

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
        "started again (%d times so far): the run goes on from step %d, %s",
        times,
        step,
        "its last checkpoint" if has_saved else "where it began, since it has saved none",
    )
    return StartPoint(found, step)


class PortReservation:
    """Holds host and port without listening: peers are refused as if nobody were there.

    Args:
        host: interface.
        port: 0 reserves nothing.

    Raises:
        ConfigError: the port is taken, or the interface does not exist.
    """

    def __init__(self, host: str, port: int) -> None:
        self._socket = bound_socket(host, port) if port else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Frees the port for the server itself. Repeating it does nothing."""
        if self._socket is not None:
            self._socket.close()


def sampling_notice(config: RunConfig) -> str | None:
    """A warning if samples are drawn from another distribution than the trainer computes.

    Behaviour logprobs are those of the truncated distribution, in which the tokens that are left
    share all probability; the trainer computes logprobs over the whole vocabulary, which are lower.
    None if nothing is truncated.
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


# The live page beside rank 0: a process of its own, which training never waits for.
#
# It ends with the trainer, however that ends; that it cannot start, or ends by itself, costs a
# line in the log.


_END_S = 5.0


@asynccontextmanager
async def live_page(config: RunConfig) -> AsyncIterator[None]:
    """Serves the run's page for the length of the block, if `sluice.dashboard.port` is set."""
    process = await _started(config)
    if process is None:
        yield
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_log_end(process), name="live page")
            try:
                yield
            finally:
                watching.cancel()
    finally:
        await _end(process)


async def _started(config: RunConfig) -> asyncio.subprocess.Process | None:
    page = config.sluice.dashboard
    if page.port is None:
        return None
    command = ["-m", "sluice.cli.main", "dashboard", config.sluice.run_dir]
    command += ["--host", page.host, "--port", str(page.port)]
    environment = {**os.environ, SUPERVISOR_VARIABLE: str(os.getpid())}
    try:
        _leave_config(config)
        return await asyncio.create_subprocess_exec(
            sys.executable, *command, env=environment, stdin=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        logger.warning("the live page cannot be started: %s", error)
        return None


def _leave_config(config: RunConfig) -> None:
    """The launcher leaves it in the run's folder; `torchrun` without it does not.

    Raises:
        OSError: the folder cannot be written.
    """
    file = Path(config.sluice.run_dir) / CONFIG_NAME
    if not file.exists():
        write_config(config, file)


async def _log_end(process: asyncio.subprocess.Process) -> None:
    code = await process.wait()
    logger.warning(
        "the live page has ended with exit code %d, training goes on; `sluice dashboard` with the "
        "run's folder shows it again",
        code,
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and SIGKILL if that does not help."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
