"""A group's first samples, graded as they come: two that differ decide before the others end.

Consumes: finished samples of one request. Waits for: the next of them, and for its grade. Produces:
their outcomes, and the moment from which the group is sure to be mixed, so that the rest of it need
not wait for the longest of the first samples. Cancelled when all have come and none differs.
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
        # Bounded by the request: a sample finishes once.
        self._finished: asyncio.Queue[Rollout] = asyncio.Queue()
        self.outcomes: dict[int, Outcome] = {}

    def finished(self, rollout: Rollout) -> None:
        """A sample has come."""
        self._finished.put_nowait(rollout)

    async def differ(self) -> None:
        """Grade what comes until two samples differ."""
        while not self._differs():
            rollouts = [await self._finished.get()]
            while not self._finished.empty():
                rollouts.append(self._finished.get_nowait())
            outcomes = await self._grader.outcomes(self._prompt, rollouts)
            for rollout, outcome in zip(rollouts, outcomes, strict=True):
                self.outcomes[rollout.sample_index] = outcome

    def _differs(self) -> bool:
        scores = [o for o in self.outcomes.values() if isinstance(o, Scored)]
        return samples_differ(scores, self._metric)
