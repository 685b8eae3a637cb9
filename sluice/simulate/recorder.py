"""The counts of a simulation while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from sluice.simulate.group import SimulatedGroup


class TokenCause(StrEnum):
    """What became of tokens."""

    TRAINED = "trained"
    ALL_RIGHT = "filtered_all_right"
    ALL_WRONG = "filtered_all_wrong"
    STALE = "stale"
    PREEMPTED = "preempted"
    SURPLUS = "surplus"


@dataclass(frozen=True, slots=True)
class SimulatedStepTimes:
    """When the parts of a step happened, seconds; `generated` and `busy_s` are the fleet's so far.

    `published_s` is when the version that the step made was announced.
    """

    asked_s: float
    leased_s: float
    trained_s: float
    published_s: float
    generated: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class LeaseMark:
    """Totals at the moment that a batch was leased, which counts as trained."""

    time_s: float
    generated: float
    busy_s: float
    slot_s: float
    trained: int
    trainer_wait_s: float


@dataclass(slots=True)
class Issue:
    """One prompt that was issued, for the shares of long and hard prompts.

    `is_mixed` is whether its group turned out, or would have turned out, mixed.
    """

    version: int
    is_long: bool
    is_mixed: bool
    is_trained: bool = False


@dataclass(slots=True)
class SimulationRecorder:
    """Counts of one simulation.

    `on_end` is called for each group that ends, with its cause and the time.
    """

    on_end: Callable[[SimulatedGroup, TokenCause, float], None] | None = None
    tokens: Counter[TokenCause] = field(default_factory=Counter)
    stale_tokens: float = 0.0  # of running groups that were cancelled
    preempted_tokens: float = 0.0  # likewise, by a full batch that was expected to
    staleness: Counter[int] = field(default_factory=Counter)
    marks: list[LeaseMark] = field(default_factory=list)
    steps: list[SimulatedStepTimes] = field(default_factory=list)
    num_trained: list[int] = field(default_factory=list)  # groups, by step
    num_hard: list[int] = field(default_factory=list)
    issues: dict[int, Issue] = field(default_factory=dict)
    num_kept_discarded: int = 0
    num_restarted: int = 0

    def record_issued(self, group: SimulatedGroup) -> None:
        """Record that a group starts, perhaps again."""
        issue = self.issues.get(group.position)
        if issue is None:
            issue = Issue(group.issued_version, group.prompt.is_long, is_mixed=False)
            self.issues[group.position] = issue
        issue.is_mixed = group.samples.is_mixed

    def record_leased(self, groups: list[SimulatedGroup], version: int, now_s: float) -> None:
        """Record that a batch for `version` is at the trainer."""
        for group in groups:
            self.issues[group.position].is_trained = True
            self.staleness.update(version - oldest for oldest in group.sample_versions)
            self.record_ended(group, TokenCause.TRAINED, now_s)
        self.num_trained.append(len(groups))
        self.num_hard.append(sum(group.prompt.is_hard for group in groups))

    def record_filtered(self, group: SimulatedGroup, now_s: float) -> None:
        """Record a group whose grades are all equal."""
        self.issues[group.position].is_mixed = False
        is_right = group.num_right > 0
        self.record_ended(group, TokenCause.ALL_RIGHT if is_right else TokenCause.ALL_WRONG, now_s)

    def record_cancelled(self, num_tokens: float, *, restarts: bool) -> None:
        """Record a running group that was cancelled as stale."""
        self.stale_tokens += num_tokens
        self.num_restarted += restarts

    def record_preempted(self, num_tokens: float) -> None:
        """Record a running group that a full batch cancelled, and that starts again."""
        self.preempted_tokens += num_tokens
        self.num_restarted += 1

    def record_discarded(self, group: SimulatedGroup, cause: TokenCause, now_s: float) -> None:
        """Record a kept group that was thrown away."""
        self.num_kept_discarded += 1
        self.record_ended(group, cause, now_s)

    def record_ended(self, group: SimulatedGroup, cause: TokenCause, now_s: float) -> None:
        """Attribute a whole group's tokens."""
        self.tokens[cause] += group.finished_tokens
        if self.on_end is not None:
            self.on_end(group, cause, now_s)
