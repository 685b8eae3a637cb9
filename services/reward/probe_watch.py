"""A group's first samples, graded as they come: two that differ decide before the others end.

Consumes: finished samples of one request, and its end. Waits for: the next of them, and for its
grade. Produces: their outcomes, each sample graded once, and the moment from which the group is
sure to be mixed, so that the rest of it need not wait for the longest of the first samples. It ends
by itself once all samples are graded; it is never cut off while a scorer works for it, which would
cost the scorer's process.
"""

from __future__ import annotations

import asyncio

from services.reward.grading import Grader
from services.reward.judgement import samples_differ
from sluice.types import Outcome, Prompt, Rollout, Scored


class ProbeWatch:
    """The first samples of one group.

    Args:
        grader: grades them.
        prompt: what they answer.
        metric: the group filter's.
    """

    def __init__(self, grader: Grader, prompt: Prompt, metric: str | None) -> None:
        self._grader, self._prompt, self._metric = grader, prompt, metric
        # Bounded by the request: a sample finishes once. ``None``: no more will come.
        self._arrived: asyncio.Queue[Rollout | None] = asyncio.Queue()
        self.outcomes: dict[int, Outcome] = {}
        self.differs = asyncio.Event()

    def finished(self, rollout: Rollout) -> None:
        """A sample has come."""
        self._arrived.put_nowait(rollout)

    def over(self) -> None:
        """No more samples come."""
        self._arrived.put_nowait(None)

    async def run(self) -> None:
        """Grade what comes until `over`; sets `differs` as soon as two samples do."""
        is_over = False
        while not is_over:
            arrived = [await self._arrived.get()]
            while not self._arrived.empty():
                arrived.append(self._arrived.get_nowait())
            is_over = None in arrived
            rollouts = [rollout for rollout in arrived if rollout is not None]
            if rollouts:
                await self._grade(rollouts)

    async def _grade(self, rollouts: list[Rollout]) -> None:
        outcomes = await self._grader.outcomes(self._prompt, rollouts)
        for rollout, outcome in zip(rollouts, outcomes, strict=True):
            self.outcomes[rollout.sample_index] = outcome
        scores = [o for o in self.outcomes.values() if isinstance(o, Scored)]
        if samples_differ(scores, self._metric):
            self.differs.set()
