"""Running groups that would have no place in a batch in time: found at once, and started again.

Consumes: each group that starts and each that is kept; these two events alone can leave a running
group without a place. Produces: cancelled tasks, whose prompts wait again (a newer policy draws
their samples anew) or, under ``on_stale: drop`` and beyond the bound already, end as stale.
Under ``on_stale: wait`` admission leaves this to bad luck alone, and the tokens are told in the log
and counted as ``stale``. Where an on-policy batch is filled on average every batch withdraws some
groups: those are counted as ``withdrawn``, and claim a place if it happens to them too often
(`sluice.algorithm.withdrawals`).
"""

from __future__ import annotations

from collections.abc import Collection

from services.reward.batcher import Batcher
from services.reward.in_flight import CancelReason, InFlightItem, InFlightTable
from services.reward.statistics import Discard
from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.algorithm.withdrawals import Preemptions


class StaleGroups:
    """What becomes of running groups that kept ones leave no place for.

    Args:
        batcher: the kept groups and the rules.
        in_flight: the running ones; from here on their ages are entered beside the kept ones'.
        rules: of the sampling strategy. Where kept groups do not wait for later batches, a place is
            of no use: running groups end, and what a batch does not take is thrown away.
    """

    def __init__(self, batcher: Batcher, in_flight: InFlightTable, rules: SamplingRules) -> None:
        self._batcher, self._in_flight = batcher, in_flight
        self._carries_over = rules.strategy is not StrategyName.ROUNDS
        self._preemptions = Preemptions(rules.train_batch_size) if rules.preempts else None
        self._restarting: set[str] = set()

    def reserves_slot(self, prompt_id: str) -> bool:
        """A group starts; whether it has a place for certain from here on."""
        return self._preemptions is not None and self._preemptions.reserves_slot(prompt_id)

    def forget(self) -> None:
        """Another trainer begins: whatever was withdrawn was so from another run's batches."""
        if self._preemptions is not None:
            self._preemptions.forget()

    def check(self, announced: int | None, *, but_for: str | None = None) -> None:
        """Cancel the groups without a place.

        Args:
            announced: the version announced; ``None``: nothing is decided meanwhile.
            but_for: a prompt that has left the running groups, though its task is at work still.
        """
        if announced is None or not self._carries_over:
            return
        next_version = self._batcher.next_version(announced)
        expired = self._batcher.ages.expired(next_version)
        if not expired:
            return
        self.cancel([prompt_id for prompt_id in expired if prompt_id != but_for], next_version)

    def cancel(self, expired: Collection[str], next_version: int) -> None:
        """Cancel these groups; their fate is settled by the version of the next batch."""
        if not self._carries_over:
            return
        for prompt_id in expired:
            # Where batches withdraw, a group that starts late is withdrawn, too, and never dropped.
            if self._preemptions is None and self._batcher.ages.drops(prompt_id, next_version):
                self._in_flight.cancel(prompt_id, CancelReason.STALE)
            else:
                self._restarting.add(prompt_id)
                self._in_flight.cancel(prompt_id, CancelReason.REQUEUED)

    def left(self, item: InFlightItem, *, is_cancelled: bool) -> Discard | None:
        """Forget a group whose task has ended; why it starts again, if it was cancelled here to.

        Args:
            item: the group.
            is_cancelled: whether its task was; one that had just ended was not any more.
        """
        prompt_id = item.prompt.prompt_id
        was_restarting = is_cancelled and prompt_id in self._restarting
        self._restarting.discard(prompt_id)
        if self._preemptions is None:
            return Discard.STALE if was_restarting else None
        if not was_restarting:
            self._preemptions.ended(prompt_id)
            return None
        self._preemptions.preempted(prompt_id)
        return Discard.PREEMPTED
