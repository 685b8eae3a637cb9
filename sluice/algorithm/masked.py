"""Sums, means and whitening over the positions a mask selects (verl's masked helpers).

`mask` is bool or 0/1, of the values' shape. What stands at a position outside of it is never
read, so NaN there is harmless.
"""

from __future__ import annotations

import torch

MEAN_EPSILON = 1e-8
WHITEN_EPSILON = 1e-8


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum over `dim`, or over everything, of the selected values; 0 where none is selected."""
    selected = torch.where(mask.bool(), values, torch.zeros_like(values))
    return selected.sum() if dim is None else selected.sum(dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """``masked_sum / (count + 1e-8)`` over `dim`, or over everything; 0 where none is selected."""
    selected = mask.bool()
    count = selected.sum() if dim is None else selected.sum(dim)
    return masked_sum(values, selected, dim) / (count + MEAN_EPSILON)


def masked_var(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Unbiased variance (count - 1) of the selected values, a 0-d tensor.

    Raises:
        ValueError: fewer than two positions are selected.
    """
    count = int(mask.bool().sum())
    if count < 2:
        raise ValueError(f"a variance needs at least 2 selected positions, the mask has {count}")
    centred = values - masked_mean(values, mask)
    return masked_mean(centred.square(), mask) * (count / (count - 1))


def masked_whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``(values - mean) / sqrt(variance + 1e-8)``, both over the selected positions.

    Positions outside the mask are transformed too; multiply by the mask where they must be 0.

    Raises:
        ValueError: fewer than two positions are selected.
    """
    variance = masked_var(values, mask)
    return (values - masked_mean(values, mask)) * torch.rsqrt(variance + WHITEN_EPSILON)
