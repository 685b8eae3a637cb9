"""Count what happens between two train batches, and check that no prompt is lost and enough
groups are kept.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from services.reward.ledger.ledger import Accounts, PromptState
from sluice.algorithm.sampling.admission import LastGroups, YieldFloor
from sluice.errors import DataExhaustedError
from sluice.types import FailureKind, Outcome, PromptEnd, Scored, TrainGroup

_NAME_BY_END = {
    PromptEnd.FILTERED_ALL_RIGHT: "train/groups_all_right",
    PromptEnd.FILTERED_ALL_WRONG: "train/groups_all_wrong",
    PromptEnd.FILTERED_UNIFORM: "train/groups_uniform",
    PromptEnd.DROPPED_STALE: "train/groups_stale",
    PromptEnd.DROPPED_FAILED: "train/groups_failed",
    PromptEnd.DROPPED_SURPLUS: "train/groups_surplus",
    PromptEnd.SKIPPED: "train/prompts_skipped",
}
_FILTERED = (
    PromptEnd.FILTERED_ALL_RIGHT,
    PromptEnd.FILTERED_ALL_WRONG,
    PromptEnd.FILTERED_UNIFORM,
)
SCORED, STALE = "scored", "stale"
SAMPLE_OUTCOMES = (SCORED, *(kind.value for kind in FailureKind), STALE)
"""How samples end. One that was graded and grew stale then counts as both."""


class Discard(StrEnum):
    """Why tokens of finished samples were drawn in vain, though nothing was wrong with the prompt's
    yield: too old for any batch, without a place in a full one, a failed group, or another
    trainer's policy."""

    STALE = "stale"
    PREEMPTED = "withdrawn"
    FAILED = "failed"
    TAKEN_OVER = "taken_over"


@dataclass(slots=True)
class IntervalStatistics:
    """Counters since `started_at` (seconds of a monotonic clock)."""

    started_at: float
    scorer_seconds_before: float = 0.0
    num_kept: int = 0
    num_graded_samples: int = 0
    num_failed_samples: int = 0
    num_surplus_discarded: int = 0
    num_restarted: int = 0
    num_greedy_tokens: int = 0
    discarded_tokens: Counter[Discard] = field(default_factory=Counter)
    ends: Counter[PromptEnd] = field(default_factory=Counter)
    sample_outcomes: Counter[str] = field(default_factory=Counter)

    def metrics(self, now: float, *, round_size: int, scorer_seconds: float) -> dict[str, float]:
        """The interval as metrics.

        Args:
            now: on the clock of `started_at`.
            round_size: groups that ``train/num_gen_batches`` counts as one round: those of a wave,
                or of a train batch where there are no waves.
            scorer_seconds: seconds that scorers have worked since the service's start.
        """
        num_filtered = sum(self.ends[end] for end in _FILTERED)
        num_ended = self.num_kept + num_filtered + self.ends[PromptEnd.DROPPED_FAILED]
        return {
            "train/groups_kept": float(self.num_kept),
            **{name: float(self.ends[end]) for end, name in _NAME_BY_END.items()},
            "train/num_gen_batches": num_ended / round_size,
            "train/greedy_tokens": float(self.num_greedy_tokens),
            **{
                f"train/discarded_tokens/{why}": float(self.discarded_tokens[why])
                for why in Discard
            },
            "train/surplus_discarded": float(self.num_surplus_discarded),
            "train/groups_restarted": float(self.num_restarted),
            "train/samples_graded": float(self.num_graded_samples),
            "train/samples_failed": float(self.num_failed_samples),
            **{
                f"train/outcomes/{name}": float(self.sample_outcomes[name])
                for name in SAMPLE_OUTCOMES
            },
            "timing_s/batch_fill": now - self.started_at,
            "timing_s/reward": scorer_seconds - self.scorer_seconds_before,
        }


def outcome_counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Samples by how they ended, in names of `SAMPLE_OUTCOMES`; without those that are 0."""
    names = (SCORED if isinstance(each, Scored) else each.kind.value for each in outcomes)
    return dict(Counter(names))


def batch_content_metrics(
    groups: Sequence[TrainGroup], version: int, *, num_generated_tokens: int
) -> dict[str, float]:
    """Tokens and staleness of a batch for `version`; staleness is per response, in versions.

    Args:
        groups: the batch.
        version: the version the batch will update.
        num_generated_tokens: tokens generated in the interval, trained on or not.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    oldest = [rollout.oldest_version for rollout in rollouts]
    staleness = [version - sampled_by for sampled_by in oldest if sampled_by is not None]
    num_trained_tokens = sum(rollout.num_tokens for rollout in rollouts)
    mean, largest = sum(staleness) / max(len(staleness), 1), float(max(staleness, default=0))
    return {
        "train/trained_tokens": float(num_trained_tokens),
        "train/generated_per_trained_tokens": num_generated_tokens / max(num_trained_tokens, 1),
        "train/staleness_mean": mean,
        "train/staleness_max": largest,
        "training/off_policy/trajectory_staleness/mean": mean,
        "training/off_policy/trajectory_staleness/max": largest,
        "training/off_policy/trajectory_staleness/min": float(min(staleness, default=0)),
    }


KEPT = "kept"


class YieldGuard:
    """How the last groups ended.

    Args:
        min_yield: least share of kept groups; 0: no bound.
        num_groups: how many of the last groups the share is taken over.
    """

    def __init__(self, min_yield: float, num_groups: int) -> None:
        self._floor, self._last = YieldFloor(min_yield, num_groups), LastGroups()
        self._window: deque[str] = deque()  # what the story tells of the same groups
        self._counts: Counter[str] = Counter()
        self._last_failure = ""
        self._num_left_out, self._last_left_out = 0, ""
        self._num_quarantined = 0

    def ended(self, end: PromptEnd | None, detail: str) -> None:
        """Note how a group ended; ``None``: it was kept."""
        self._last = self._floor.after(self._last, is_kept=end is None)
        outcome = KEPT if end is None else end.value
        self._window.append(outcome)
        self._counts[outcome] += 1
        if len(self._window) > self._floor.num_groups:
            self._counts[self._window.popleft()] -= 1
        if end is PromptEnd.DROPPED_FAILED:
            self._last_failure = detail

    def left_out(self, detail: str) -> None:
        """Note a prompt that was not generated for: it is longer than data.max_prompt_length."""
        self._num_left_out += 1
        self._last_left_out = detail

    def quarantined(self) -> None:
        """Note a prompt that was not generated for: it is in quarantine."""
        self._num_quarantined += 1

    def check_yield(self) -> None:
        """Raises `BatchUnfillableError` if too few of the last groups were kept (`YieldFloor`)."""
        if self._floor.is_hopeless(self._last):
            raise self._floor.error(self._last, self._summary())

    def exhausted(self, num_kept: int, batch_size: int) -> DataExhaustedError:
        """The error for a data set that ended before the batch was full."""
        if self._num_left_out and not self._window:
            remedy = "raise data.max_prompt_length, set data.truncation, or give shorter prompts"
        else:
            remedy = (
                "raise trainer.total_epochs, give more rows in data.train_files, or lower "
                "data.train_batch_size"
            )
        return DataExhaustedError(
            f"the data set is exhausted with {num_kept} of {batch_size} groups for the next batch"
            f"{self._summary()}; {remedy}"
        )

    def _summary(self) -> str:
        counts = ", ".join(f"{n} {name}" for name, n in sorted(self._counts.items()) if n)
        failure = f"; last failure: {self._last_failure}" if self._last_failure else ""
        left_out = ""
        if self._num_left_out:
            left_out = f"; {self._num_left_out} left out as too long, last: {self._last_left_out}"
        if self._num_quarantined:
            left_out += f"; {self._num_quarantined} in quarantine (reward/quarantine.jsonl)"
        return f" (last {len(self._window)} groups: {counts or 'none'}{left_out}{failure})"


# Whether any accepted prompt got lost: the ledger's word against what the stages really hold.
#
# The ledger's counts alone add up by construction. So its pending prompts are counted anew from
# their states, and compared with two independent things: the events (accepted, ended), and the
# queues and tables that prompts must be in while they are pending.


@dataclass(frozen=True, slots=True)
class StagePrompts:
    """Prompts that the stages hold.

    `num_in_flight` may count a prompt too many, for the moment between its end and its task's.
    """

    num_waiting: int
    num_in_flight: int
    num_kept: int
    num_leased: int


def prompts_lost(accounts: Accounts, held: StagePrompts) -> int:
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
