"""Running groups that would have no place in a batch in time: found at once, and started again.

Consumes: each group that starts and each that is kept; these two events alone can leave a running
group without a place. Produces: cancelled tasks, whose prompts wait again (a newer policy draws
their samples anew) or, under ``on_stale: drop`` and beyond the bound already, end as stale.
Under ``on_stale: wait`` admission leaves this to bad luck alone; the tokens are told in the log and
counted as ``stale``.
"""

from __future__ import annotations

from collections.abc import Collection

from services.reward.batcher import Batcher
from services.reward.in_flight import Fate, InFlightItem, InFlightTable


class StaleGroups:
    """What becomes of running groups that kept ones leave no place for.

    Args:
        batcher: the kept groups and the rules.
        in_flight: the running ones; from here on their ages are entered beside the kept ones'.
        carries_over: whether kept groups wait for later batches. Where they do not, a place is of
            no use: running groups end, and what a batch does not take is thrown away.
    """

    def __init__(
        self, batcher: Batcher, in_flight: InFlightTable, *, carries_over: bool = True
    ) -> None:
        self._batcher, self._in_flight, self._carries_over = batcher, in_flight, carries_over
        self._restarting: set[str] = set()

    def check(self, announced: int | None, *, but_for: str | None = None) -> None:
        """Cancel the groups without a place.

        Args:
            announced: the version announced; ``None``: nothing is decided meanwhile.
            but_for: a prompt that has left the running groups, though its task is at work still.
        """
        if announced is None or not self._carries_over:
            return
        next_version = self._batcher.next_version(announced)
        doomed = self._batcher.ages.doomed(next_version)
        if not doomed:
            return
        self.cancel([prompt_id for prompt_id in doomed if prompt_id != but_for], next_version)

    def cancel(self, doomed: Collection[str], next_version: int) -> None:
        """Cancel these groups; their fate is settled by the version of the next batch."""
        if not self._carries_over:
            return
        for prompt_id in doomed:
            if self._batcher.ages.drops(prompt_id, next_version):
                self._in_flight.cancel(prompt_id, Fate.STALE)
            else:
                self._restarting.add(prompt_id)
                self._in_flight.cancel(prompt_id, Fate.REQUEUED)

    def left(self, item: InFlightItem) -> bool:
        """Forget a group whose task has ended; whether it was cancelled here to start again."""
        was_restarting = item.prompt.prompt_id in self._restarting
        self._restarting.discard(item.prompt.prompt_id)
        return was_restarting
