"""When a batch may be formed, and that nobody is too stale, lost or starved."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.algorithm.groups.staleness import GroupAges, OnStale
from sluice.algorithm.sampling.admission import YieldEstimate, groups_to_admit, kept_upper_bound


class KeptGroup(NamedTuple):
    oldest_version: int
    sequence: int


class Found(NamedTuple):
    """A decision: kept groups by their place in the list given, running ones by name."""

    chosen: tuple[int, ...]
    dropped: tuple[int, ...]
    waiting_for: tuple[str, ...]
    without_slot: tuple[str, ...]
    num_missing: int


def ages_of(
    kept: Iterable[tuple[int, int]],
    running: Iterable[tuple[str, int]],
    *,
    max_staleness: int,
    batch_size: int,
    on_stale: OnStale = "wait",
) -> GroupAges:
    """Ages of kept groups, named by their place, and of running ones."""
    ages = GroupAges(batch_size, max_staleness, on_stale)
    for place, (version, sequence) in enumerate(kept):
        ages.keep(f"kept {place}", version, sequence)
    for name, version in running:
        ages.add_running(name, version)
    return ages


def decide(
    kept: list[tuple[int, int]],
    in_flight: list[tuple[str, int]],
    *,
    version: int,
    max_staleness: int,
    on_stale: OnStale = "wait",
    batch_size: int = 2,
    kept_bound: Callable[[int], float] = float,
) -> Found:
    ages = ages_of(
        kept, in_flight, max_staleness=max_staleness, batch_size=batch_size, on_stale=on_stale
    )
    found = ages.decide(version, kept_bound)
    return Found(
        tuple(int(name.removeprefix("kept ")) for name in found.chosen),
        tuple(int(name.removeprefix("kept ")) for name in found.dropped),
        tuple(name for start in found.waiting_for for name, v in in_flight if v == start),
        found.without_slot,
        found.num_missing,
    )


def test_too_few_kept_groups_form_no_batch() -> None:
    found = decide([(3, 0)], [], version=3, max_staleness=1)
    assert found == Found((), (), (), (), 1)


def test_the_oldest_groups_are_chosen_by_version_then_sequence() -> None:
    found = decide([(3, 1), (2, 9), (3, 0), (2, 8)], [], version=3, max_staleness=1)
    assert found.chosen == (3, 1)


def test_on_policy_batches_hold_the_current_version_only() -> None:
    found = decide([(2, 0), (3, 1), (2, 2), (3, 3)], [], version=3, max_staleness=0)
    assert (found.chosen, found.dropped) == ((1, 3), (0, 2))


def test_a_running_group_at_its_last_chance_holds_the_batch() -> None:
    found = decide([(3, 1), (3, 2)], [("late", 2), ("new", 3)], version=3, max_staleness=1)
    assert (found.chosen, found.waiting_for, found.without_slot) == ((), ("late",), ())


def test_drop_does_not_wait() -> None:
    found = decide([(3, 1), (3, 2)], [("late", 2)], version=3, max_staleness=1, on_stale="drop")
    assert (found.chosen, found.waiting_for) == ((0, 1), ())


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_groups_beyond_the_bound_are_dropped_and_running_ones_lose_their_slot(
    on_stale: OnStale,
) -> None:
    found = decide(
        [(1, 0), (3, 1), (3, 2)], [("a", 1)], version=3, max_staleness=1, on_stale=on_stale
    )
    assert (found.dropped, found.without_slot, found.chosen) == ((0,), ("a",), (1, 2))


def test_groups_are_dropped_even_when_no_batch_can_be_formed() -> None:
    assert decide([(1, 0)], [], version=3, max_staleness=1).dropped == (0,)


def test_a_batch_does_not_give_away_places_that_older_running_groups_need() -> None:
    running = [(name, 1) for name in "abc"]
    # Three of version 1 still run; after this batch only one batch of two can take them.
    waits = decide([(2, 1), (2, 2)], running, version=2, max_staleness=2)
    assert (waits.chosen, waits.waiting_for) == ((), ("a", "b", "c"))
    forms = decide([(2, 1), (2, 2)], running[:2], version=2, max_staleness=2)
    assert (forms.chosen, forms.waiting_for) == ((0, 1), ())


def test_an_expected_yield_shortens_the_wait_for_places() -> None:
    found = decide(
        [(2, 1), (2, 2)],
        [(name, 1) for name in "abcd"],
        version=2,
        max_staleness=2,
        kept_bound=lambda number: number / 2,
    )
    assert found.chosen == (0, 1)


def test_running_groups_have_no_slot_once_kept_ones_fill_their_places() -> None:
    # The last batch that may hold version 2 is the next one, and it is full.
    found = decide([(2, 1), (2, 2)], [("old", 2), ("new", 3)], version=3, max_staleness=1)
    assert (found.chosen, found.without_slot, found.waiting_for) == ((0, 1), ("old",), ())


def test_running_groups_have_no_slot_where_they_would_push_out_a_younger_kept_one() -> None:
    kept = [(2, 1), (3, 2), (3, 3), (3, 4)]
    found = decide(kept, [("old", 2), ("new", 3), ("newest", 4)], version=3, max_staleness=1)
    assert found.without_slot == ("old", "new")


def test_on_policy_running_groups_beside_a_full_batch_have_no_slot() -> None:
    found = decide([(3, 1), (3, 2)], [("surplus", 3)], version=3, max_staleness=0)
    assert (found.chosen, found.without_slot) == ((0, 1), ("surplus",))


def test_a_group_of_an_unannounced_version_stays() -> None:
    found = decide([(4, 0), (3, 1), (3, 2)], [], version=3, max_staleness=0)
    assert (found.chosen, found.dropped) == ((1, 2), ())


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 50)), max_size=12),
    st.lists(st.tuples(st.text(max_size=2), st.integers(0, 6)), max_size=6),
    st.integers(0, 6),
    st.integers(0, 3),
    st.integers(1, 4),
    st.sampled_from(["wait", "drop"]),
)
def test_no_chosen_group_exceeds_the_bound(
    kept: list[tuple[int, int]],
    in_flight: list[tuple[str, int]],
    version: int,
    max_staleness: int,
    batch_size: int,
    on_stale: OnStale,
) -> None:
    found = decide(
        kept,
        in_flight,
        version=version,
        max_staleness=max_staleness,
        on_stale=on_stale,
        batch_size=batch_size,
    )
    assert len(found.chosen) in {0, batch_size}
    assert all(0 <= version - kept[i][0] <= max_staleness for i in found.chosen)
    assert all(version - kept[i][0] > max_staleness for i in found.dropped)
    assert bool(found.chosen) + bool(found.waiting_for) + bool(found.num_missing) == 1


CERTAIN = YieldEstimate(prior_weight=1e15)
RECKLESS = YieldEstimate(prior_yield=0.05, prior_weight=1e6)


@dataclass
class Loop:
    """The reward service's state in a world without time: events come in a random order."""

    batch_size: int
    max_staleness: int
    max_in_flight: int
    estimate: YieldEstimate
    num_ahead: int | None = None
    version: int = 0
    num_in_training: int = 0
    issued: int = 0
    queued: list[int] = field(default_factory=list)  # admitted, but no replica has begun them
    in_flight: list[tuple[int, int]] = field(default_factory=list)  # sequence, start version
    kept: list[KeptGroup] = field(default_factory=list)
    trained: list[tuple[int, int]] = field(default_factory=list)  # sequence, staleness
    dropped: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)

    def admit(self) -> None:
        number = groups_to_admit(
            train_batch_size=self.batch_size,
            max_staleness=self.max_staleness,
            num_in_flight=len(self.queued) + len(self.in_flight),
            num_kept=len(self.kept),
            num_in_training=self.num_in_training,
            estimate=self.estimate,
            max_in_flight=self.max_in_flight,
            num_ahead=self.num_ahead,
        )
        self.queued += range(self.issued, self.issued + number)
        self.issued += number

    def start(self) -> None:
        self.in_flight.append((self.queued.pop(0), self.version))
        self.cancel_without_slot()

    def end(self, index: int, kept: bool) -> None:
        sequence, version = self.in_flight.pop(index)
        self.estimate = self.estimate.observe(kept)
        if kept:
            self.kept.append(KeptGroup(version, sequence))
            self.cancel_without_slot()

    def running(self) -> list[tuple[str, int]]:
        return [(str(sequence), version) for sequence, version in self.in_flight]

    def cancel_without_slot(self) -> None:
        ages = ages_of(
            self.kept,
            self.running(),
            max_staleness=self.max_staleness,
            batch_size=self.batch_size,
        )
        without_slot = ages.without_slot(self.version + bool(self.num_in_training))
        self.cancelled += [
            sequence for sequence, _ in self.in_flight if str(sequence) in without_slot
        ]
        self.in_flight = [group for group in self.in_flight if str(group[0]) not in without_slot]

    def form(self) -> None:
        if self.num_in_training:
            return
        found = decide(
            [*self.kept],
            self.running(),
            version=self.version,
            max_staleness=self.max_staleness,
            batch_size=self.batch_size,
            kept_bound=lambda number: kept_upper_bound(number, self.estimate),
        )
        chosen = [self.kept[i] for i in found.chosen]
        self.trained += [(g.sequence, self.version - g.oldest_version) for g in chosen]
        self.dropped += [self.kept[i].sequence for i in found.dropped]
        gone = {*found.chosen, *found.dropped}
        self.kept = [group for i, group in enumerate(self.kept) if i not in gone]
        self.num_in_training = len(chosen)

    def publish(self) -> None:
        if self.num_in_training:
            self.version, self.num_in_training = self.version + 1, 0


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 24),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([0.3, 1.0]),
    st.sampled_from([CERTAIN, YieldEstimate(), RECKLESS]),
    st.sampled_from([None, 1, 3]),
)
def test_nothing_is_lost_too_stale_or_starved_whatever_the_order_of_events(
    batch_size: int,
    max_staleness: int,
    max_in_flight: int,
    seed: int,
    newest_ends_first: float,
    true_yield: float,
    estimate: YieldEstimate,
    ahead: int | None,
) -> None:
    rng = random.Random(seed)
    num_ahead = ahead if max_staleness else None
    loop = Loop(batch_size, max_staleness, max_in_flight, estimate, num_ahead)
    for _ in range(600):
        loop.admit()
        if loop.queued and rng.random() < 0.5:
            loop.start()
        elif loop.in_flight and (rng.random() < 0.7 or not loop.num_in_training):
            last = len(loop.in_flight) - 1
            newest = rng.random() < newest_ends_first
            loop.end(last if newest else rng.randint(0, last), rng.random() < true_yield)
        elif loop.queued and not loop.num_in_training:
            loop.start()
        else:
            loop.publish()
        loop.form()
    assert loop.dropped == []
    if estimate is CERTAIN or max_staleness == 0:
        assert loop.cancelled == []
    assert all(0 <= behind <= max_staleness for _, behind in loop.trained)
    sequences = [sequence for sequence, _ in loop.trained]
    assert len(set(sequences)) == len(sequences)
    assert loop.version >= 400 * 0.1 * true_yield / batch_size
    # Starved would be a kept or running group that later ones overtake for ever.
    assert all(loop.version - group.oldest_version <= max_staleness + 1 for group in loop.kept)
    assert all(loop.version - started <= max_staleness + 1 for _, started in loop.in_flight)
