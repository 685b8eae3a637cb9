"""Ages counted as groups come and go decide as the rules read group by group would."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.algorithm.groups.staleness import BatchDecision, GroupAges, OnStale


@dataclass
class PlainAges:
    """The rules of `staleness`, read group by group from lists that hold nothing else."""

    batch_size: int
    max_staleness: int
    on_stale: OnStale
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)  # oldest version, sequence
    running: dict[str, int] = field(default_factory=dict)  # start version
    reserved: dict[str, int] = field(
        default_factory=dict
    )  # likewise; they have a place for certain

    def places(self, version: int, next_version: int) -> int:
        """For groups of `version` or older, in the batches from `next_version` on."""
        batches = version + self.max_staleness - next_version + 1
        return max(0, batches) * self.batch_size

    def has_place(self, start_version: int, next_version: int) -> bool:
        oldest_allowed = next_version - self.max_staleness
        placed = [*(v for v, _ in self.kept.values()), *self.reserved.values()]
        usable = [v for v in placed if v >= oldest_allowed]
        younger = {start_version, *usable, *self.running.values()}
        return start_version >= oldest_allowed and all(
            sum(v <= version for v in usable) < self.places(version, next_version)
            for version in younger
            if version >= start_version
        )

    def without_slot(self, next_version: int) -> set[str]:
        oldest_allowed = next_version - self.max_staleness
        too_old = {name for name, v in self.reserved.items() if v < oldest_allowed}
        return too_old | {
            name for name, v in self.running.items() if not self.has_place(v, next_version)
        }

    def decide(self, version: int, kept_bound: Callable[[int], float]) -> BatchDecision:
        oldest_allowed = version - self.max_staleness
        ages = sorted((v, sequence, name) for name, (v, sequence) in self.kept.items())
        dropped = tuple(name for v, _, name in ages if v < oldest_allowed)
        eligible = [(v, name) for v, _, name in ages if oldest_allowed <= v <= version]
        chosen, without_slot = eligible[: self.batch_size], self.without_slot(version)
        num_missing = self.batch_size - len(chosen)
        waiting: list[int] = []
        if not num_missing and self.on_stale == "wait":
            under_way = {**self.running, **self.reserved}
            alive = [v for name, v in under_way.items() if name not in without_slot]
            waiting = [v for v in alive if v == oldest_allowed]
            for limit in range(oldest_allowed + 1, chosen[-1][0]):
                older = [v for v in alive if v <= limit]
                # One batch is formed now; the next ones have the places.
                if kept_bound(len(older)) > self.places(limit, version + 1):
                    waiting = older
        names = () if waiting or num_missing else tuple(name for _, name in chosen)
        return BatchDecision(
            names, dropped, tuple(sorted(set(waiting))), tuple(sorted(without_slot)), num_missing
        )


@dataclass
class Both:
    """The same events for both."""

    counted: GroupAges
    plain: PlainAges
    rng: random.Random
    version: int = 0
    num_issued: int = 0

    def _any(self, groups: Mapping[str, object]) -> str | None:
        return self.rng.choice(list(groups)) if groups else None

    def start(self) -> None:
        name = f"p{self.num_issued}"
        self.num_issued += 1
        self._runs(name)

    def reserve(self) -> None:
        name = f"p{self.num_issued}"
        self.num_issued += 1
        self.plain.reserved[name] = self.version
        self.counted.reserve(name, self.version)

    def start_over(self) -> None:
        name = self._any(self._under_way())
        if name is not None:
            self._runs(name)

    def pause(self) -> None:
        name = self._any(self._under_way())
        if name is not None:
            self.counted.pauses(name)
            self.plain.running.pop(name, None)

    def _under_way(self) -> dict[str, int]:
        return {**self.plain.running, **self.plain.reserved}

    def _runs(self, name: str) -> None:
        version = self.version + self.rng.choice((-2, -1, 0, 0, 0, 1))
        self.counted.add_running(name, version)
        ages = self.plain.reserved if name in self.plain.reserved else self.plain.running
        ages[name] = version

    def end(self) -> None:
        name = self._any(self._under_way())
        if name is None:
            self.counted.remove_running("of nobody")
            return
        version = self._under_way()[name]
        if self.rng.random() < 0.7:
            oldest = version + self.rng.choice((0, 0, 1))
            self.counted.keep(name, oldest, int(name[1:]))
            self.plain.kept[name] = (oldest, int(name[1:]))
            self.plain.reserved.pop(name, None)  # it takes one place, not two
        if self.rng.random() < 0.9:  # else its task has not ended yet
            self._leave(name)

    def give_up_kept(self) -> None:
        name = self._any({**self.plain.kept})
        if name is not None:
            self.counted.remove(name)
            del self.plain.kept[name]

    def take_over(self) -> None:
        if self.rng.random() < 0.1:
            for name in self.plain.kept:
                self.counted.remove(name)
            self.plain.kept.clear()

    def publish(self) -> None:
        self.version += 1

    def form(self) -> None:
        for name in self.check():
            self.counted.remove(name)
            del self.plain.kept[name]

    def cancel(self) -> None:
        for name in self.counted.without_slot(self.version):
            self._leave(name)

    def _leave(self, name: str) -> None:
        self.counted.remove_running(name)
        self.plain.running.pop(name, None)
        self.plain.reserved.pop(name, None)

    def check(self) -> tuple[str, ...]:
        """Both decide alike; returns the kept groups that would leave."""
        bound: Callable[[int], float] = self.rng.choice([float, lambda number: 0.4 * number])
        found, plain = self.counted.decide(self.version, bound), self.plain
        expected = plain.decide(self.version, bound)
        order = [plain.running[name] for name in found.without_slot if name in plain.running]
        assert order == sorted(order)
        assert expected == BatchDecision(
            found.chosen,
            tuple(sorted(found.dropped, key=lambda name: (*plain.kept[name], name))),
            found.waiting_for,
            tuple(sorted(found.without_slot)),
            found.num_missing,
        )
        for next_version in (self.version, self.version + 1):
            assert set(self.counted.without_slot(next_version)) == plain.without_slot(next_version)
        for name, version in plain.running.items():
            is_too_old = self.version - version > plain.max_staleness
            drops = plain.on_stale == "drop" and is_too_old
            assert self.counted.drops(name, self.version) == drops
        return (*found.chosen, *found.dropped)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from(["wait", "drop"]),
    st.integers(0, 2**32),
)
def test_any_sequence_of_events_is_decided_as_by_the_rules_read_group_by_group(
    batch_size: int, max_staleness: int, on_stale: OnStale, seed: int
) -> None:
    both = Both(
        GroupAges(batch_size, max_staleness, on_stale),
        PlainAges(batch_size, max_staleness, on_stale),
        random.Random(seed),
    )
    events = [both.start, both.start_over, both.end, both.give_up_kept, both.take_over]
    events += [both.publish, both.form, both.cancel, both.reserve, both.pause]
    for _ in range(80):
        both.rng.choices(events, weights=[10, 2, 8, 1, 1, 2, 4, 1, 3, 1])[0]()
        both.check()


def test_a_group_that_starts_over_counts_under_its_new_version_only() -> None:
    ages = GroupAges(1, 1, "wait")
    ages.keep("kept", 5, 0)
    ages.add_running("late", 4)
    assert ages.decide(5).waiting_for == (4,)
    ages.add_running("late", 5)
    assert ages.decide(5).chosen == ("kept",)
    ages.remove_running("late")
    assert ages.decide(5).chosen == ("kept",)
