"""What a loss by token returns before it is weighed and aggregated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """Per-token loss and the metrics that go with it.

    `metric_sums` holds, by metric name, detached 0-d sums over tokens. Add them and `num_tokens`
    over micro-batches and ranks, then divide: the exact token mean of the mini-batch, however it
    was cut. (verl averages the means of micro-batches, which depends on the cut.)
    """

    loss: torch.Tensor  # [tokens]
    metric_sums: Mapping[str, torch.Tensor]
    num_tokens: int
