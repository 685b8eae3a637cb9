"""Ranks of a sharded model make equally many passes, whatever their shares of the rows.

Each pass gathers the layers' weights from all ranks. A rank whose rows fill fewer micro-batches
than another's makes up for it with passes over a made-up row whose gradient is 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from services.trainer.learner.micro_batch import MicroBatch, TrainingRow, build_micro_batch
from services.trainer.learner.parallel import DataParallel
from services.trainer.learner.shards import Shards
from sluice.algorithm.packing import plan_micro_batches


class EvenPasses:
    """Counts one model's passes; does nothing for a model that each rank holds whole.

    Every method but `before_backward` is collective.

    Args:
        shards: the model; ``None`` if it is not sharded.
        parallel: all ranks.
        idle_pass: runs the model forward over a micro-batch; a value per token.
        device: where its inputs are.
    """

    def __init__(
        self,
        shards: Shards | None,
        parallel: DataParallel,
        idle_pass: Callable[[MicroBatch], Tensor],
        device: torch.device,
    ) -> None:
        self._shards, self._parallel, self._device = shards, parallel, device
        self._idle_pass = idle_pass
        self._own = self._left = 0

    def begin(self, own: int) -> None:
        """In front of `own` passes, without gradients or of one optimizer step."""
        self._own = own
        self._left = 0 if self._shards is None else self._most(own)

    @torch.no_grad()
    def end_forward_only(self) -> None:
        """After passes without gradients: as many more as the busiest rank makes."""
        if self._shards is None:
            return
        for _ in range(self._left - self._own):
            self._idle_pass(idle_micro_batch(self._device))
        self._shards.reshard()

    def before_backward(self) -> None:
        """In front of each backward pass: the last one sums the gradients over ranks."""
        if self._shards is not None:
            self._left -= 1
            self._shards.sum_gradients(self._left == 0)

    def end_step(self) -> None:
        """The passes that the busiest rank makes and this one has no rows for."""
        while self._left > 0:
            idle = self._idle_pass(idle_micro_batch(self._device)).sum() * 0.0
            self.before_backward()
            idle.backward()

    def _most(self, own: int) -> int:
        gathered = self._parallel.all_gather([float(own)], "counting micro-batches")
        return int(max(count for (count,) in gathered))


def idle_micro_batch(device: torch.device) -> MicroBatch:
    """One row of one token after a prompt of one."""
    token = np.zeros(1, np.uint32)
    row = TrainingRow(0, 0, token, token, np.zeros(1, np.float32))
    (plan,) = plan_micro_batches([row.size], range(1), rows_per_micro=1)
    micro_batch = build_micro_batch([row], plan, device)
    assert micro_batch is not None
    return micro_batch
