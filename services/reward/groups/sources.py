"""The sources of a run: what each has of its own, in a loop that they share.

A run without `sluice.sources` has one source without a name. Each source has its rows, its
settings, its sampling strategy and its part of every batch; replicas, scorers and the ledger are
shared. Where the fleet has no capacity for all, the source that is furthest behind its groups
starts first.
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
    """One source.

    Attributes:
        name: empty in a run without several.
        share: of every batch, as configured.
        follows_yield: whether the share moves with the yield.
        settings: of its groups.
        prompts: its rows.
        strategy: decides how many of its groups start, and which; learns from their ends.
        groups: its groups, counted.
        guard: knows whether its yield is hopeless.
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
        """Its groups in the next batch."""
        return self.groups.ages.batch_size

    def first_sequences(self, first_samples: int) -> int:
        """Return the sequences of a group's first request, which is for so many samples.

        The greedy response is of no use to a group that ends after its probes, so it is generated
        with the rest.
        """
        is_whole = first_samples >= self.settings.samples_per_group
        return first_samples + (is_whole and self.settings.greedy is not None)

    @property
    def is_exhausted(self) -> bool:
        """Whether its rows have ended or, where they begin again, all end without being sampled."""
        # Each epoch has another order, so two in a row hold a whole one wherever the count began.
        has_none = self.guard.num_unsampled >= 2 * self.settings.epoch_rows
        return (bool(self.name) and has_none) or self.prompts.is_exhausted

    @property
    def is_drained(self) -> bool:
        """Whether none of its groups runs and no more can start."""
        return self.is_exhausted and not self.groups.num_in_flight

    def statistics(self) -> dict[str, float]:
        """Return the strategy's gauges and counts, by metric name."""
        found = self.strategy.statistics()
        return {source_metric(self.name, name): value for name, value in found.items()}


class TrainingSources(dict[str, TrainingSource]):
    """All sources of a run, by name, in the order of the configuration.

    Args:
        sources: at least one.

    Attributes:
        has_dataset: whether rows are read at all.
        batch_size: groups in a train batch, of all sources.
    """

    def __init__(self, sources: Sequence[TrainingSource]) -> None:
        super().__init__({one.name: one for one in sources})
        self._that_follow_yields = [one for one in sources if one.follows_yield]
        self.has_dataset = any(one.prompts.has_dataset for one in sources)
        self.batch_size = sum(one.num_groups for one in sources)

    @property
    def num_waiting(self) -> int:
        """Accepted prompts that wait to be issued."""
        return sum(one.prompts.num_waiting for one in self.values())

    @property
    def is_exhausted(self) -> bool:
        """Whether no more groups of a source can start: no batch comes without it."""
        return any(one.is_exhausted for one in self.values())

    def lacking(self) -> str:
        """Return the named sources that keep the next batch waiting, as in ``: slow 0 of 2``."""
        found = [
            f"{one.name} {one.groups.num_kept} of {one.num_groups}"
            for one in self.values()
            if one.name and one.groups.num_kept < one.num_groups
        ]
        return f": {', '.join(found)}" if found else ""

    def share_out(self) -> None:
        """Give each source its part of the batches from here on, where shares follow yields."""
        if not self._that_follow_yields:
            return
        yields = {one.name: one.strategy.estimate.mean for one in self._that_follow_yields}
        shares = shares_by_yield({one.name: one.share for one in self.values()}, yields)
        for name, num_groups in groups_by_share(shares, self.batch_size).items():
            one = self[name]
            one.groups.ages.batch_size = num_groups
            one.strategy.resize(num_groups)


@dataclass(frozen=True, slots=True)
class SourceLoad:
    """One source as admission sees it.

    Args:
        mean_yield: share of its groups that will be kept, in (0, 1].
        num_to_start: groups that may start now.
    """

    load: LoopLoad
    num_groups: int
    mean_yield: float
    num_to_start: int

    @property
    def fill(self) -> float:
        """Batches that its groups fill: leased, kept, and those in flight by its yield."""
        load = self.load
        expected = self.mean_yield * (load.num_in_flight - load.num_sure)
        return (load.num_in_training + load.num_kept + load.num_sure + expected) / self.num_groups


def interleaved(groups: Sequence[Sequence[str]]) -> list[str]:
    """Return the groups of all sources in one order that keeps each source's own.

    Every part of it has the sources in the shares of the whole, as far as whole groups can: so has
    every mini-batch that is cut from it.
    """
    places = [
        ((index + 0.5) / len(own), number, group)
        for number, own in enumerate(groups)
        for index, group in enumerate(own)
    ]
    return [group for _, _, group in sorted(places)]
