"""Count what graded episodes did: turns, roots, calls of tools, ends, and where their time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from sluice.types import EpisodeEnd, Failed, FailureKind, Outcome, Rollout, ToolCall, Turn

_PARTS = ("queue", "model", "environment")


def is_episode(rollout: Rollout) -> bool:
    """Return whether a sample was played with an environment."""
    return rollout.end is not None or len(rollout.turns) > 1


def calls_of(turn: Turn) -> tuple[ToolCall, ...]:
    """Return the calls of tools in a turn's answer."""
    return turn.answer.tool_calls if turn.answer else ()


def seconds_of(rollout: Rollout) -> dict[str, float]:
    """Return the seconds that a sample spent, by part."""
    return {
        part: round(sum(turn.seconds.get(part, 0.0) for turn in rollout.turns), 4)
        for part in _PARTS
    }


class EpisodeCounts:
    """The episodes since the last batch.

    Args:
        tool_names: of the tools that were offered; a policy may write any other name.
    """

    def __init__(self, tool_names: Collection[str] = ()) -> None:
        self._tool_names = tool_names
        self._num = 0
        self._sums: dict[str, float] = {}  # of what is reported as a mean
        self._counts = Counter[str]()

    def graded(self, samples: Iterable[tuple[Rollout, Outcome]]) -> None:
        """Count graded samples; those without an environment are left out."""
        for rollout, outcome in samples:
            failed = isinstance(outcome, Failed) and outcome.kind is FailureKind.ENVIRONMENT
            self._counts["train/episode_ends/failed"] += failed
            if is_episode(rollout):
                self._add(rollout)

    def _add(self, rollout: Rollout) -> None:
        self._num += 1
        values = {
            "train/episode_turns_mean": len(rollout.turns),
            "train/episode_roots_mean": rollout.num_roots,
            "train/episode_context_tokens_mean": rollout.num_context_tokens,
            **{f"train/episode_seconds/{part}": s for part, s in seconds_of(rollout).items()},
        }
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        if rollout.end is not None:
            self._counts[f"train/episode_ends/{rollout.end}"] += 1
        for turn in rollout.turns:
            if turn.answer is not None:
                self._counts["train/unreadable_calls"] += bool(turn.answer.tool_error)
            for call in calls_of(turn):
                if call.name in self._tool_names:
                    self._counts[f"train/tool_calls/{call.name}"] += 1
                else:
                    self._counts["train/unknown_tool_calls"] += 1

    def take(self) -> dict[str, float]:
        """Return the metrics of the interval and begin again; none without episodes."""
        num, sums, counts = self._num, self._sums, self._counts
        self._num, self._sums, self._counts = 0, {}, Counter()
        if not num and not counts.total():
            return {}
        ends = (f"train/episode_ends/{end}" for end in (*EpisodeEnd, "failed"))
        found = dict.fromkeys((*ends, "train/unreadable_calls", "train/unknown_tool_calls"), 0.0)
        found |= {name: float(count) for name, count in counts.items()}
        return found | {name: total / num for name, total in sums.items()}
