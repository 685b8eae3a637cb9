"""Sums, means and maxima of flat tokens over their rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Which row each token belongs to; only rows with tokens are numbered.

    A row without tokens has no ratio. verl counts it as ratio 0 and perplexity 1, which tells
    nothing of the policies.

    Args:
        of_token: int64 [tokens], values in ``0..rows - 1``.
        lengths: int64 [rows], all >= 1.
    """

    of_token: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, row_index: torch.Tensor) -> TokenRows:
        """Number the rows that occur in `row_index` [tokens]."""
        _, of_token, lengths = torch.unique(row_index, return_inverse=True, return_counts=True)
        return cls(of_token, lengths)

    def on_cpu(self) -> TokenRows:
        """The same rows for tensors in host memory."""
        return TokenRows(self.of_token.cpu(), self.lengths.cpu())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over each row: float [tokens] to [rows]."""
        return values.new_zeros(self.lengths.numel()).index_add_(0, self.of_token, values)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over each row: float [tokens] to [rows]."""
        return self.sum(values) / self.lengths

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum over each row: float [tokens] to [rows]."""
        lowest = values.new_full((self.lengths.numel(),), float("-inf"))
        return lowest.scatter_reduce_(0, self.of_token, values, "amax")

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Whether a flag is set in each row: bool [tokens] to [rows]."""
        return self.sum(flags.float()) > 0
