"""Counts between one train batch and the next, under metric names (verl's where they exist)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

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
