"""What became of every token that replicas sent.

A token is pending from its arrival until its group ends; then it is booked, once, under what became
of it. `received` is counted by whoever receives (`ReceivedTokens`), apart from groups: so

    received = sum over all uses + pending

is a check of the books and no identity.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from services.reward.generation_trace import GroupTrace
from sluice.types import Failed, FailureKind, GradedGroup, PromptEnd


class TokenUse(StrEnum):
    """What became of a token.

    ``aborted``: of samples that were broken off, and of copies that another replica finished first;
    ``failed``: of groups that failed, and of samples without a grade in any group, those that were
    drawn once more included;
    ``withdrawn``: of groups that a full batch made start again (`sluice.algorithm.withdrawals`);
    ``taken_over``: of groups that another trainer made start again.
    """

    TRAINED = "trained"
    FILTERED_ALL_RIGHT = "filtered_all_right"
    FILTERED_ALL_WRONG = "filtered_all_wrong"
    FILTERED_UNIFORM = "filtered_uniform"
    STALE = "stale"
    PREEMPTED = "withdrawn"
    FAILED = "failed"
    ABORTED = "aborted"
    SURPLUS = "surplus"
    TAKEN_OVER = "taken_over"
    EVALUATION = "evaluation"


USE_BY_END = {
    PromptEnd.TRAINED: TokenUse.TRAINED,
    PromptEnd.FILTERED_ALL_RIGHT: TokenUse.FILTERED_ALL_RIGHT,
    PromptEnd.FILTERED_ALL_WRONG: TokenUse.FILTERED_ALL_WRONG,
    PromptEnd.FILTERED_UNIFORM: TokenUse.FILTERED_UNIFORM,
    PromptEnd.DROPPED_STALE: TokenUse.STALE,
    PromptEnd.DROPPED_FAILED: TokenUse.FAILED,
    PromptEnd.DROPPED_SURPLUS: TokenUse.SURPLUS,
}
"""A skipped prompt has no tokens."""


class TokenAccounts:
    """Tokens by use, since the start and since the last train batch."""

    def __init__(self) -> None:
        self._since_start: Counter[TokenUse] = Counter()
        self._interval: Counter[TokenUse] = Counter()

    def assign(self, use: TokenUse, num_tokens: int) -> None:
        """Tokens met their end."""
        self._since_start[use] += num_tokens
        self._interval[use] += num_tokens

    def assign_group(self, use: TokenUse, trace: GroupTrace, graded: GradedGroup | None) -> None:
        """A group ended; see `uses_of_group`."""
        for found, num_tokens in uses_of_group(use, trace, graded).items():
            self.assign(found, num_tokens)

    def since_start(self) -> dict[TokenUse, int]:
        """All uses since the start."""
        return {use: self._since_start[use] for use in TokenUse}

    def close_interval(self) -> dict[TokenUse, int]:
        """All uses since the last call."""
        interval, self._interval = self._interval, Counter()
        return {use: interval[use] for use in TokenUse}


def uses_of_group(
    use: TokenUse, trace: GroupTrace, graded: GradedGroup | None
) -> Counter[TokenUse]:
    """The tokens of a group that ended, by use.

    Tokens of an earlier service that its samples went on from are taken off those aborted, to
    which they were counted when that service ended: so the sum is what this service received, and
    the count of aborted tokens may be below 0.

    Args:
        use: of its graded samples, and of its greedy response.
        trace: what was received for it, in all attempts.
        graded: its samples; ``None``: they were never all there, and what was not thrown away is
            of one use.
    """
    reused = trace.num_reused_tokens
    num_tokens = trace.num_tokens + reused
    if graded is None:
        lost, replaced = trace.num_thrown_away_tokens, trace.num_replaced_tokens
        found = Counter({TokenUse.FAILED: replaced, TokenUse.ABORTED: lost - reused})
        found[use] += num_tokens - lost - replaced
        return found
    found = Counter({use: graded.greedy.group.num_response_tokens if graded.greedy else 0})
    for rollout, outcome in zip(graded.group.rollouts, graded.outcomes, strict=True):
        if not isinstance(outcome, Failed):
            found[use] += rollout.num_tokens
        elif outcome.kind is FailureKind.ABORTED:
            found[TokenUse.ABORTED] += rollout.num_tokens
        else:
            found[TokenUse.FAILED] += rollout.num_tokens
    found[TokenUse.FAILED] += trace.num_replaced_tokens
    # What is in no sample of the group was drawn by attempts that another one replaced.
    found[TokenUse.ABORTED] += max(0, num_tokens - found.total()) - reused
    return found
