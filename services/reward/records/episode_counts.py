"""Count turns, roots, tool calls, ends and time of graded episodes, by environment too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from services.reward.group_table import EventKind, GroupEvent
from sluice.algorithm.episode_rules import environment_of
from sluice.types import (
    EpisodeEnd,
    Failed,
    FailureKind,
    Outcome,
    Prompt,
    PromptOrigin,
    Rollout,
    ToolCall,
    Turn,
)

MAX_ENVIRONMENTS = 32
"""The most environments with separate metrics; episodes of others count as `OTHER`'s."""
OTHER = "other"
_MAX_NAME_CHARS = 64
_PARTS = ("queue", "model", "environment")
_OF_EPISODES = (FailureKind.ENVIRONMENT, FailureKind.AGENT)


@dataclass(frozen=True, slots=True)
class EnvironmentNames:
    """Names the environment of a row in files and metrics.

    Args:
        only: the run's environment, for rows that name none.
        rows_choose: whether a row may name another environment; otherwise its name means the run's.
        by_default: whether rows that name none have an environment.
    """

    only: str = OTHER
    rows_choose: bool = True
    by_default: bool = False

    def of(self, prompt: Prompt) -> str | None:
        """Return the name: at most 64 printable characters without a slash, which separates the
        parts of metric names; ``None`` if the row has no environment."""
        chosen = environment_of(prompt.extra_info, by_default=self.by_default)
        if chosen is None:
            return None
        name = (chosen if self.rows_choose and chosen else self.only)[:_MAX_NAME_CHARS]
        return name.replace("/", "_") if name.isprintable() else OTHER


def calls_of(turn: Turn) -> tuple[ToolCall, ...]:
    """Return the tool calls in a turn's answer."""
    return turn.answer.tool_calls if turn.answer else ()


def seconds_of(rollout: Rollout) -> dict[str, float]:
    """Return the seconds that a sample spent, by part."""
    return {
        part: round(sum(turn.seconds.get(part, 0.0) for turn in rollout.turns), 4)
        for part in _PARTS
    }


@dataclass(slots=True)
class _Means:
    """Means over episodes, by metric name."""

    num: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, values: Mapping[str, float]) -> None:
        """Add the values of an episode."""
        self.num += 1
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def taken(self) -> dict[str, float]:
        """Return the means."""
        return {name: total / self.num for name, total in self.sums.items()}


class EpisodeStatistics:
    """An observer that counts the episodes since the last batch.

    Args:
        tool_names: names of the offered tools; a policy may write other names.
    """

    def __init__(
        self,
        tool_names: Collection[str] = (),
        environments: EnvironmentNames = EnvironmentNames(),
    ) -> None:
        self._tool_names, self._names = tool_names, environments
        self._known: set[str] = set()  # the first names, each counted separately
        self._means: dict[str, _Means] = {}  # by the prefix of their names
        self._counts = Counter[str]()

    def observe(self, event: GroupEvent) -> None:
        """Count the samples of one event."""
        group, graded, ending = event.group, event.graded, event.group.ending
        if event.kind is EventKind.GRADED and graded is not None:
            samples = zip(graded.group.rollouts, graded.outcomes, strict=True)
            self.graded(group.prompt, samples)
        elif event.kind is EventKind.ENDED and ending is not None and ending.failed is not None:
            self.not_generated(group.prompt, ending.failed.kind, group.num_ungraded)

    def graded(self, prompt: Prompt, samples: Iterable[tuple[Rollout, Outcome]]) -> None:
        """Count graded samples of a prompt, except samples without an environment."""
        for rollout, outcome in samples:
            has_played = rollout.end is not None or len(rollout.turns) > 1
            own = self._own(prompt, is_real=has_played)
            if own is None:
                return
            if isinstance(outcome, Failed):
                self._failed(own, outcome.kind, 1)
            if has_played:
                self._add(rollout, own)

    def not_generated(self, prompt: Prompt, kind: FailureKind, num_samples: int) -> None:
        """Count the samples of a group that could not be generated."""
        own = self._own(prompt, is_real=False)
        if own is not None:
            self._failed(own, kind, num_samples)

    def _failed(self, own: str, kind: FailureKind, num_samples: int) -> None:
        self._counts[f"{own}/failed/{kind}"] += num_samples
        if kind in _OF_EPISODES:
            self._counts["train/episode_ends/failed"] += num_samples

    def _own(self, prompt: Prompt, *, is_real: bool) -> str | None:
        """Return the prefix of an environment's metric names; ``None`` if the row has no
        environment.

        A client may send any name, so only real ones and those of data-set rows are counted
        separately.
        """
        name = self._names.of(prompt)
        if name is None:
            return None
        if name != self._names.only and name not in self._known:
            is_real = is_real or prompt.origin is PromptOrigin.DATASET
            if is_real and len(self._known) < MAX_ENVIRONMENTS - 1:
                self._known.add(name)
            else:
                name = OTHER
        return f"train/environments/{name}"

    def _add(self, rollout: Rollout, own: str) -> None:
        turns, seconds = len(rollout.turns), seconds_of(rollout)
        of_all = {
            "train/episode_turns_mean": turns,
            "train/episode_roots_mean": rollout.num_roots,
            "train/episode_context_tokens_mean": rollout.num_context_tokens,
            **{f"train/episode_seconds/{part}": s for part, s in seconds.items()},
        }
        of_own = {f"{own}/turns_mean": float(turns)}
        of_own |= {f"{own}/seconds/{part}": s for part, s in seconds.items()}
        for beginning, values in (("train", of_all), (own, of_own)):
            self._means.setdefault(beginning, _Means()).add(values)
        if rollout.end is not None:
            self._counts[f"train/episode_ends/{rollout.end}"] += 1
            self._counts[f"{own}/ends/{rollout.end}"] += 1
        for turn in rollout.turns:
            self._counts[f"{own}/tool_errors"] += sum(one.is_error for one in turn.observed)
            if turn.answer is not None:
                self._counts["train/unreadable_calls"] += bool(turn.answer.tool_error)
            for call in calls_of(turn):
                if call.name in self._tool_names:
                    self._counts[f"train/tool_calls/{call.name}"] += 1
                else:
                    self._counts["train/unknown_tool_calls"] += 1

    def take(self) -> dict[str, float]:
        """Return the metrics of the interval and begin a new one; empty without episodes."""
        means, counts = self._means, self._counts
        self._means, self._counts = {}, Counter()
        if not counts.total():
            return {}
        ends = [f"train/episode_ends/{end}" for end in (*EpisodeEnd, "failed")]
        ends += [f"{own}/ends/{end}" for own in means if own != "train" for end in EpisodeEnd]
        calls = ("train/unreadable_calls", "train/unknown_tool_calls")
        statistics = dict.fromkeys((*ends, *calls), 0.0)
        statistics |= {name: float(count) for name, count in counts.items()}
        for each in means.values():
            statistics |= each.taken()
        return statistics
