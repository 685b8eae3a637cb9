"""Low-rank adapters on the wire: each stands beside the weight that it changes.

An adapter (LoRA, https://arxiv.org/abs/2106.09685) of ``X.weight`` [out, in] is ``X.lora_A.weight``
[rank, in] and ``X.lora_B.weight`` [out, rank]. On the wire B is already multiplied by the scale, so
the weight to compute with is W + B A. W never changes: an update that carries only changes carries
A and B, and every version is merged from the same W, so that no rounding adds up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT_BYTES = 4
A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"


def is_adapter(name: str) -> bool:
    """Return whether a tensor is one half of an adapter."""
    return name.endswith((A_SUFFIX, B_SUFFIX))


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """Return W + scale B A, computed in float32 at least and rounded once to W's dtype."""
    exact = weight.clone() if weight.element_size() >= _FLOAT_BYTES else weight.float()
    return exact.addmm_(b.to(exact.dtype), a.to(exact.dtype), alpha=scale).to(weight.dtype)


def merge_adapters(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the weights to compute with; without adapters the same mapping.

    Memory: the adapted weights once more.
    """
    if not any(map(is_adapter, tensors)):
        return tensors
    weights = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    for name in [name for name in tensors if name.endswith(A_SUFFIX)]:
        module = name.removesuffix(A_SUFFIX)
        weight = f"{module}.weight"
        weights[weight] = merged(weights[weight], tensors[name], tensors[f"{module}{B_SUFFIX}"])
    return weights


def merged_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that `merge_adapters` gives; what is no adapter of a weight there stays.

    An adapter's rank is at most the larger side of its weight, so that a sender cannot ask for any
    amount of memory.
    """
    found = dict(shapes)
    for name in [name for name in shapes if name.endswith(A_SUFFIX)]:
        module = name.removesuffix(A_SUFFIX)
        weight, a, b = (shapes.get(f"{module}{one}") for one in (".weight", A_SUFFIX, B_SUFFIX))
        if weight and a and b and len(weight) == len(a) == len(b) == 2:
            rank = a[0]
            if (a, b) == ((rank, weight[1]), (weight[0], rank)) and rank <= max(weight):
                del found[name], found[module + B_SUFFIX]
    return found
