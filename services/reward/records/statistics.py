"""Count events of prompts, samples and tokens, since the start and per batch.

Counters since the start are ``reward/…``, in `GetStatus` and Prometheus; ``train/…``, which a train
batch carries to `metrics.jsonl`, is their increase since the batch before.

A token is pending from its arrival until its group ends; then it is assigned, once, to a use. The
dispatcher counts received tokens, per group and in total, so

    received = sum over all uses + pending

checks the assignment, and the replicas' own counts check the received tokens.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from statistics import fmean

import numpy as np

from services.reward.generation.request import GroupProgress, Purpose
from services.reward.grading.grader import SampleScorer
from services.reward.group_table import (
    IN_FLIGHT,
    SCORED,
    CancelReason,
    EndCause,
    EventKind,
    Group,
    GroupEnding,
    GroupEvent,
    GroupState,
    GroupTable,
    outcome_counts,
)
from services.reward.ledger.ledger import PromptLedger
from services.reward.records.episode_counts import EpisodeStatistics
from sluice.algorithm.sources import source_metric
from sluice.types import Failed, FailureKind, GradedGroup, PromptEnd, TokenIds, TrainGroup

logger = logging.getLogger(__name__)

_NAME_BY_END = {
    PromptEnd.FILTERED_ALL_RIGHT: "groups_all_right",
    PromptEnd.FILTERED_ALL_WRONG: "groups_all_wrong",
    PromptEnd.FILTERED_UNIFORM: "groups_uniform",
    PromptEnd.DROPPED_STALE: "groups_stale",
    PromptEnd.DROPPED_FAILED: "groups_failed",
    PromptEnd.DROPPED_SURPLUS: "groups_surplus",
    PromptEnd.SKIPPED: "prompts_skipped",
}
_COUNTED_BY_SOURCE = _NAME_BY_END.keys() - {PromptEnd.DROPPED_SURPLUS, PromptEnd.SKIPPED}
_FILTERED = [end for end in PromptEnd if end.startswith("filtered_")]
STALE = "stale"
SAMPLE_OUTCOMES = (SCORED, *(kind.value for kind in FailureKind), STALE)
"""How samples end. A graded sample that became stale later counts as both."""


class TokenUse(StrEnum):
    """The use of a token.

    ``aborted``: in aborted samples, or thrown away when a sample restarted on another replica;
    ``failed``: in failed groups, or in samples without a grade, even if generated again;
    ``preempted``: in groups preempted when a batch was full (`sluice.algorithm.groups.staleness`);
    ``taken_over``: in groups that restart because another trainer took over; ``rolled_back``: in
    groups that restart because their policy was rolled back.
    """

    TRAINED = "trained"
    FILTERED_ALL_RIGHT = "filtered_all_right"
    FILTERED_ALL_WRONG = "filtered_all_wrong"
    FILTERED_UNIFORM = "filtered_uniform"
    STALE = "stale"
    PREEMPTED = "preempted"
    FAILED = "failed"
    ABORTED = "aborted"
    SURPLUS = "surplus"
    TAKEN_OVER = "taken_over"
    ROLLED_BACK = "rolled_back"
    VALIDATION = "evaluation"


USE_BY_END = {
    end: TokenUse(end.removeprefix("dropped_")) for end in PromptEnd if end is not PromptEnd.SKIPPED
}
"""A skipped prompt has no tokens."""

_USE_BY_REASON = {
    CancelReason.NO_SLOT: TokenUse.STALE,
    CancelReason.PREEMPTED: TokenUse.PREEMPTED,
    CancelReason.TAKEN_OVER: TokenUse.TAKEN_OVER,
    CancelReason.ROLLED_BACK: TokenUse.ROLLED_BACK,
}
"""The tokens of an attempt that is given up, by the reason. ``TOO_OLD`` is not among them: that
prompt ends.
"""

_DISCARDED = (
    TokenUse.STALE,
    TokenUse.PREEMPTED,
    TokenUse.FAILED,
    TokenUse.TAKEN_OVER,
    TokenUse.ROLLED_BACK,
)


_REPETITION_GROUPS = 64
_GRAM = 4
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, so that the products of different tokens differ


def batch_content_metrics(
    groups: Sequence[TrainGroup], version: int, *, num_generated_tokens: float
) -> dict[str, float]:
    """Return token and staleness metrics of a batch for `version`; staleness is per response, in
    versions.

    Args:
        num_generated_tokens: tokens generated in the interval, trained or not.
    """
    num_trained_tokens = 0
    spans, newest, staleness = list[int](), list[int](), list[int]()
    for group in groups:
        for rollout in group.rollouts:
            num_trained_tokens += rollout.num_tokens
            if versions := rollout.versions:
                oldest_version, newest_version = min(versions), max(versions)
                spans.append(newest_version - oldest_version + 1)
                newest.append(version - newest_version)
                staleness.append(version - oldest_version)
    mean, largest = sum(staleness) / max(len(staleness), 1), float(max(staleness, default=0))
    return {
        "train/trained_tokens": float(num_trained_tokens),
        "train/generated_per_trained_tokens": num_generated_tokens / max(num_trained_tokens, 1),
        "train/staleness_mean": mean,
        "train/staleness_max": largest,
        **_ages("trajectory_spans", spans),
        **_ages("trajectory_staleness", newest),
        **_ages("trajectory_staleness_worst", staleness),
        **_repetition(groups),
    }


def _ages(name: str, ages: Sequence[int]) -> dict[str, float]:
    """Return the mean, max and min of `ages`, versions [rows]; empty for no rows."""
    if not ages:
        return {}
    return {
        f"training/off_policy/{name}/mean": fmean(ages),
        f"training/off_policy/{name}/max": float(max(ages)),
        f"training/off_policy/{name}/min": float(min(ages)),
    }


def _repetition(groups: Sequence[TrainGroup]) -> dict[str, float]:
    """Return the mean over a few responses: all of them would block the event loop."""
    shares = [
        repetition_share(turn.token_ids)
        for group in groups[:_REPETITION_GROUPS]
        for rollout in group.rollouts[:1]
        for turn in rollout.turns
    ]
    return {"train/repetition_share": fmean(shares)} if shares else {}


def repetition_share(token_ids: TokenIds) -> float:
    """Return the share of a response's 4-grams that occurred in it before; 0 without a 4-gram.

    Args:
        token_ids: uint32 [tokens] of one response.
    """
    count = token_ids.size - _GRAM + 1
    if count <= 0:
        return 0.0
    grams = np.zeros(count, dtype=np.uint64)
    for place in range(_GRAM):
        grams = grams * _MIX + token_ids[place : place + count].astype(np.uint64)
    return 1.0 - np.unique(grams).size / count


def uses_of_group(
    use: TokenUse, progress: GroupProgress, graded: GradedGroup | None
) -> Counter[TokenUse]:
    """Return the number of tokens of a finished attempt, by use.

    Args:
        use: the use of its graded samples and of its greedy response.
        graded: its samples; ``None`` if the group was never complete: then `use` applies to all
            tokens not thrown away.
    """
    if graded is None:
        num_lost, num_replaced = progress.num_thrown_away, progress.num_replaced
        uses = Counter({TokenUse.FAILED: num_replaced, TokenUse.ABORTED: num_lost})
        uses[use] += progress.num_received - num_lost - num_replaced
        return uses
    uses = Counter({use: graded.greedy.group.num_response_tokens if graded.greedy else 0})
    for rollout, outcome in zip(graded.group.rollouts, graded.outcomes, strict=True):
        if not isinstance(outcome, Failed):
            uses[use] += rollout.num_tokens
        elif outcome.kind is FailureKind.ABORTED:
            uses[TokenUse.ABORTED] += rollout.num_tokens
        else:
            uses[TokenUse.FAILED] += rollout.num_tokens
    uses[TokenUse.FAILED] += progress.num_replaced
    # Tokens in no sample of the group were thrown away when a sample restarted.
    uses[TokenUse.ABORTED] += max(0, progress.num_received - uses.total())
    return uses


_GROWTH = {
    f"train/{name}": f"reward/{name}"
    for name in (
        "groups_kept",
        "greedy_tokens",
        "surplus_discarded",
        "groups_restarted",
        "samples_graded",
        "samples_failed",
        "generated_tokens",
        *(f"discarded_tokens/{use}" for use in _DISCARDED),
        *(f"outcomes/{outcome}" for outcome in SAMPLE_OUTCOMES),
        *(f"tokens/{use}" for use in TokenUse),
    )
}
"""Metrics of a batch; each is the increase of a counter since the previous batch."""
_OF_SOURCES = "reward/sources/"
"""The prefix of the counters of one of several sources."""
_COUNTERS = (
    *_GROWTH.values(),
    "reward/batches_acknowledged",
    "reward/groups_acknowledged",
    "reward/prompts_quarantined",
    "reward/samples_generated_again",
)


def _source_means(groups: Sequence[TrainGroup], version: int) -> dict[str, float]:
    """Return means over the samples of one source in a batch for `version`."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [scored.reward for group in groups for scored in group.scores]
    if not rollouts:
        return {}
    oldest_versions = [
        rollout.oldest_version for rollout in rollouts if rollout.oldest_version is not None
    ]
    num_tokens = sum(rollout.num_tokens for rollout in rollouts)
    return {
        "trained_tokens": float(num_tokens),
        "response_length_mean": num_tokens / len(rollouts),
        "reward_mean": sum(rewards) / len(rewards),
        "staleness_mean": sum(version - oldest_version for oldest_version in oldest_versions)
        / max(len(oldest_versions), 1),
    }


class GroupStatistics:
    """An observer that counts.

    Args:
        received: response tokens received since the start, by purpose.
        round_size: groups that ``train/num_gen_batches`` counts as one round: the groups of a wave,
            or of a train batch where there are no waves.
        episodes: counts episodes, as a separate observer; ``None`` if a sample is one answer.
        sources: the names of `sluice.sources`, which get metrics each.

    Attributes:
        on_batch: called with each new batch, its version and the seconds it took to fill.
    """

    def __init__(
        self,
        received: Mapping[Purpose, int],
        *,
        round_size: int,
        scorers: SampleScorer,
        episodes: EpisodeStatistics | None = None,
        sources: Collection[str] = (),
    ) -> None:
        self._received = received
        self._round_size = round_size
        self.scorers = scorers
        self._totals = Counter(dict.fromkeys(_COUNTERS, 0))
        self._num_ended = 0
        # Of the interval since the last batch, and the counters at its start.
        self._ends: Counter[PromptEnd] = Counter()
        self._episodes = episodes
        self._sources = [name for name in sources if name]
        self._started_s, self._scorer_seconds_before = time.monotonic(), 0.0
        self._before = self.totals()
        self.on_batch: Callable[[Sequence[TrainGroup], int, float], None] | None = None

    def observe(self, event: GroupEvent) -> None:
        """Count one event."""
        match event.kind:
            case EventKind.GENERATED:
                self._totals["reward/greedy_tokens"] += event.num_greedy_tokens
            case EventKind.GRADED:
                assert event.graded is not None
                self._count_graded(event.graded)
            case EventKind.CONTINUED:
                self._totals["reward/samples_generated_again"] += event.num_replaced
            case EventKind.KEPT:
                self._totals["reward/groups_kept"] += 1
                self._count_of_source(event.group, "groups_kept")
            case EventKind.REQUEUED:
                assert event.why is not None
                self._count_requeued(event.group, event.why)
            case EventKind.ENDED:
                assert event.group.ending is not None
                self._count_ended(event.group, event.group.ending, event.before)

    def _count_graded(self, graded: GradedGroup) -> None:
        outcomes = (*graded.outcomes, *(graded.greedy.outcomes if graded.greedy else ()))
        counts = outcome_counts(outcomes)
        self._totals["reward/samples_graded"] += len(outcomes)
        self._totals["reward/samples_failed"] += len(outcomes) - counts.get(SCORED, 0)
        for name, count in counts.items():
            self._totals[f"reward/outcomes/{name}"] += count

    def _count_requeued(self, group: Group, why: CancelReason) -> None:
        """Count an attempt that was given up.

        Log only unexpected requeues of single groups: a change of the trainer and the end of the
        service requeue all groups, and every full batch may preempt some.
        """
        use, progress = _USE_BY_REASON[why], group.progress
        self._count_uses(use, group, None)
        self._totals[f"reward/discarded_tokens/{use}"] += progress.num_received
        self._totals["reward/groups_restarted"] += 1
        if use is TokenUse.STALE:
            self._totals[f"reward/outcomes/{STALE}"] += progress.num_requested
            logger.warning(
                "prompt %s starts again as stale (replica %s): more groups were kept than expected,"
                " and %d of its tokens are lost",
                group.prompt_id,
                progress.replica_names,
                progress.num_received,
            )

    def _count_ended(self, group: Group, ending: GroupEnding, state_before: GroupState) -> None:
        totals, graded = self._totals, group.graded
        self._num_ended += 1
        if ending.failed is not None:
            totals[f"reward/outcomes/{ending.failed.kind}"] += group.num_ungraded
        if ending.cause is EndCause.QUARANTINE:
            totals["reward/prompts_quarantined"] += 1
            return
        if ending.cause is EndCause.OVERLONG:
            totals["reward/prompts_overlong"] += 1
            self._count_uses(TokenUse.FAILED, group, None)
            return
        self._ends[ending.end] += 1
        if ending.end in _COUNTED_BY_SOURCE:
            self._count_of_source(group, _NAME_BY_END[ending.end])
        if ending.end is PromptEnd.SKIPPED:
            totals["reward/prompts_skipped"] += 1
            return
        use = USE_BY_END[ending.end]
        self._count_uses(use, group, graded)
        if use in _DISCARDED:
            totals[f"reward/discarded_tokens/{use}"] += group.progress.num_received
        if use in _DISCARDED and use is not TokenUse.FAILED:  # `FailureLog` counts failures
            logger.warning(
                "prompt %s dropped as %s (replica %s): %s",
                group.prompt_id,
                use,
                group.progress.replica_names,
                ending.detail,
            )
        if ending.end is PromptEnd.DROPPED_STALE:
            num_samples = len(graded.outcomes) if graded else group.progress.num_requested
            totals[f"reward/outcomes/{STALE}"] += num_samples
        if state_before is GroupState.KEPT and ending.end is not PromptEnd.TRAINED:
            totals["reward/surplus_discarded"] += 1

    def _count_uses(self, use: TokenUse, group: Group, graded: GradedGroup | None) -> None:
        uses = uses_of_group(use, group.progress, graded)
        for token_use, num_tokens in uses.items():
            self._totals[f"reward/tokens/{token_use}"] += num_tokens
            self._count_of_source(group, f"tokens/{token_use}", num_tokens)

    def _count_of_source(self, group: Group, name: str, number: int = 1) -> None:
        """Count groups or tokens of one of several sources."""
        if source := group.prompt.source:
            self._totals[f"reward/{source_metric(source, name)}"] += number

    def note_acknowledged(self, num_groups: int) -> None:
        """Note that the trainer has trained a batch of `num_groups`."""
        self._totals["reward/batches_acknowledged"] += 1
        self._totals["reward/groups_acknowledged"] += num_groups

    def note_validated(self, num_tokens: int) -> None:
        """Note the tokens generated for a group of a validation."""
        self._totals[f"reward/tokens/{TokenUse.VALIDATION}"] += num_tokens

    def close_interval(self, groups: Sequence[TrainGroup], version: int) -> dict[str, float]:
        """Return the statistics since the last batch, which this batch carries; begin again."""
        now_s, scorer_seconds, totals = time.monotonic(), self.scorers.busy_seconds, self.totals()
        ends = self._ends
        growth = {
            name: totals[counter] - self._before[counter] for name, counter in _GROWTH.items()
        }
        num_filtered = sum(ends[end] for end in _FILTERED)
        num_ended = growth["train/groups_kept"] + num_filtered + ends[PromptEnd.DROPPED_FAILED]
        num_generated = growth["train/generated_tokens"]
        batch_fill_s = now_s - self._started_s
        statistics = {
            **growth,
            **{f"train/{name}": float(ends[end]) for end, name in _NAME_BY_END.items()},
            "train/num_gen_batches": num_ended / self._round_size,
            **batch_content_metrics(groups, version, num_generated_tokens=num_generated),
            **(self._episodes.take() if self._episodes else {}),
            **(self._source_metrics(groups, version, totals) if self._sources else {}),
            "timing_s/batch_fill": batch_fill_s,
            "timing_s/reward": scorer_seconds - self._scorer_seconds_before,
            "perf/reward_rss_mb": _peak_memory_mb(),
        }
        if self.on_batch is not None:
            self.on_batch(groups, version, batch_fill_s)
        self._ends, self._before = Counter(), totals
        self._started_s, self._scorer_seconds_before = now_s, scorer_seconds
        return statistics

    def _source_metrics(
        self, groups: Sequence[TrainGroup], version: int, totals: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the metrics of each of several sources: of its part of a batch for `version`, and
        of the interval since the last batch."""
        statistics = {
            counter.removeprefix("reward/"): total - self._before.get(counter, 0.0)
            for counter, total in totals.items()
            if counter.startswith(_OF_SOURCES)
        }
        for source in self._sources:
            source_groups = [group for group in groups if group.source == source]
            values = {
                **_source_means(source_groups, version),
                "groups": float(len(source_groups)),
                "share": len(source_groups) / max(len(groups), 1),
            }
            statistics |= {source_metric(source, name): value for name, value in values.items()}
        return statistics

    @property
    def progress(self) -> tuple[int, int, int]:
        """The numbers of ended prompts, graded samples and received tokens since the start."""
        received = sum(self._received.values())
        return self._num_ended, self._totals["reward/samples_graded"], received

    def totals(self) -> dict[str, float]:
        """Return the counters since the start; they do not change while nothing happens.

        ``reward/tokens/<use>`` and the tokens of pending groups and validations add up to
        ``reward/tokens/received``. The sources' tokens add up to the run's without validations.
        """
        return {
            **{name: float(count) for name, count in self._totals.items()},
            "reward/tokens/received": float(sum(self._received.values())),
            "reward/generated_tokens": float(self._received[Purpose.TRAINING]),
        }


def _peak_memory_mb() -> float:
    """Return the peak resident memory of this program, MiB; 0 without `/proc`.

    `getrusage` would include the memory of the process that started this program.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    for line in status.read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def prompts_lost(ledger: PromptLedger, groups: GroupTable, num_waiting: int) -> int:
    """Count prompts that no event explains or that nothing holds; more than 0 is a defect.

    The ledger's counts add up by construction. So compare its pending prompts with two independent
    counts: the events (accepted, ended), and the owners of groups by state: the prompt source, a
    task, the samples, the lease. The result is the sum of the differences.
    """
    unexplained = ledger.num_submitted - sum(ledger.by_end.values()) - ledger.num_pending
    untracked = ledger.num_pending - len(groups)
    by_state = Counter(group.state for group in groups)
    leased = set(ledger.leased_ids())
    unheld = max(0, by_state[GroupState.WAITING] - num_waiting)
    unheld += sum(group.task is None for group in groups.in_state(*IN_FLIGHT))
    unheld += sum(group.graded is None for group in groups.in_state(GroupState.KEPT))
    unheld += sum(group.prompt_id not in leased for group in groups.in_state(GroupState.LEASED))
    return abs(unexplained) + abs(untracked) + unheld
