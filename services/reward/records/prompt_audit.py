"""Compare the pending prompts of the ledger with what must hold them."""

from __future__ import annotations

from collections import Counter

from services.reward.group_table import GroupTable
from services.reward.ledger.ledger import PromptLedger
from services.reward.source_groups import IN_FLIGHT, GroupState


def prompts_lost(ledger: PromptLedger, groups: GroupTable, num_waiting: int) -> int:
    """Count prompts that no event explains or that nothing holds; 0 unless there is a defect.

    The ledger's counts alone add up by construction. So its pending prompts are compared with two
    independent things: the events (accepted, ended), and what must hold a group in its state: the
    source of prompts, a task, the samples, the lease. The result is a sum of differences.
    """
    unexplained = ledger.num_submitted - sum(ledger.by_end.values()) - ledger.num_pending
    untracked = ledger.num_pending - len(groups)
    found = Counter(group.state for group in groups)
    leased = set(ledger.leased_ids())
    unheld = max(0, found[GroupState.WAITING] - num_waiting)
    unheld += sum(group.task is None for group in groups.in_state(*IN_FLIGHT))
    unheld += sum(group.graded is None for group in groups.in_state(GroupState.KEPT))
    unheld += sum(group.prompt_id not in leased for group in groups.in_state(GroupState.LEASED))
    return abs(unexplained) + abs(untracked) + unheld
