"""The learner in its own thread, so that the event loop stays responsive.

This thread does all torch work of rank 0 in order: updates, copies of the weights, checkpoints. A
second one may write a checkpoint from copies, while training continues.
Cancelling a wait does not stop the running work; `close` waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from sluice.concurrency.threads import OwnerThread
from sluice.concurrency.waits import waiting_for
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from services.trainer.learner.checkpoint import CheckpointStore
    from services.trainer.learner.rank_command import RankLeader
    from services.trainer.learner.step_measures import MemoryPeaks
    from sluice.types import DataProgress, TrainBatch


logger = logging.getLogger(__name__)

_END_S = 5.0

ResultT = TypeVar("ResultT")


class LearnerThread:
    """The train loop's view of all ranks' learners.

    Args:
        frees_cache: engines share the device, and take the memory that training does not hold.
    """

    def __init__(
        self,
        leader: RankLeader,
        store: CheckpointStore,
        peaks: MemoryPeaks,
        *,
        frees_cache: bool = False,
    ) -> None:
        self._leader = leader
        self._store = store
        self._peaks = peaks
        self._frees_cache = frees_cache
        self._thread = OwnerThread("learner")
        self._writer = OwnerThread("checkpoint")
        self._saving: Future[None] | None = None

    async def take_samples(self, outline: TrainBatch, step: int) -> str:
        """Let every rank read its samples (`RankLeader.take_samples`)."""
        return await self._run(lambda: self._leader.take_samples(outline, step))

    async def train(self, batch: TrainBatch, step: int) -> Mapping[str, float]:
        """Update the policy with the samples taken on all ranks; return metrics by verl's names."""

        if self._saving is not None and self._saving.done():
            await self.wait_until_saved()  # raises its error
        return await self._run(lambda: self._leader.train_step(batch, step))

    async def load(self, step: int, rate_factor: float) -> None:
        """Load the checkpoint of `step`; its learning rates are multiplied by `rate_factor`.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        await self.wait_until_saved()
        checkpoint = self._store.checkpoint(step)
        await self._run(lambda: self._leader.load(checkpoint.actor, rate_factor))

    def saved_steps(self) -> Collection[int]:
        """Return the steps of all complete checkpoints."""
        return self._store.saved_steps()

    def protect(self, protects: Callable[[Collection[int]], Collection[int]]) -> None:
        """Let a function choose checkpoints that no save deletes (`CheckpointStore.protects`)."""
        self._store.protects = protects

    async def freeze(self, version: int) -> None:
        """Copy the current weights as `version`, on each rank what it sends."""

        def freeze() -> None:
            self._leader.freeze(version)
            self._peaks.end_phase("update_weights")
            if self._frees_cache:
                self._peaks.empty_cache()

        await self._run(freeze)

    async def save(self, step: int, progress: DataProgress) -> str:
        """Write a checkpoint and return its folder.

        With ``actor.checkpoint.async_save`` training waits only for copies of what is to be saved;
        `wait_until_saved` and the next save wait for the rest. If that fails, the next step raises
        the error.
        """
        began_s = time.monotonic()
        await self.wait_until_saved()
        in_background = self._leader.saves_in_background

        def begin() -> None:
            write = self._leader.begin_save(self._store.begin(step))
            finish = partial(self._store.finish, step, write, progress)
            if not in_background:
                finish()
            self._peaks.end_phase("save_checkpoint")
            waited_s = time.monotonic() - began_s
            # From here: other ranks wait for the rest, also if our caller does not any more.
            self._saving = self._writer.submit(lambda: complete(finish, waited_s))

        def complete(finish: Callable[[], object], waited_s: float) -> None:
            if in_background:
                finish()
            logger.info(
                "checkpoint of step %d saved in %.1f s; training waited %.1f s of them",
                step,
                time.monotonic() - began_s,
                waited_s,
            )

        await self._run(begin)
        return str(self._store.folder(step))

    async def wait_until_saved(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._saving is not None:
            with waiting_for("checkpoint", "being written"):
                await asyncio.shield(asyncio.wrap_future(self._saving))

    def take_memory_metrics(self) -> Mapping[str, float]:
        """Return the step's peaks (`MemoryPeaks.take_metrics`), while no call runs."""
        return self._peaks.take_metrics()

    async def close(self) -> None:
        """Complete a checkpoint, then stop the other ranks, after the running work."""
        try:
            await self._run(lambda: None)  # a save whose caller was cancelled may begin yet
            await self.wait_until_saved()
        except Exception as error:
            logger.warning(
                "the last checkpoint is not complete: %s",
                error,
                exc_info=None if isinstance(error, SluiceError) else error,
            )
        try:
            await self._run(self._leader.stop)
        except SluiceError as error:  # an earlier call has already raised the cause
            logger.info("the other ranks did not get the stop command: %s", error)
        finally:
            self._writer.retire(lambda: None, within_s=_END_S)
            self._thread.retire(lambda: None, within_s=_END_S)

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        with waiting_for("learner thread", "ending its work"):
            return await self._thread.call(work)
