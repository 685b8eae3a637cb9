"""Decide when the transfer of a version may run beside the next step, how many replicas swap at
once, and how many keep a version under validation (docs/architecture.md, "Weights").

While the fleet still serves version v, the batch of v is trained and in transfer, and the trainer
takes the batch of v + 1. Groups that start meanwhile start under v, so the batches of v + 2, ...,
v + S are left for them: none at S = 1. There it would gain nothing: the batch of v + 1 waits until
no group of v runs.
"""

from __future__ import annotations

import math

MIN_STALENESS = 2
"""S from which a group that starts during a transfer finds a batch slot."""

HELD_SHARE = 0.25
"""Share of the replicas that keep a validated version."""

MAX_TURNS = 8
"""A larger fleet swaps several replicas in a turn, so that the last one does not wait for long."""


def may_overlap(max_staleness: int) -> bool:
    """Return whether the transfer of a version may run beside the next step.

    Args:
        max_staleness: S >= 0, versions that a trained sample may lag behind.
    """
    return max_staleness >= MIN_STALENESS


def swaps_at_once(num_replicas: int, max_staleness: int) -> int:
    """Return how many of the replicas that get a version swap at the same time, at least 1."""
    if max_staleness == 0:
        return max(1, num_replicas)
    return max(1, math.ceil(num_replicas / MAX_TURNS))


def num_held_for_validation(num_replicas: int, max_staleness: int) -> int:
    """Return how many replicas keep a version until its validation ends; 0: the next one waits."""
    if max_staleness == 0 or num_replicas < 2:
        return 0
    return math.ceil(num_replicas * HELD_SHARE)
