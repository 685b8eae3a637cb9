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

    def means(self) -> dict[str, float]:
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
        self._counted_names: set[str] = set()  # the first names, each counted separately
        self._means: dict[str, _Means] = {}  # by the prefix of their names
        self._counts = Counter[str]()

    def observe(self, event: GroupEvent) -> None:
        """Count the samples of one event."""
        group, graded, ending = event.group, event.graded, event.group.ending
        if event.kind is EventKind.GRADED and graded is not None:
            samples = zip(graded.group.rollouts, graded.outcomes, strict=True)
            self.count_graded(group.prompt, samples)
        elif event.kind is EventKind.ENDED and ending is not None and ending.failed is not None:
            self.count_ungenerated(group.prompt, ending.failed.kind, group.num_ungraded)

    def count_graded(self, prompt: Prompt, samples: Iterable[tuple[Rollout, Outcome]]) -> None:
        """Count graded samples of a prompt, except samples without an environment."""
        for rollout, outcome in samples:
            has_played = rollout.end is not None or len(rollout.turns) > 1
            prefix = self._prefix(prompt, is_real=has_played)
            if prefix is None:
                return
            if isinstance(outcome, Failed):
                self._count_failed(prefix, outcome.kind, 1)
            if has_played:
                self._count_episode(rollout, prefix)

    def count_ungenerated(self, prompt: Prompt, kind: FailureKind, num_samples: int) -> None:
        """Count the samples of a group that could not be generated."""
        prefix = self._prefix(prompt, is_real=False)
        if prefix is not None:
            self._count_failed(prefix, kind, num_samples)

    def _count_failed(self, prefix: str, kind: FailureKind, num_samples: int) -> None:
        self._counts[f"{prefix}/failed/{kind}"] += num_samples
        if kind in _OF_EPISODES:
            self._counts["train/episode_ends/failed"] += num_samples

    def _prefix(self, prompt: Prompt, *, is_real: bool) -> str | None:
        """Return the prefix of an environment's metric names; ``None`` if the row has no
        environment.

        A client may send any name, so only real ones and those of data-set rows are counted
        separately.
        """
        name = self._names.of(prompt)
        if name is None:
            return None
        if name != self._names.only and name not in self._counted_names:
            is_real = is_real or prompt.origin is PromptOrigin.DATASET
            if is_real and len(self._counted_names) < MAX_ENVIRONMENTS - 1:
                self._counted_names.add(name)
            else:
                name = OTHER
        return f"train/environments/{name}"

    def _count_episode(self, rollout: Rollout, prefix: str) -> None:
        turns, seconds = len(rollout.turns), seconds_of(rollout)
        of_all = {
            "train/episode_turns_mean": turns,
            "train/episode_roots_mean": rollout.num_roots,
            "train/episode_context_tokens_mean": rollout.num_context_tokens,
            **{f"train/episode_seconds/{part}": s for part, s in seconds.items()},
        }
        of_environment = {f"{prefix}/turns_mean": float(turns)}
        of_environment |= {f"{prefix}/seconds/{part}": s for part, s in seconds.items()}
        for beginning, values in (("train", of_all), (prefix, of_environment)):
            self._means.setdefault(beginning, _Means()).add(values)
        if rollout.end is not None:
            self._counts[f"train/episode_ends/{rollout.end}"] += 1
            self._counts[f"{prefix}/ends/{rollout.end}"] += 1
        for turn in rollout.turns:
            self._counts[f"{prefix}/tool_errors"] += sum(
                message.is_error for message in turn.observed
            )
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
        ends += [
            f"{prefix}/ends/{end}" for prefix in means if prefix != "train" for end in EpisodeEnd
        ]
        calls = ("train/unreadable_calls", "train/unknown_tool_calls")
        statistics = dict.fromkeys((*ends, *calls), 0.0)
        statistics |= {name: float(count) for name, count in counts.items()}
        for mean in means.values():
            statistics |= mean.means()
        return statistics
