"""Count groups and tokens by source, since the start and between two batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from sluice.algorithm.sources import source_metric
from sluice.types import PromptEnd, TrainGroup

_NAME_BY_END = {
    PromptEnd.FILTERED_ALL_RIGHT: "groups_all_right",
    PromptEnd.FILTERED_ALL_WRONG: "groups_all_wrong",
    PromptEnd.FILTERED_UNIFORM: "groups_uniform",
    PromptEnd.DROPPED_STALE: "groups_stale",
    PromptEnd.DROPPED_FAILED: "groups_failed",
}


class SourceStatistics:
    """Counts of each of several sources; those of a run without them are empty.

    Args:
        sources: their names.
    """

    def __init__(self, sources: Collection[str] = ()) -> None:
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in sources if name}
        self._before = {name: Counter[str]() for name in self._counts}

    def kept(self, source: str) -> None:
        """Count a kept group."""
        self._add(source, "groups_kept")

    def ended(self, source: str, end: PromptEnd) -> None:
        """Count a group that was filtered or dropped."""
        if end in _NAME_BY_END:
            self._add(source, _NAME_BY_END[end])

    def assigned(self, source: str, tokens: Iterable[tuple[str, int]]) -> None:
        """Count tokens by their use."""
        for use, number in tokens:
            self._add(source, f"tokens/{use}", number)

    def totals(self) -> dict[str, float]:
        """Return the counters since the start; of tokens, those of all sources add up to the
        run's, less those of validations."""
        return {
            f"reward/{source_metric(source, name)}": float(number)
            for source, counts in self._counts.items()
            for name, number in counts.items()
        }

    def close_interval(self, groups: Sequence[TrainGroup], version: int) -> dict[str, float]:
        """Return what was counted since the last batch, and what this one has of each source.

        Args:
            groups: the batch.
            version: the version that it will update.
        """
        found: dict[str, float] = {}
        for source, counts in self._counts.items():
            own = [group for group in groups if group.source == source]
            before = self._before[source]
            values = {
                **{name: float(number - before[name]) for name, number in counts.items()},
                **_of_batch(own, version),
                "groups": float(len(own)),
                "share": len(own) / max(len(groups), 1),
            }
            found |= {source_metric(source, name): value for name, value in values.items()}
            self._before[source] = counts.copy()
        return found

    def _add(self, source: str, name: str, number: int = 1) -> None:
        if source:
            self._counts[source][name] += number


def _of_batch(groups: Sequence[TrainGroup], version: int) -> dict[str, float]:
    """Return means over the samples of one source in a batch for `version`."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [scored.reward for group in groups for scored in group.scores]
    if not rollouts:
        return {}
    oldest = [one.oldest_version for one in rollouts if one.oldest_version is not None]
    num_tokens = sum(rollout.num_tokens for rollout in rollouts)
    return {
        "trained_tokens": float(num_tokens),
        "response_length_mean": num_tokens / len(rollouts),
        "reward_mean": sum(rewards) / len(rewards),
        "staleness_mean": sum(version - each for each in oldest) / max(len(oldest), 1),
    }
