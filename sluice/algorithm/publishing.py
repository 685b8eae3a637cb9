"""When the transfer of a version may run beside the next step, and how many replicas swap at once.

*Beside the next step.* While the fleet still serves version v, the batch of v is trained and in
transfer, and the trainer takes the batch of v + 1. Groups that start meanwhile start under v, so
the batches of v + 2, ..., v + S are left for them: none at S = 1. An earlier take frees no batch
slot and takes none: the groups already held them. The trainer only waits less. At S = 1 it would
gain nothing: the batch of v + 1 waits until no group of v runs.

*In turns.* A replica that swaps weights samples no token. If replicas swap one after another, the
fleet keeps the capacity of all others. Where generation and training alternate (S = 0), the fleet
is idle anyway, and all swap together.
"""

from __future__ import annotations

import math

LEAST_STALENESS = 2
"""S from which a group that starts during a transfer finds a batch slot."""

MOST_TURNS = 8
"""A larger fleet swaps several replicas in a turn, so that the last one does not wait for long."""


def may_overlap(max_staleness: int) -> bool:
    """Return whether the transfer of a version may run beside the next step.

    Args:
        max_staleness: S >= 0, versions that a trained sample may lag behind.
    """
    return max_staleness >= LEAST_STALENESS


def swaps_at_once(num_replicas: int, max_staleness: int) -> int:
    """Return how many of the replicas that get a version swap at the same time, at least 1.

    Args:
        num_replicas: replicas that get it.
        max_staleness: S >= 0, versions that a trained sample may lag behind.
    """
    if max_staleness == 0:
        return max(1, num_replicas)
    return max(1, math.ceil(num_replicas / MOST_TURNS))
