"""Sums and means over rows of a flat, ragged layout; differentiable in the values."""

from __future__ import annotations

import torch


def row_index_of_offsets(offsets: torch.Tensor) -> torch.Tensor:
    """The row of each token, int64 [N], from segment offsets.

    Args:
        offsets: int64 [rows + 1], ascending from 0 to N: row i holds tokens
            ``offsets[i]..offsets[i + 1] - 1``.
    """
    lengths = offsets.diff()
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=offsets.device), lengths)


def row_sums(values: torch.Tensor, row_index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Sum of each row's tokens, [rows]; 0 for a row without tokens."""
    zeros = torch.zeros(num_rows, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, row_index, values)


def row_lengths(row_index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Tokens of each row, int64 [rows]."""
    return torch.bincount(row_index, minlength=num_rows)


def row_means(values: torch.Tensor, row_index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Mean of each row's tokens, [rows]; 0 for a row without tokens."""
    lengths = row_lengths(row_index, num_rows).clamp(min=1)
    return row_sums(values, row_index, num_rows) / lengths
