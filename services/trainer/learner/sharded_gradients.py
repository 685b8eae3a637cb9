"""Gradients of sharded parameters: a rank has those of its shards, summed by the backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from services.trainer.learner.parallel import DataParallel


class Gradients(Protocol):
    """The gradients that one optimizer steps with."""

    @property
    def buffers(self) -> Sequence[Tensor]:
        """What must still be summed over ranks before a step."""
        ...

    def complete(self) -> None:
        """Give every parameter a gradient, 0 where no pass left one."""
        ...

    def zero(self) -> None:
        """Set all gradients to 0."""
        ...

    def norm(self) -> float:
        """Global L2 norm over all ranks' parts, the same bits on each."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        ...


class ShardedGradients:
    """FSDP2 makes a gradient per shard in the last backward pass of a step and sums it over ranks.

    `norm` is collective.

    Args:
        parameters: sharded.
        parallel: all ranks.
        num_copies: ranks that hold the same shard.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], parallel: DataParallel, num_copies: int
    ) -> None:
        self._parameters, self._parallel = list(parameters), parallel
        self._num_copies = num_copies
        self.buffers: tuple[Tensor, ...] = ()

    def complete(self) -> None:
        """Zeros for parameters that no backward pass reached."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def zero(self) -> None:
        """Drop them; the next backward pass makes them again."""
        for parameter in self._parameters:
            parameter.grad = None

    def norm(self) -> float:
        """In float32 on the rank, summed over ranks in float64; a shard held twice counts once."""
        squares = [torch.linalg.vector_norm(g, dtype=torch.float32).square() for g in self._local()]
        own = float(sum(squares)) if squares else 0.0
        gathered = self._parallel.all_gather([own], "summing the gradients' norms")
        return math.sqrt(sum(part for (part,) in gathered) / self._num_copies)

    def scale(self, factor: float) -> None:
        """Each rank its shards."""
        for gradient in self._local():
            gradient.mul_(factor)

    def _local(self) -> list[Tensor]:
        gradients = (parameter.grad for parameter in self._parameters)
        return [g.to_local() if isinstance(g, DTensor) else g for g in gradients if g is not None]
