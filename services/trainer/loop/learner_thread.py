"""The learner in its own thread, so that the event loop stays responsive.

This thread does all torch work of rank 0 in order: updates, copies of the weights, checkpoints.
Cancelling a wait does not stop the running work; `close` waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from services.trainer.learner.learner import TensorSet
from sluice.concurrency.threads import OwnerThread
from sluice.concurrency.waits import waiting_for
from sluice.errors import SluiceError
from sluice.weights.snapshot import SnapshotBuffers

if TYPE_CHECKING:
    from services.trainer.learner.checkpoint import CheckpointStore
    from services.trainer.learner.rank_command import RankLeader
    from sluice.types import DataProgress, TrainBatch


logger = logging.getLogger(__name__)

_END_S = 5.0

ResultT = TypeVar("ResultT")


class LearnerThread:
    """The train loop's view of all ranks' learners.

    Args:
        freeze_timeout_s: seconds that a freeze waits for a broadcast that still reads its buffer.
        observe: returns more metrics of a trained step; called in the thread.
    """

    def __init__(
        self,
        leader: RankLeader,
        snapshots: SnapshotBuffers,
        store: CheckpointStore,
        freeze_timeout_s: float,
        observe: Callable[[], Mapping[str, float]],
    ) -> None:
        self._leader = leader
        self._snapshots = snapshots
        self._store = store
        self._freeze_timeout_s = freeze_timeout_s
        self._observe = observe
        self._thread = OwnerThread("learner")

    async def train(self, batch: TrainBatch, step: int) -> Mapping[str, float]:
        """Update the policy on all ranks; return metrics by verl's names."""

        def train() -> Mapping[str, float]:
            trained = self._leader.train_step(batch, step)
            return {**trained, **self._observe()}

        return await self._run(train)

    async def freeze(self, version: int) -> None:
        """Copy the current weights as `version`; the other ranks help if they are sharded."""

        def freeze() -> None:
            is_first = self._snapshots.version is None
            wanted = TensorSet.WIRE_WEIGHTS if is_first else TensorSet.WIRE_CHANGES
            with self._leader.whole(wanted) as weights:
                self._snapshots.write(weights, version, self._freeze_timeout_s)

        await self._run(freeze)

    async def save(self, step: int, progress: DataProgress) -> str:
        """Write a checkpoint and return its folder."""
        return str(await self._run(lambda: self._store.save(step, self._leader.save, progress)))

    async def close(self) -> None:
        """Stop the other ranks, after the running work."""
        try:
            await self._run(self._leader.stop)
        except SluiceError as error:  # an earlier call has already raised the cause
            logger.info("the other ranks did not get the stop command: %s", error)
        finally:
            self._thread.retire(lambda: None, within_s=_END_S)

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        with waiting_for("learner thread", "ending its work"):
            return await self._thread.call(work)
