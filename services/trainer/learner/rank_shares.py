"""Ranks that share the work of a pass, and the exchanges between them (docs/architecture.md, "Ranks
that share a sequence" and "Ranks that cut layers").

*Ranks that share a packed sequence* are Ulysses (Jacobs et al. 2023, "DeepSpeed Ulysses").

*Ranks that cut layers* cut a matrix by rows if its outputs are independent (queries, keys and
values by heads; gates), and by columns if its inputs are (the matrices after these). Between
matrices each rank has a part of the tokens, so that work per token, such as norms, is not repeated
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"). All
ranks gather the tokens before a matrix that is cut by rows. After a matrix that is cut by columns
each rank has a part of every sum, and the sums are scattered to the tokens' ranks.

Ranks exchange tensors of equal size: packed tokens are padded to a multiple of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from sluice.config.parallel_layout import SEQUENCE_KEY, TENSOR_KEY, sequence_sizes, shares_heads
from sluice.errors import ConfigError

_LONGEST_BY_ROTATION = {
    "longrope": "original_max_position_embeddings",
    "dynamic": "max_position_embeddings",
}
"""Rotations of positions that change for longer passes, and the setting that says from which."""
# torch 2.13 has other names for these.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedConfig

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    group: ProcessGroup
    rank: int
    size: int


class SequenceShare(_Share):
    """This rank's place among the ranks that share a sequence."""

    def cut(self, values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        """Return this rank's part of values [..., T], padded by 0: [..., T / size]."""
        padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % self.size)]
        return np.split(np.pad(values, padding), self.size, axis=-1)[self.rank]

    def local_indices(
        self, positions: npt.NDArray[np.int64], num_tokens: int
    ) -> npt.NDArray[np.int64]:
        """Return the indices of the packed positions that belong to this rank."""
        part_tokens = -(-num_tokens // self.size)
        return np.flatnonzero(positions // part_tokens == self.rank)

    def local_positions(
        self, positions: npt.NDArray[np.int64], num_tokens: int
    ) -> npt.NDArray[np.int64]:
        """Return this rank's packed positions as positions in its part."""
        return positions - self.rank * -(-num_tokens // self.size)

    def tokens_for_heads(
        self, query: Tensor, key: Tensor, value: Tensor, num_tokens: int
    ) -> Sequence[Tensor]:
        """Return all T tokens of this rank's heads, [1, heads / size, T, dim] each.

        Args:
            query: [1, heads, T / size, dim].
            key: [1, kv heads, T / size, dim]; fewer heads than ranks are repeated.
            value: the same.
            num_tokens: T without padding.

        """
        parts = [self._cut_heads(states) for states in (query, key, value)]
        exchanged = all_to_all(torch.cat(parts, dim=2), self.group)
        tokens = exchanged.flatten(0, 1)[:num_tokens]
        return [
            part.transpose(0, 1).unsqueeze(0)
            for part in tokens.split([part.shape[2] for part in parts], dim=1)
        ]

    def heads_for_tokens(self, attended: Tensor) -> Tensor:
        """Return this rank's tokens of all heads from all tokens [1, T, heads / size, dim]."""
        padding = -attended.shape[1] % self.size
        tokens = torch.nn.functional.pad(attended.squeeze(0), (0, 0, 0, 0, 0, padding))
        exchanged = all_to_all(tokens.unflatten(0, (self.size, -1)), self.group)
        return exchanged.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def whole_tokens(self, values: Tensor, indices: Tensor, num_values: int) -> Tensor:
        """Return values of all response tokens [k, N] from this rank's [k, n].

        The gradient of a rank's own values comes from its own loss, which all ranks compute alike.

        Args:
            values: float32.
            indices: int64 [n], the indices of these values among the N.
            num_values: N.
        """
        tokens: Tensor = _WholeTokens.apply(values, indices, num_values, self.group)  # type: ignore[no-untyped-call]
        return tokens

    def _cut_heads(self, states: Tensor) -> Tensor:
        """Return states [1, heads, t, dim] by receiver: [size, t, heads / size, dim]."""
        heads = states.shape[1]
        if heads < self.size:
            states = states.repeat_interleave(self.size // heads, dim=1)
        tokens, width = states.shape[2:]
        # [heads, t, dim] -> [size, heads / size, t, dim] -> [size, t, heads / size, dim]
        return states.reshape(self.size, -1, tokens, width).transpose(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class ImageRanks:
    """The ranks of a stage that train the same rows: they divide the images of these rows.

    Attributes:
        share: this rank's place among them, and its part of the tokens between layers; ``None`` if
            it has all tokens.
        encodes: whether this rank's stage has the vision tower.
    """

    share: SequenceShare | None = None
    encodes: bool = True


class TensorShare(_Share):
    """This rank's place among the ranks that cut a layer."""

    def gather(self, hidden: Tensor) -> Tensor:
        """Return all tokens [1, T, width] from this rank's [1, T / size, width].

        Each rank's gradient is a part of the sum.
        """
        gathered: Tensor = _AllGathered.apply(hidden.squeeze(0), self)  # type: ignore[no-untyped-call]
        return gathered.unsqueeze(0)

    def scatter(self, parts: Tensor) -> Tensor:
        """Return this rank's tokens [1, T / size, width] of the sum of all ranks' [1, T, width]."""
        scattered: Tensor = _Scattered.apply(parts.squeeze(0), self)  # type: ignore[no-untyped-call]
        return scattered.unsqueeze(0)

    def gather_values(self, values: Tensor) -> Tensor:
        """Return values of all tokens [T] from this rank's [T / size].

        The gradient of a rank's own values comes from its own loss, which all ranks compute alike.
        """
        gathered: Tensor = _Whole.apply(values, self)  # type: ignore[no-untyped-call]
        return gathered

    def local_slice(self, num_tokens: int) -> slice:
        """Return this rank's slice of a number of tokens that the ranks divide evenly."""
        part_tokens = num_tokens // self.size
        return slice(self.rank * part_tokens, (self.rank + 1) * part_tokens)


class RotationByLength(NamedTuple):
    """A rotation of positions that is another one if a pass has a row of more than `limit` tokens.

    `limit_key` is the setting with the limit, which a model may leave out.
    """

    kind: str
    limit_key: str
    limit: int | None


def rotation_by_length(config: PreTrainedConfig) -> RotationByLength | None:
    """Return the model's rotation that depends on the length; ``None`` if it has none."""
    settings = config.get_text_config().to_dict()
    rotation = settings.get("rope_parameters") or {}
    # Some families have one for each type of layer.
    by_layer_type = [each for each in rotation.values() if isinstance(each, dict)]
    for each in (rotation, *by_layer_type):
        kind = each.get("rope_type")
        if kind in _LONGEST_BY_ROTATION:
            limit_key = _LONGEST_BY_ROTATION[kind]
            return RotationByLength(kind, limit_key, each.get(limit_key) or settings.get(limit_key))
    return None


def check_shareable(size: int, config: PreTrainedConfig, tensor: int = 1) -> None:
    """Refuse a model whose sequences or attention heads this number of ranks cannot share.

    Args:
        tensor: the number of ranks that divide the heads first, evenly.

    Raises:
        ConfigError: names the heads and the possible sizes.
    """
    if size == 1:
        return
    text = config.get_text_config()
    if (rotation := rotation_by_length(config)) is not None:
        raise ConfigError(
            f"{SEQUENCE_KEY}={size}: the rotation of positions ({rotation.kind}) depends "
            "on the length of a sequence, and each rank would see a part of it; leave the key at 1"
        )
    heads: int = text.num_attention_heads
    kv_heads: int = (getattr(text, "num_key_value_heads", None) or heads) // tensor
    heads //= tensor
    if not shares_heads(size, heads, kv_heads):
        sizes = ", ".join(map(str, sequence_sizes(heads, kv_heads)))
        condition = f" that {TENSOR_KEY}={tensor} leaves" if tensor > 1 else ""
        raise ConfigError(
            f"{SEQUENCE_KEY}={size}: so many ranks cannot share {heads} attention heads and "
            f"{kv_heads} key-value heads{condition} evenly; give one of {sizes}"
        )


def all_to_all(
    parts: Tensor,
    group: ProcessGroup,
    sent: list[int] | None = None,
    received: list[int] | None = None,
) -> Tensor:
    """Send parts to the group's ranks, in order; return the received parts by sender.
    Differentiable.

    Args:
        parts: without sizes ``parts[r]`` goes to rank r; with sizes rows ``[n, ...]``.
        sent: rows for each rank.
        received: rows from each rank.
    """
    exchanged: Tensor = _AllToAll.apply(parts, group, sent, received)  # type: ignore[no-untyped-call]
    return exchanged


class _ShareContext(FunctionCtx):
    group: Any
    sent: list[int] | None
    received: list[int] | None
    saved_tensors: tuple[Tensor, ...]


class _AllToAll(torch.autograd.Function):
    """All-to-all whose gradients return to the senders."""

    @staticmethod
    def forward(
        ctx: _ShareContext,
        parts: Tensor,
        group: ProcessGroup,
        sent: list[int] | None,
        received: list[int] | None,
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchange(parts, group, sent, received)

    @staticmethod
    def backward(ctx: _ShareContext, of_output: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(of_output, ctx.group, ctx.received, ctx.sent), None, None, None


def _exchange(
    parts: Tensor, group: ProcessGroup, sent: list[int] | None, received: list[int] | None
) -> Tensor:
    rows = len(parts) if received is None else sum(received)
    output = parts.new_empty((rows, *parts.shape[1:]))
    dist.all_to_all_single(output, parts.contiguous(), received, sent, group=group)
    return output


class _WholeTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _ShareContext, values: Tensor, indices: Tensor, num_values: int, group: ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(indices)
        gathered = values.new_zeros((values.shape[0], num_values))
        gathered[:, indices] = values
        dist.all_reduce(gathered, group=group)  # each value is one rank's
        return gathered

    @staticmethod
    def backward(ctx: _ShareContext, of_output: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,) = ctx.saved_tensors
        return of_output[:, indices], None, None, None


class _CutContext(FunctionCtx):
    share: TensorShare


class _AllGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CutContext, tokens: Tensor, share: TensorShare) -> Tensor:
        ctx.share = share
        return _all_gather(tokens, share)

    @staticmethod
    def backward(ctx: _CutContext, of_all: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(of_all, ctx.share), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CutContext, parts: Tensor, share: TensorShare) -> Tensor:
        ctx.share = share
        return _reduce_scatter(parts, share)

    @staticmethod
    def backward(ctx: _CutContext, of_own: Tensor) -> tuple[Tensor, None]:
        return _all_gather(of_own, ctx.share), None


class _Whole(_AllGathered):
    @staticmethod
    def backward(ctx: _CutContext, of_all: Tensor) -> tuple[Tensor, None]:
        return of_all[ctx.share.local_slice(len(of_all))], None


def _all_gather(tokens: Tensor, share: TensorShare) -> Tensor:
    output = tokens.new_empty((tokens.shape[0] * share.size, *tokens.shape[1:]))
    _ALL_GATHER(output, tokens.contiguous(), group=share.group)
    return output


def _reduce_scatter(parts: Tensor, share: TensorShare) -> Tensor:
    output = parts.new_empty((parts.shape[0] // share.size, *parts.shape[1:]))
    _REDUCE_SCATTER(output, parts.contiguous(), group=share.group)
    return output
