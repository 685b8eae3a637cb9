"""Trainer ranks as threads of one process, for rules about what ranks compute together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from services.trainer.learner.ranks import ParallelContext

PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")
TIMEOUT_S = 60.0


class ThreadedRank(ParallelContext):
    """One rank; collectives go through a board that all threads share.

    Until `is_joined` the others are taken to say the same.
    """

    def __init__(self, rank: int, board: list[object], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.world_size = rank, len(board)
        self.is_joined = False
        self._board, self._barrier = board, barrier

    def _exchange(self, mine: object) -> list[object]:
        if not self.is_joined:
            return [mine] * self.world_size
        self._board[self.rank] = mine
        self._barrier.wait(TIMEOUT_S)
        everyone = list(self._board)
        self._barrier.wait(TIMEOUT_S)
        return everyone

    def all_reduce_sum(self, tensors: Sequence[torch.Tensor], phase: str) -> None:
        copies = self._exchange([tensor.clone() for tensor in tensors])
        for index, tensor in enumerate(tensors):
            tensor.copy_(sum(copy[index] for copy in copies))  # type: ignore[index,arg-type]

    def all_gather(self, values: Sequence[float], phase: str) -> list[list[float]]:
        gathered = self._exchange(list(values))
        assert len({len(part) for part in gathered}) == 1, phase  # type: ignore[arg-type]
        return gathered  # type: ignore[return-value]

    def broadcast_bytes(self, payload: bytes | None, phase: str) -> bytes:
        return self._exchange(payload)[0]  # type: ignore[return-value]

    def shard_mesh(self, size: int) -> None:
        """torch's groups are one a process: each thread holds the whole model."""

    def naming_failures(self, phase: str) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None:
        """Nothing is open."""


def on_ranks(
    world_size: int, build: Callable[[ParallelContext], PartT], work: Callable[[PartT], ResultT]
) -> list[ResultT]:
    """Build each rank's part one after the other, then have all `work` at once.

    Loading models and drawing random weights is not for several threads at a time. Results are in
    order of rank; an error of one ends all.
    """
    board: list[object] = [None] * world_size
    barrier = threading.Barrier(world_size)
    ranks = [ThreadedRank(rank, board, barrier) for rank in range(world_size)]
    parts = [build(rank) for rank in ranks]
    for rank in ranks:
        rank.is_joined = True

    def run(part: PartT) -> ResultT:
        try:
            return work(part)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as threads:
        return [future.result() for future in [threads.submit(run, part) for part in parts]]
