"""The learner behind a thread of its own, so that the event loop stays free.

All torch work of rank 0 happens in that thread, in order: updates, copies of the weights,
checkpoints. A cancelled wait does not stop the work under way; `close` waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from services.trainer.learner.ranks.gathering import TensorSet
from sluice.concurrency.waits import waiting_for
from sluice.errors import SluiceError
from sluice.weights.snapshot import SnapshotBuffers

if TYPE_CHECKING:
    from services.trainer.learner.checkpoint import CheckpointStore
    from services.trainer.learner.rank_command import RankLeader
    from sluice.types import DataProgress, TrainBatch


logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class LearnerThread:
    """What the train loop calls.

    Args:
        leader: all ranks together.
        snapshots: where frozen versions go.
        store: where checkpoints go.
        freeze_timeout_s: how long a freeze waits for a broadcast of the version before the last.
        observe: further metrics of a step that has just been trained; called in the thread.
    """

    def __init__(
        self,
        leader: RankLeader,
        snapshots: SnapshotBuffers,
        store: CheckpointStore,
        freeze_timeout_s: float,
        observe: Callable[[TrainBatch, int], Mapping[str, float]],
    ) -> None:
        self._leader = leader
        self._snapshots = snapshots
        self._store = store
        self._freeze_timeout_s = freeze_timeout_s
        self._observe = observe
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    async def train(self, batch: TrainBatch, step: int) -> Mapping[str, float]:
        """Updates the policy on all ranks; metrics by verl's names."""

        def train() -> Mapping[str, float]:
            trained = self._leader.train_step(batch, step)
            return {**trained, **self._observe(batch, step)}

        return await self._run(train)

    async def freeze(self, version: int) -> None:
        """Copies the present weights as `version`; if they are sharded, with the other ranks."""

        def freeze() -> None:
            with self._leader.whole(TensorSet.WIRE_WEIGHTS) as weights:
                self._snapshots.write(weights, version, self._freeze_timeout_s)

        await self._run(freeze)

    async def save(self, step: int, progress: DataProgress) -> str:
        """Writes a checkpoint; its folder."""
        folder = await self._run(
            lambda: self._store.save(step, self._leader.save, progress, {"policy_version": step})
        )
        return str(folder)

    async def close(self) -> None:
        """Tells the other ranks to stop, after what is under way."""
        try:
            await self._run(self._leader.stop)
        except SluiceError as error:  # why they are gone is told by whoever met it first
            logger.info("the other ranks were not told to stop: %s", error)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        with waiting_for("learner thread", "ending its work"):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
