"""The sources of a run: the state of each, in one shared loop.

A run without `sluice.sources` has one source with an empty name. Each source has its rows,
settings, sampling strategy and part of every batch; replicas, scorers and the ledger are shared. If
the fleet lacks capacity for all, the source that has filled its part of the batches least starts
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.reward.group_table import SourceGroups
from services.reward.groups.settings import GroupSettings
from services.reward.prompts.source import PromptSource
from services.reward.records.failures import YieldGuard
from sluice.algorithm.sampling.strategy import LoopLoad, SamplingStrategy
from sluice.algorithm.sources import groups_by_share, shares_by_yield, source_metric


@dataclass(slots=True, eq=False)
class TrainingSource:
    """A source of training prompts.

    Attributes:
        name: empty in a run without `sluice.sources`.
        share: its share of every batch, as configured.
        follows_yield: whether the share follows the yield.
        settings: the settings of its groups.
        prompts: its rows.
        strategy: decides how many groups start, and which; learns from their ends.
        groups: its groups, counted.
        guard: stops the run if its yield is too low.
        num_skipped: prompts skipped in a row.
    """

    name: str
    share: float
    follows_yield: bool
    settings: GroupSettings
    prompts: PromptSource
    strategy: SamplingStrategy
    groups: SourceGroups
    guard: YieldGuard
    num_skipped: int = 0

    @property
    def num_groups(self) -> int:
        """The number of its groups in the next batch."""
        return self.groups.ages.batch_size

    def first_sequences(self, first_samples: int) -> int:
        """Return the number of sequences in a group's first request for `first_samples`.

        A group that ends after its probes needs no greedy response, so it is generated with the
        rest.
        """
        is_whole = first_samples >= self.settings.samples_per_group
        return first_samples + (is_whole and self.settings.greedy is not None)

    @property
    def is_exhausted(self) -> bool:
        """Whether its rows have ended or, if epochs repeat, all end without being sampled."""
        # Every epoch has another order, so only two epochs' rows surely contain a whole epoch.
        has_none = self.guard.num_unsampled >= 2 * self.settings.epoch_rows
        return (bool(self.name) and has_none) or self.prompts.is_exhausted

    @property
    def is_drained(self) -> bool:
        """Whether no group of it runs and none can start."""
        return self.is_exhausted and not self.groups.num_in_flight

    def statistics(self) -> dict[str, float]:
        """Return the strategy's gauges and counts, by metric name."""
        statistics = self.strategy.statistics()
        return {source_metric(self.name, name): value for name, value in statistics.items()}


class TrainingSources(dict[str, TrainingSource]):
    """All sources of a run, by name, in the order of the configuration.

    Args:
        sources: at least one.

    Attributes:
        has_dataset: whether there is a data set.
        batch_size: groups in a train batch, over all sources.
    """

    def __init__(self, sources: Sequence[TrainingSource]) -> None:
        super().__init__({source.name: source for source in sources})
        self._that_follow_yields = [source for source in sources if source.follows_yield]
        self.has_dataset = any(source.prompts.has_dataset for source in sources)
        self.batch_size = sum(source.num_groups for source in sources)

    @property
    def num_waiting(self) -> int:
        """Accepted prompts that wait to be issued."""
        return sum(source.prompts.num_waiting for source in self.values())

    @property
    def is_exhausted(self) -> bool:
        """Whether some source can start no more groups; every batch needs groups of each."""
        return any(source.is_exhausted for source in self.values())

    def lacking(self) -> str:
        """Return the named sources that the next batch waits for, such as ``: slow 0 of 2``."""
        parts = [
            f"{source.name} {source.groups.num_kept} of {source.num_groups}"
            for source in self.values()
            if source.name and source.groups.num_kept < source.num_groups
        ]
        return f": {', '.join(parts)}" if parts else ""

    def share_out(self) -> None:
        """Set each source's part of the later batches, if shares follow yields."""
        if not self._that_follow_yields:
            return
        yields = {source.name: source.strategy.estimate.mean for source in self._that_follow_yields}
        shares = shares_by_yield({source.name: source.share for source in self.values()}, yields)
        for name, num_groups in groups_by_share(shares, self.batch_size).items():
            source = self[name]
            source.groups.ages.batch_size = num_groups
            source.strategy.resize(num_groups)


@dataclass(frozen=True, slots=True)
class SourceLoad:
    """The state of a source that admission uses.

    Args:
        mean_yield: expected share of kept groups, in (0, 1].
        num_to_start: groups that may start now.
    """

    load: LoopLoad
    num_groups: int
    mean_yield: float
    num_to_start: int

    @property
    def fill(self) -> float:
        """How many batches its groups fill: leased and kept ones, and those in flight by its
        yield."""
        load = self.load
        expected = self.mean_yield * (load.num_in_flight - load.num_sure)
        return (load.num_in_training + load.num_kept + load.num_sure + expected) / self.num_groups


def interleave(groups: Sequence[Sequence[str]]) -> list[str]:
    """Merge the groups of all sources, keeping the order within each source.

    Every part of the result, and so every mini-batch cut from it, holds the sources in the same
    shares, up to whole groups.
    """
    places = [
        ((index + 0.5) / len(source_groups), number, group)
        for number, source_groups in enumerate(groups)
        for index, group in enumerate(source_groups)
    ]
    return [group for _, _, group in sorted(places)]
