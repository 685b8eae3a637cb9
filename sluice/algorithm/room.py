"""How many groups the fleet has room for."""

from __future__ import annotations


def groups_with_capacity(num_free: int, *, first_sequences: int, is_idle: bool) -> int:
    """Groups that may be asked of the fleet, by the sequences that each asks for at first.

    What a group with probes asks for later is not kept free for it: it waits, and is served before
    groups that start.

    Args:
        num_free: sequences that could start, less those that wait already; below 0 if more wait
            than fit.
        first_sequences: sequences of a group's first request, at least 1.
        is_idle: whether no group is under way. Then one has room wherever a sequence has: a group
            larger than a replica must run as well.

    Returns:
        at least 0.
    """
    capacity = max(0, num_free // first_sequences)
    return max(1, capacity) if is_idle and num_free > 0 else capacity
