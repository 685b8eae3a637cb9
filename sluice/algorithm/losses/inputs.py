"""The inputs of a policy loss: flat response tokens of one micro-batch, sums over its rows, and
global counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


def row_sums(values: torch.Tensor, row_index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Sum of each row's tokens, [rows]; 0 for a row without tokens."""
    zeros = torch.zeros(num_rows, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, row_index, values)


def row_means(values: torch.Tensor, row_index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the mean of each row's tokens, [rows]; 0 for a row without tokens."""
    lengths = torch.bincount(row_index, minlength=num_rows).clamp(min=1)
    return row_sums(values, row_index, num_rows) / lengths


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """Denominators over the whole mini-batch, that is all micro-batches of all ranks.

    Args:
        tokens: response tokens, before any were rejected.
        rows: responses, empty ones included.
        groups: prompts; only losses over groups need it.
    """

    tokens: float
    rows: float
    groups: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """N response tokens of R rows without padding; `row_index` gives the row of each token.

    All tokens of a row are in the same inputs. Only `logprobs` carries a gradient.
    """

    logprobs: torch.Tensor  # float [N], of the policy being updated
    old_logprobs: torch.Tensor  # float [N], of the policy before the train batch
    advantages: torch.Tensor  # float [N]
    row_index: torch.Tensor  # int64 [N], values in 0..num_rows - 1
    num_rows: int  # R, empty rows included
    rollout_weights: torch.Tensor | None = None  # float [N], importance weights of the tokens
    rollout_logprobs: torch.Tensor | None = None  # float [N], behavior logprobs
    row_groups: tuple[int, ...] | None = None  # [R], equal for rows of one prompt
    row_advantages: torch.Tensor | None = None  # float [R], for losses over whole rows
    seed: int = 0  # for random choices; differs by micro-batch and step

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.logprobs.numel()

    def select_tokens(self, keep: torch.Tensor) -> LossInputs:
        """Return the same rows with only the tokens where `keep` (bool [N]) is true."""
        return replace(
            self,
            logprobs=self.logprobs[keep],
            old_logprobs=self.old_logprobs[keep],
            advantages=self.advantages[keep],
            row_index=self.row_index[keep],
            rollout_weights=_select(self.rollout_weights, keep),
            rollout_logprobs=_select(self.rollout_logprobs, keep),
        )


def _select(values: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[mask]


@dataclass(frozen=True, slots=True, eq=False)
class MetricMean:
    """A mean kept as `total` and `count`.

    Add both over micro-batches and ranks, then divide: the exact mean over the mini-batch,
    however it was cut. (verl averages the means of micro-batches, which depends on the cut; for one
    micro-batch both are equal.)
    """

    total: torch.Tensor  # 0-d, detached
    count: int

    @property
    def mean(self) -> float:
        """``total / count``, 0 for nothing."""
        return float(self.total) / max(self.count, 1)
