"""Low-rank adapters on the wire: each stands beside the weight that it changes.

An adapter (LoRA, https://arxiv.org/abs/2106.09685) of ``X.weight`` [out, in] is ``X.lora_A.weight``
[rank, in] and ``X.lora_B.weight`` [out, rank]. On the wire B is already multiplied by the scale, so
the weight to compute with is W + B A. W never changes: an update that carries only changes carries
A and B, and every version is merged from the same W, so that no rounding adds up.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"


def is_adapter(name: str) -> bool:
    """Return whether a tensor is one half of an adapter."""
    return name.endswith((A_SUFFIX, B_SUFFIX))


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """Return W + scale B A, computed in float32 or more and rounded once to W's dtype."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    product = torch.addmm(weight.to(dtype), b.to(dtype), a.to(dtype), alpha=scale)
    return product.to(weight.dtype)


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
    """Return the shapes that `merge_adapters` gives; what is no adapter of a weight there stays."""
    found = dict(shapes)
    for name in [name for name in shapes if name.endswith(A_SUFFIX)]:
        module = name.removesuffix(A_SUFFIX)
        weight, a, b = shapes.get(f"{module}.weight"), shapes[name], shapes.get(module + B_SUFFIX)
        if weight and b and len(a) == len(b) == 2 and a[0] == b[1] and weight == (b[0], a[1]):
            del found[name], found[module + B_SUFFIX]
    return found
