"""Sums, means and whitening over masked positions, and statistics of the rows that share a
prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sluice.algorithm.advantages.inputs import AdvantageInputs

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
    """Return the unbiased variance (count - 1) of the selected values, a 0-d tensor.

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


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups numbered 0..num_groups - 1, of any sizes and in any order of rows.

    Args:
        of_row: int64 [rows], number of the row's group.
        sizes: int64 [groups], all >= 1.
    """

    of_row: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def of(cls, inputs: AdvantageInputs, *, estimator: str) -> Groups:
        """Return the groups of a batch.

        Raises:
            ConfigError: the batch has no group index.
        """
        index = inputs.required("group_index", estimator=estimator)
        _, of_row, sizes = torch.unique(index, return_inverse=True, return_counts=True)
        return cls(of_row, sizes)

    @property
    def row_sizes(self) -> torch.Tensor:
        """Size of each row's group, int64 [rows]."""
        return self.sizes[self.of_row]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over each row's group, on the row: values [rows, ...] to the same shape."""
        zeros = values.new_zeros((self.sizes.numel(), *values.shape[1:]))
        return zeros.index_add_(0, self.of_row, values)[self.of_row]

    def centred(self, values: torch.Tensor) -> torch.Tensor:
        """``value - mean of its group``, float [rows].

        Exactly 0 in a group of equal values: rounding of the mean must not be blown up by a
        division that follows.
        """
        deviations = values - self.sum(values) / self.row_sizes
        return torch.where(self._largest(values) == -self._largest(-values), 0.0, deviations)

    def std(self, values: torch.Tensor) -> torch.Tensor:
        """Return the unbiased (n - 1) std of each row's group; 1 for a group of one."""
        squares = self.sum(self.centred(values).square())
        found = (squares / (self.row_sizes - 1).clamp(min=1)).sqrt()
        return torch.where(self.row_sizes == 1, 1.0, found)

    def _largest(self, values: torch.Tensor) -> torch.Tensor:
        lowest = values.new_full((self.sizes.numel(),), float("-inf"))
        return lowest.scatter_reduce_(0, self.of_row, values, "amax")[self.of_row]
