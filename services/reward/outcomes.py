"""The books: every way a prompt's group leaves a stage is recorded here, once."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.reward.batcher import Batcher
from services.reward.ledger import PromptLedger, PromptState
from services.reward.statistics import IntervalStatistics, batch_content_metrics
from services.reward.yield_guard import YieldGuard
from sluice.algorithm.admission import YieldEstimate
from sluice.types import GradedGroup, Prompt, PromptEnd, RolloutGroup, TrainGroup

logger = logging.getLogger(__name__)

_COUNTS_FOR_YIELD = {
    PromptEnd.FILTERED_ALL_RIGHT,
    PromptEnd.FILTERED_ALL_WRONG,
    PromptEnd.FILTERED_UNIFORM,
}


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """How a prompt ended, for the client that submitted it."""

    prompt: Prompt
    end: PromptEnd
    step: int | None
    rewards: tuple[float, ...]
    detail: str


class OutcomeRecorder:
    """Ledger, statistics, yield and outcomes, kept in step.

    Args:
        ledger: where prompts stand.
        batcher: takes the kept groups.
        guard: watches the yield.
        scorer_seconds: seconds the scorers have worked so far.
        on_end: told of every prompt that ends.
    """

    def __init__(
        self,
        ledger: PromptLedger,
        batcher: Batcher,
        guard: YieldGuard,
        *,
        scorer_seconds: Callable[[], float],
        on_end: Callable[[PromptOutcome], None],
    ) -> None:
        self._ledger, self._batcher, self._guard = ledger, batcher, guard
        self._scorer_seconds, self._on_end = scorer_seconds, on_end
        self._interval = IntervalStatistics(time.monotonic())
        self._totals: Counter[str] = Counter()
        self.estimate = YieldEstimate()

    def generated(self, group: RolloutGroup) -> None:
        """All samples of a group are there."""
        self._interval.num_generated_tokens += group.num_response_tokens
        self._totals["reward/generated_tokens"] += group.num_response_tokens
        self._ledger.move(group.prompt.prompt_id, PromptState.GRADING)

    def graded(self, graded: GradedGroup) -> None:
        """A group has its outcomes."""
        num_samples, num_scored = len(graded.outcomes), len(graded.scored)
        self._interval.num_graded_samples += num_samples
        self._interval.num_failed_samples += num_samples - num_scored
        self._totals["reward/samples_graded"] += num_samples
        self._totals["reward/samples_failed"] += num_samples - num_scored

    def kept(self, graded: GradedGroup) -> None:
        """A group waits for a batch from now on."""
        self._ledger.move(graded.group.prompt.prompt_id, PromptState.KEPT)
        self._batcher.keep(graded)
        self._interval.num_kept += 1
        self._totals["reward/groups_kept"] += 1
        self._observe(None, "")

    def ended(
        self,
        prompt: Prompt,
        end: PromptEnd,
        *,
        graded: GradedGroup | None = None,
        step: int | None = None,
        detail: str = "",
    ) -> None:
        """A prompt ends."""
        if end is PromptEnd.DROPPED_FAILED:
            logger.warning("prompt %s dropped: %s", prompt.prompt_id, detail)
        self._ledger.end(prompt.prompt_id, end)
        self._interval.ends[end] += 1
        if end in _COUNTS_FOR_YIELD or end is PromptEnd.DROPPED_FAILED:
            self._observe(end, detail)
        rewards = tuple(scored.reward for scored in graded.scored) if graded else ()
        self._on_end(PromptOutcome(prompt, end, step, rewards, detail))

    def surplus_discarded(self) -> None:
        """A kept group grew stale before a batch had room for it."""
        self._interval.num_surplus_discarded += 1
        self._totals["reward/surplus_discarded"] += 1

    def close_interval(self, groups: Sequence[TrainGroup], version: int) -> dict[str, float]:
        """Statistics since the last batch, which this batch carries; a new interval begins."""
        now, scorer_seconds = time.monotonic(), self._scorer_seconds()
        interval, self._interval = self._interval, IntervalStatistics(now, scorer_seconds)
        return {
            **interval.metrics(now, batch_size=len(groups), scorer_seconds=scorer_seconds),
            **batch_content_metrics(
                groups, version, num_generated_tokens=interval.num_generated_tokens
            ),
            "train/groups_carried_over": float(self._batcher.num_kept),
            "perf/reward_rss_mb": _peak_memory_mb(),
        }

    def totals(self) -> dict[str, float]:
        """Counters since the start; they stand still while nothing happens."""
        return {name: float(count) for name, count in self._totals.items()}

    def _observe(self, end: PromptEnd | None, detail: str) -> None:
        self._guard.ended(end, detail)
        if end is not PromptEnd.DROPPED_FAILED:
            self.estimate = self.estimate.observe(end is None)


def _peak_memory_mb() -> float:
    """Largest resident memory of this program so far, MiB; 0 where the kernel does not tell.

    Not `getrusage`, whose maximum counts what the starting process held before it became this one.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    lines = (line.split() for line in status.read_text(encoding="ascii").splitlines())
    return next((int(words[1]) / 1024 for words in lines if words[0] == "VmHWM:"), 0.0)
