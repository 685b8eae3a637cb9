"""Ranks that cut each layer of a model: each computes a part of every product of matrices.

A matrix is cut by rows where its outputs are apart (queries, keys and values by heads; gates), and
by columns where its inputs are (what follows them). Between matrices each rank has a part of the
tokens, so what works on one token at a time, as norms do, is not done twice (Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models"). All ranks gather the tokens
before a matrix that is cut by rows. After one that is cut by columns each has a part of every sum;
the sums come to the rank of the token.

Tensors of equal sizes travel: a packed line is padded to a multiple of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# torch 2.13 has other names for these.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, slots=True, eq=False)
class TensorShare:
    """This rank's place among the ranks that cut a layer."""

    group: ProcessGroup
    rank: int
    size: int

    def gather(self, hidden: Tensor) -> Tensor:
        """Return all tokens [1, T, width] from this rank's [1, T / size, width].

        Each rank's gradient is a part of the sum.
        """
        found: Tensor = _AllGathered.apply(hidden.squeeze(0), self)  # type: ignore[no-untyped-call]
        return found.unsqueeze(0)

    def scatter(self, parts: Tensor) -> Tensor:
        """Return this rank's tokens [1, T / size, width] of the sum of all ranks' [1, T, width]."""
        found: Tensor = _Scattered.apply(parts.squeeze(0), self)  # type: ignore[no-untyped-call]
        return found.unsqueeze(0)

    def whole(self, values: Tensor) -> Tensor:
        """Return values of all tokens [T] from this rank's [T / size].

        The gradient of a rank's own values comes from its own loss, which all ranks compute alike.
        """
        found: Tensor = _Whole.apply(values, self)  # type: ignore[no-untyped-call]
        return found

    def own(self, num_tokens: int) -> slice:
        """Return this rank's tokens of so many; they divide."""
        each = num_tokens // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


class _CutContext(FunctionCtx):
    share: TensorShare


class _AllGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CutContext, tokens: Tensor, share: TensorShare) -> Tensor:
        ctx.share = share
        return _gathered(tokens, share)

    @staticmethod
    def backward(ctx: _CutContext, of_all: Tensor) -> tuple[Tensor, None]:
        return _scattered(of_all, ctx.share), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CutContext, parts: Tensor, share: TensorShare) -> Tensor:
        ctx.share = share
        return _scattered(parts, share)

    @staticmethod
    def backward(ctx: _CutContext, of_own: Tensor) -> tuple[Tensor, None]:
        return _gathered(of_own, ctx.share), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CutContext, values: Tensor, share: TensorShare) -> Tensor:
        ctx.share = share
        return _gathered(values, share)

    @staticmethod
    def backward(ctx: _CutContext, of_all: Tensor) -> tuple[Tensor, None]:
        return of_all[ctx.share.own(len(of_all))], None


def _gathered(tokens: Tensor, share: TensorShare) -> Tensor:
    found = tokens.new_empty((tokens.shape[0] * share.size, *tokens.shape[1:]))
    _ALL_GATHER(found, tokens.contiguous(), group=share.group)
    return found


def _scattered(parts: Tensor, share: TensorShare) -> Tensor:
    found = parts.new_empty((parts.shape[0] // share.size, *parts.shape[1:]))
    _REDUCE_SCATTER(found, parts.contiguous(), group=share.group)
    return found
