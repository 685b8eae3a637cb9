"""Whether the trainer's and the reward service's counts of prompts agree."""

from __future__ import annotations

from collections.abc import Mapping

_ENDS = ("trained", "filtered_", "dropped_", "skipped")


def acknowledged_groups(accounts: Mapping[str, float]) -> float:
    """Groups that the reward service knows as trained since its start."""
    return accounts.get("groups_acknowledged", accounts.get("trained", 0.0))


def settled_accounts(
    accounts: Mapping[str, float], *, groups_trained: int, acknowledged_before: float
) -> dict[str, float]:
    """The accounts with the trainer's own count beside them.

    Args:
        accounts: the reward service's, as `RewardClient.accounts` gives them.
        groups_trained: groups of all batches that this trainer has trained.
        acknowledged_before: `acknowledged_groups` before this trainer's first batch.

    Returns:
        `accounts` with ``groups_trained``, ``groups_acknowledged`` (what the reward service knows
        as trained by this trainer) and ``prompts_lost``: what the reward service has lost, prompts
        that neither ended nor are pending, and the difference between the two counts, added up.
        0 in a run that kept its books.
    """
    acknowledged = acknowledged_groups(accounts) - acknowledged_before
    ended = sum(count for name, count in accounts.items() if name.startswith(_ENDS))
    unexplained = accounts.get("submitted", 0.0) - ended - accounts.get("pending", 0.0)
    lost = abs(accounts.get("prompts_lost", 0.0))
    return {
        **accounts,
        "groups_trained": float(groups_trained),
        "groups_acknowledged": acknowledged,
        "prompts_lost": lost + abs(unexplained) + abs(groups_trained - acknowledged),
    }
