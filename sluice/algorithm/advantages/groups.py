"""Statistics of the rows that share a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sluice.algorithm.advantages.inputs import AdvantageInputs


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
        """Groups of a batch.

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
        """Unbiased (n - 1) standard deviation of each row's group; 1 for a group of one."""
        squares = self.sum(self.centred(values).square())
        found = (squares / (self.row_sizes - 1).clamp(min=1)).sqrt()
        return torch.where(self.row_sizes == 1, 1.0, found)

    def _largest(self, values: torch.Tensor) -> torch.Tensor:
        lowest = values.new_full((self.sizes.numel(),), float("-inf"))
        return lowest.scatter_reduce_(0, self.of_row, values, "amax")[self.of_row]
