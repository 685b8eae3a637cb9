"""Decide when a train batch is formed, and choose its groups (bounded staleness).

*Reservations.* A group is preempted when a batch is full without it: it is cancelled, and the next
policy generates samples for its prompt. Where an on-policy batch is filled on average
(`sampling.admission`), this always hits the slowest groups, so long answers would be preempted
again and again, and seldom be trained. Therefore a prompt that was preempted `RESERVE_AFTER` times
reserves a batch slot when it starts once more: it counts as a kept group does, and is not
preempted. The batch waits for it and preempts others, so few groups hold reservations at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

OnStale = Literal["wait", "drop"]

RESERVE_AFTER = 3
"""After this many preemptions in a row a group reserves a slot."""

RESERVED_SHARE = 1 / 8
"""Share of a batch's slots that may be reserved at a time; at least one slot."""


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """What to do with the kept groups now, by prompt id.

    Attributes:
        chosen: groups of the batch, oldest first: none, or exactly the batch size.
        dropped: kept groups beyond the staleness bound, oldest first, whether or not a batch is
            formed.
        waiting_for: start versions of the running groups that the batch waits for.
        without_slot: running groups to cancel (`GroupAges.without_slot`).
        num_missing: kept groups that the batch still needs.
    """

    chosen: tuple[str, ...]
    dropped: tuple[str, ...]
    waiting_for: tuple[int, ...]
    without_slot: tuple[str, ...]
    num_missing: int


class GroupAges:
    """Kept and running groups of a run, counted by version as they change.

    Thousands of groups may run, and every event may leave something to decide. Holding them by
    version makes a decision cost O(versions), and O(groups) only for the groups that it names.

    Some running groups have a reserved slot, from before they hold tokens until they end.

    Args:
        batch_size: B >= 1, groups in a batch; with several sources, this source's part of it.
        max_staleness: S >= 0.
        on_stale: ``wait`` until running groups that would be too old for the next batch end, or
            ``drop`` them.
    """

    def __init__(self, batch_size: int, max_staleness: int, on_stale: OnStale) -> None:
        self.batch_size, self._max_staleness = batch_size, max_staleness
        self._on_stale: OnStale = on_stale
        self._kept = _ByVersion()
        self._running = _ByVersion()
        self._reserved = _ByVersion()  # of those that run, with a reserved slot

    def keep(self, prompt_id: str, oldest_version: int, sequence: int) -> None:
        """Note that a group waits for a batch.

        Args:
            sequence: its number in the order of issue; the lowest of a version is taken first.
        """
        self._kept.put(prompt_id, oldest_version, sequence)
        self._reserved.take(prompt_id)  # its task may not have ended; it takes one slot, not two

    def remove(self, prompt_id: str) -> None:
        """Note that a kept group waits no more; harmless if it did not wait."""
        self._kept.take(prompt_id)

    def reserve(self, prompt_id: str, version: int) -> None:
        """Reserve a group's slot in the batch for `version` until it leaves (`reserves_slot`),
        whether or not it holds tokens yet."""
        self._reserved.put(prompt_id, version)

    def add_running(self, prompt_id: str, start_version: int) -> None:
        """Note that a group starts, or starts again: its tokens are of `start_version` or later."""
        has_reservation = prompt_id in self._reserved.versions
        (self._reserved if has_reservation else self._running).put(prompt_id, start_version)

    def pauses(self, prompt_id: str) -> None:
        """Note that a group holds no tokens any more; its reservation remains."""
        self._running.take(prompt_id)

    def remove_running(self, prompt_id: str) -> None:
        """Note that a group runs no more; harmless if it did not run."""
        self._running.take(prompt_id)
        self._reserved.take(prompt_id)

    def decide(self, version: int, kept_bound: Callable[[int], float] = float) -> BatchDecision:
        """Decide whether the batch for `version` is formed now, and choose its groups.

        A kept group newer than `version` is neither chosen nor dropped: its policy is published but
        not announced yet.

        Args:
            version: the version that the batch will update.
            kept_bound: upper bound on how many of a number of running groups will be kept. The
                default (all) loses nothing; `admission.kept_upper_bound` waits less at low yield.
        """
        kept, oldest_allowed = self._kept.groups, version - self._max_staleness
        dropped = _older_than(kept, oldest_allowed)
        without_slot = self.without_slot(version)
        versions_needed: list[int] = []  # versions of the oldest groups, as many as fill the batch
        num_missing = self.batch_size
        for oldest_version in sorted(kept):
            if oldest_allowed <= oldest_version <= version and num_missing > 0:
                versions_needed.append(oldest_version)
                num_missing -= len(kept[oldest_version])
        if num_missing > 0:
            return BatchDecision((), dropped, (), without_slot, num_missing)
        if self._on_stale == "wait":
            waiting_for = self._versions_to_wait_for(
                versions_needed[-1], oldest_allowed, kept_bound
            )
            if waiting_for:
                return BatchDecision((), dropped, waiting_for, without_slot, 0)
        chosen: list[str] = []
        for oldest_version in versions_needed:
            chosen += sorted(kept[oldest_version], key=kept[oldest_version].__getitem__)
        return BatchDecision(tuple(chosen[: self.batch_size]), dropped, (), without_slot, 0)

    def without_slot(self, next_version: int) -> tuple[str, ...]:
        """Return the running groups that would have no batch slot in time if they were kept.

        Let S be the bound and B the groups of a batch. For any version u, the batches for
        `next_version` to u + S have ``(u + S - next_version + 1) * B`` slots for groups of
        version u or older. Where kept groups fill them, no slot remains for a running
        group that old, nor where it would push out a kept group of a younger version. Call this
        whenever a group is kept or starts: no other event leaves a running group without a slot.

        Args:
            next_version: version of the next batch to be formed: the current one, or the one after
                it while the trainer holds a batch.
        """
        oldest_allowed = next_version - self._max_staleness
        first_with_slot = self._first_with_slot(oldest_allowed)
        return _older_than(self._running.groups, first_with_slot) + _older_than(
            self._reserved.groups, oldest_allowed
        )

    def drops(self, prompt_id: str, next_version: int) -> bool:
        """Return whether a group without a slot is dropped for its age; if not, it starts again.

        Raises:
            KeyError: the group is not running, or has a reserved slot (it is never dropped).
        """
        is_too_old = self._running.versions[prompt_id] < next_version - self._max_staleness
        return self._on_stale == "drop" and is_too_old

    def _first_with_slot(self, oldest_allowed: int) -> int:
        """Return the oldest version whose running groups may still get a batch slot."""
        kept, running, reserved = self._kept.groups, self._running.groups, self._reserved.groups
        first_version, filled = oldest_allowed, 0
        if not kept and not reserved:  # at every start: nothing fills a slot
            return first_version
        # The batches up to the one for `version` + S take groups of `version` or older: there are
        # `version - oldest_allowed + 1` of them. Once those are full, `version` has no slot left.
        for version in sorted({*kept, *running, *reserved}):
            if version < oldest_allowed:
                continue
            filled += len(kept.get(version, ())) + len(reserved.get(version, ()))
            if filled >= (version - oldest_allowed + 1) * self.batch_size:
                first_version = version + 1
        return first_version

    def _versions_to_wait_for(
        self, newest_chosen: int, oldest_allowed: int, kept_bound: Callable[[int], float]
    ) -> tuple[int, ...]:
        """Return start versions of running groups that would have no slot if the batch were formed
        now.
        """
        first_with_slot = self._first_with_slot(oldest_allowed)
        alive = {v: len(ids) for v, ids in self._running.groups.items() if v >= first_with_slot}
        for v, ids in self._reserved.groups.items():
            if v >= oldest_allowed:
                alive[v] = alive.get(v, 0) + len(ids)
        waiting_for = [oldest_allowed] if oldest_allowed in alive else []
        for start_version in range(oldest_allowed + 1, newest_chosen):
            # All kept groups this old are chosen, since a younger one is: only running ones remain.
            older = sorted(v for v in alive if v <= start_version)
            num_slots = (start_version - oldest_allowed) * self.batch_size
            if kept_bound(sum(alive[v] for v in older)) > num_slots:
                waiting_for = older
        return tuple(waiting_for)


def _older_than(groups: Mapping[int, Collection[str]], version: int) -> tuple[str, ...]:
    old_versions = sorted([v for v in groups if v < version])  # a list is faster than a generator
    if not old_versions:
        return ()
    return tuple(prompt_id for v in old_versions for prompt_id in groups[v])


class _ByVersion:
    """Groups by version, and the version of each. Versions without a group are left out."""

    def __init__(self) -> None:
        self.groups: dict[int, dict[str, int]] = {}  # version -> prompt id -> sequence
        self.versions: dict[str, int] = {}

    def put(self, prompt_id: str, version: int, sequence: int = 0) -> None:
        if prompt_id in self.versions:
            self.take(prompt_id)
        self.versions[prompt_id] = version
        same_age = self.groups.get(version)
        if same_age is None:
            same_age = self.groups[version] = {}
        same_age[prompt_id] = sequence

    def take(self, prompt_id: str) -> None:
        version = self.versions.pop(prompt_id, None)
        if version is None:
            return
        same_age = self.groups[version]
        del same_age[prompt_id]
        if not same_age:
            del self.groups[version]


def reserves_slot(num_preemptions: int, num_reserved: int, batch_size: int) -> bool:
    """Return whether a group that starts after `num_preemptions` preemptions reserves a batch slot.

    Args:
        num_preemptions: preemptions of its prompt in a row.
        num_reserved: slots reserved by other groups now.
        batch_size: B, groups in a train batch.
    """
    is_due = num_preemptions >= RESERVE_AFTER
    return is_due and num_reserved < max(1, int(RESERVED_SHARE * batch_size))
