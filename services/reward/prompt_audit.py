"""Whether any accepted prompt got lost: the ledger's word against what the stages really hold.

The ledger's counts alone add up by construction. So its pending prompts are counted anew from their
states, and compared with two independent things: the events (accepted, ended), and the queues and
tables that prompts must be in while they are pending.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.reward.ledger import Accounts, PromptState


@dataclass(frozen=True, slots=True)
class HeldPrompts:
    """Prompts that the stages hold.

    `num_in_flight` may count a prompt too many, for the moment between its end and its task's.
    """

    num_waiting: int
    num_in_flight: int
    num_kept: int
    num_leased: int


def prompts_lost(accounts: Accounts, held: HeldPrompts) -> int:
    """Prompts that the books or the stages cannot explain; 0 unless there is a defect.

    The sum of two numbers: by how many prompts accepted differ from those ended and pending, and
    how many pending ones no stage holds, so that nothing would ever end them.
    """
    unexplained = accounts.num_submitted - sum(accounts.by_end.values()) - accounts.num_pending
    by_state = accounts.by_state
    running = by_state[PromptState.GENERATING] + by_state[PromptState.GRADING]
    unheld = (
        by_state[PromptState.WAITING] - held.num_waiting,
        running - held.num_in_flight,
        by_state[PromptState.KEPT] - held.num_kept,
        by_state[PromptState.LEASED] - held.num_leased,
    )
    return abs(unexplained) + sum(max(0, number) for number in unheld)
