"""Low-rank adapters on the wire, each sent beside the weight that it changes.

An adapter (LoRA, https://arxiv.org/abs/2106.09685) of ``X.weight`` [out, in] is ``X.lora_A.weight``
[rank, in] and ``X.lora_B.weight`` [out, rank]. On the wire B is already multiplied by the scale, so
the weight to compute with is W + B A. W never changes: an update that carries only changes carries
A and B, and every version is merged from the same W, so that no rounding adds up.

Experts have one tensor for all of them, ``X.experts.gate_up_proj`` [experts, 2 width, hidden] and
``X.experts.down_proj``; the adapters of each expert's ``gate_proj``, ``up_proj`` and ``down_proj``
too: ``X.experts.each.up_proj.lora_A.weight`` [experts, rank, in]. Files have the names of peft
(https://github.com/huggingface/peft): ``X.experts.7.up_proj.lora_A.weight`` [rank, in].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice.weights.share import Cuts, block_slices

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT_BYTES = 4
A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"
EACH = "each"
"""Replaces an expert's number in the names of adapters of all experts."""
_OF_EACH = f".experts.{EACH}."


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """The part of a weight that an adapter changes: one of `count` equal parts of the rows of
    `weight`."""

    weight: str
    number: int = 0
    count: int = 1

    def view(self, weight: Tensor) -> Tensor:
        """Return a view of the part, [..., out, in]."""
        return weight.chunk(self.count, dim=-2)[self.number]


PROJECTIONS: Mapping[str, AdaptedPart] = {
    "gate_proj": AdaptedPart("gate_up_proj", 0, 2),
    "up_proj": AdaptedPart("gate_up_proj", 1, 2),
    "down_proj": AdaptedPart("down_proj"),
}
"""The layers of an expert, each a part of the weight of all experts."""


def is_adapter(name: str) -> bool:
    """Return whether a tensor is one half of an adapter."""
    return name.endswith((A_SUFFIX, B_SUFFIX))


def is_of_experts(layer: str) -> bool:
    """Return whether a layer belongs to all experts of a block."""
    block, of_each, projection = layer.rpartition(_OF_EACH)
    return bool(block and of_each) and projection in PROJECTIONS


def names_in_files(name: str, experts: int) -> list[str]:
    """Return the names of a layer or its tensors in files: one per expert, if it has experts.

    Args:
        name: the name of a layer, or of one half of its adapter.
        experts: the number of experts, if the layer belongs to experts.
    """
    if _OF_EACH not in name:
        return [name]
    return [name.replace(_OF_EACH, f".experts.{number}.") for number in range(experts)]


def adapted_part(layer: str) -> AdaptedPart:
    """Return the part of a weight that a layer's adapter changes."""
    if not is_of_experts(layer):
        return AdaptedPart(f"{layer}.weight")
    block, _, projection = layer.rpartition(_OF_EACH)
    part = PROJECTIONS[projection]
    return AdaptedPart(f"{block}.experts.{part.weight}", part.number, part.count)


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """Return W + scale B A, computed in float32 at least and rounded once to W's dtype."""
    exact = weight.clone() if weight.element_size() >= _FLOAT_BYTES else weight.float()
    return exact.addmm_(b.to(exact.dtype), a.to(exact.dtype), alpha=scale).to(weight.dtype)


def merge_adapters(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the merged weights; without adapters the same mapping.

    Memory: a second copy of the adapted weights.
    """
    if not any(map(is_adapter, tensors)):
        return tensors
    weights = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    for name in [name for name in tensors if name.endswith(A_SUFFIX)]:
        layer = name.removesuffix(A_SUFFIX)
        a, b, part = tensors[name], tensors[layer + B_SUFFIX], adapted_part(layer)
        if not is_of_experts(layer):
            weights[part.weight] = merged_weight(weights[part.weight], a, b)
            continue
        if weights[part.weight] is tensors[part.weight]:
            weights[part.weight] = weights[part.weight].clone()
        # One by one, to avoid a float32 copy of all experts.
        for expert, expert_a, expert_b in zip(part.view(weights[part.weight]), a, b, strict=True):
            expert.copy_(merged_weight(expert, expert_a, expert_b))
    return weights


def merge_part(weight: Tensor, cuts: Cuts, layer: str, a: Tensor, b: Tensor) -> None:
    """Add B A, in place, to the part of a weight that a share has.

    Args:
        weight: [out, in], or [experts, out, in]; only the share's part is read and written.
        cuts: the cuts of the share; empty for the whole weight.
        layer: the layer of the adapter.
        a: the whole A.
        b: the whole B.
    """
    part = adapted_part(layer)
    height = weight.shape[-2] // part.count
    first_row = part.number * height
    for (*experts, rows, columns), _ in block_slices(tuple(weight.shape), cuts):
        start, stop = max(rows.start, first_row), min(rows.stop, first_row + height)
        for index in range(experts[0].start, experts[0].stop) if experts else (...,):
            block = weight[index][start:stop, columns]
            changes = a[index][:, columns], b[index][start - first_row : stop - first_row]
            if start < stop:
                block.copy_(merged_weight(block, *changes))


def merged_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes after `merge_adapters`; keep tensors that are no adapter of a weight.

    An adapter's rank is limited to the larger side of its weight, so that a sender cannot demand
    unlimited memory.
    """
    remaining = dict(shapes)
    for name in [name for name in shapes if name.endswith(A_SUFFIX)]:
        layer = name.removesuffix(A_SUFFIX)
        part, dimensions = adapted_part(layer), 3 if is_of_experts(layer) else 2
        offered = [shapes.get(tensor) for tensor in (part.weight, name, layer + B_SUFFIX)]
        present = [shape for shape in offered if shape is not None and len(shape) == dimensions]
        if len(present) == len(offered) and _fits(part.count, *present):
            del remaining[name], remaining[layer + B_SUFFIX]
    return remaining


def _fits(parts: int, weight: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether A and B have the shapes of an adapter of one of a weight's parts."""
    *experts, rows, columns = weight
    rank = a[-2]
    expected = ([*experts, rank, columns], [*experts, rows // parts, rank])
    return rows % parts == 0 and ([*a], [*b]) == expected and rank <= max(rows // parts, columns)
