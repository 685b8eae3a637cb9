"""Decide when a train batch is formed, and choose its groups (bounded staleness).

*Reservations.* A group is preempted when a batch is full without it: it is cancelled, and the next
policy generates samples for its prompt. Where an on-policy batch is filled on average
(`sampling.admission`), this always hits the slowest groups, so long answers would be preempted
again and again, and seldom be trained. Therefore a prompt that was preempted `RESERVE_AFTER` times
reserves a batch slot when it starts once more: it counts as a kept group does, and is not
preempted. The batch waits for it and preempts others, so few groups hold reservations at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

OnStale = Literal["wait", "drop"]

RESERVE_AFTER = 3
"""After this many preemptions in a row a group reserves a slot."""

RESERVED_SHARE = 1 / 8
"""Share of a batch's slots that may be reserved at a time; at least one slot."""

KeptByVersion = Mapping[int, Mapping[str, int]]
"""Kept groups: oldest version -> prompt id -> sequence."""

RunningByVersion = Mapping[int, Collection[str]]
"""Groups that are generated or graded: start version -> prompt ids. Their tokens are of that
version or later."""

_NONE: RunningByVersion = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """What to do with the kept groups now, by prompt id.

    Attributes:
        chosen: groups of the batch, oldest first: none, or exactly the batch size.
        dropped: kept groups beyond the staleness bound, oldest first, whether or not a batch is
            formed.
        waiting_for: start versions of the running groups that the batch waits for.
        without_slot: running groups to cancel (`groups_without_slot`).
        num_missing: kept groups that the batch still needs.
    """

    chosen: tuple[str, ...]
    dropped: tuple[str, ...]
    waiting_for: tuple[int, ...]
    without_slot: tuple[str, ...]
    num_missing: int


def staleness(current_version: int, oldest_version: int) -> int:
    """Return how many versions the oldest token of a group lags behind the version to be updated.

    Raises:
        ValueError: `oldest_version` is newer than `current_version`.
    """
    if oldest_version > current_version:
        raise ValueError(
            f"tokens of version {oldest_version} cannot meet a policy of version {current_version}"
        )
    return current_version - oldest_version


def may_form_batch(
    kept: KeptByVersion,
    running: RunningByVersion,
    *,
    version: int,
    max_staleness: int,
    batch_size: int,
    on_stale: OnStale,
    kept_bound: Callable[[int], float] = float,
    reserved: RunningByVersion = _NONE,
) -> BatchDecision:
    """Decide whether the batch for `version` is formed now, and choose its groups.

    A kept group newer than `version` is neither chosen nor dropped: its policy is published but
    not announced yet. Costs O(versions), and O(groups) of the versions that something is decided
    about.

    Args:
        kept: the kept groups that wait.
        running: the running groups without a reserved slot.
        version: the version the batch will update.
        max_staleness: S >= 0.
        batch_size: B >= 1, groups in a batch.
        on_stale: ``wait`` until running groups too old for the next batch end, or ``drop`` them.
        kept_bound: upper bound on how many of a number of running groups will be kept. The
            default (all) loses nothing; `admission.kept_upper_bound` waits less at low yield.
        reserved: running groups with a reserved slot.
    """
    oldest_allowed = version - max_staleness
    dropped = _older_than(kept, oldest_allowed)
    first_with_slot = _first_with_slot(kept, running, reserved, oldest_allowed, batch_size)
    without_slot = _older_than(running, first_with_slot) + _older_than(reserved, oldest_allowed)
    eligible = sorted(v for v in kept if oldest_allowed <= v <= version)
    num_missing = max(0, batch_size - sum(len(kept[v]) for v in eligible))
    if num_missing:
        return BatchDecision((), dropped, (), without_slot, num_missing)
    newest = _newest_chosen(kept, eligible, batch_size)
    waiting_for: tuple[int, ...] = ()
    if on_stale == "wait":
        alive = {v: len(ids) for v, ids in running.items() if v >= first_with_slot and ids}
        for v, ids in reserved.items():
            if v >= oldest_allowed and ids:
                alive[v] = alive.get(v, 0) + len(ids)
        waiting_for = _last_chance(
            alive, newest, oldest_allowed, batch_size=batch_size, kept_bound=kept_bound
        )
    if waiting_for:
        return BatchDecision((), dropped, waiting_for, without_slot, 0)
    chosen: list[str] = []
    for version_kept in eligible[: eligible.index(newest) + 1]:
        chosen += sorted(kept[version_kept], key=kept[version_kept].__getitem__)
    return BatchDecision(tuple(chosen[:batch_size]), dropped, (), without_slot, 0)


def groups_without_slot(
    kept: KeptByVersion,
    running: RunningByVersion,
    *,
    next_version: int,
    max_staleness: int,
    batch_size: int,
    reserved: RunningByVersion = _NONE,
) -> tuple[str, ...]:
    """Return the prompt ids of running groups that would have no batch slot in time if kept.

    The batches for `next_version` to u + S have ``(u + S - next_version + 1) * B`` slots for groups
    of version u or older. Where kept groups fill them, no slot remains for a running group that
    old, nor where it would push out a kept group of a younger version. Call this whenever a group
    is kept or starts: no other event leaves a running group without a slot. Costs O(versions) where
    every group has a slot.

    Args:
        kept: the kept groups that wait.
        running: the running groups without a reserved slot.
        next_version: version of the next batch to be formed: the current one, or the one after it
            while the trainer holds a batch.
        max_staleness: S.
        batch_size: B.
        reserved: running groups with a reserved slot.
    """
    oldest_allowed = next_version - max_staleness
    first_with_slot = _first_with_slot(kept, running, reserved, oldest_allowed, batch_size)
    return _older_than(running, first_with_slot) + _older_than(reserved, oldest_allowed)


def _first_with_slot(
    kept: KeptByVersion,
    running: RunningByVersion,
    reserved: RunningByVersion,
    oldest_allowed: int,
    batch_size: int,
) -> int:
    """Return the oldest version whose running groups may still get a batch slot."""
    first_with_slot, filled = oldest_allowed, 0
    if not kept and not reserved:  # at every start: nothing fills a slot
        return first_with_slot
    # The batches up to the one for `version + max_staleness` take groups of `version` or older:
    # `version - oldest_allowed + 1` batches. Once those are full, `version` has no slot left.
    for version in sorted(v for v in {*kept, *running, *reserved} if v >= oldest_allowed):
        filled += len(kept.get(version, ())) + len(reserved.get(version, ()))
        if filled >= (version - oldest_allowed + 1) * batch_size:
            first_with_slot = version + 1
    return first_with_slot


def _older_than(groups: Mapping[int, Collection[str]], version: int) -> tuple[str, ...]:
    old = sorted([v for v in groups if v < version])  # a list is faster than a generator
    if not old:
        return ()
    return tuple(prompt_id for v in old for prompt_id in groups[v])


def _newest_chosen(kept: KeptByVersion, eligible: Sequence[int], batch_size: int) -> int:
    """Return the youngest of the eligible versions that the oldest `batch_size` groups need."""
    filled = 0
    for version in eligible:
        filled += len(kept[version])
        if filled >= batch_size:
            return version
    raise AssertionError("fewer kept groups than a batch")


def _last_chance(
    alive: Mapping[int, int],
    newest_chosen: int,
    oldest_allowed: int,
    *,
    batch_size: int,
    kept_bound: Callable[[int], float],
) -> tuple[int, ...]:
    """Return start versions of running groups that would have no slot if the batch were formed now.

    Args:
        alive: running groups by start version, none older than `oldest_allowed`.
        newest_chosen: youngest version in the batch.
        oldest_allowed: oldest version that may be in it.
        batch_size: B.
        kept_bound: see `may_form_batch`.
    """
    waiting_for = [v for v in alive if v == oldest_allowed]
    for start_version in range(oldest_allowed + 1, newest_chosen):
        # All kept groups this old are chosen, since a younger one is: only running ones remain.
        older = sorted(v for v in alive if v <= start_version)
        num_slots = (start_version - oldest_allowed) * batch_size
        if kept_bound(sum(alive[v] for v in older)) > num_slots:
            waiting_for = older
    return tuple(waiting_for)


class GroupAges:
    """Kept and running groups of one run, counted by version as they change.

    Thousands of groups may run, and every event may leave something to decide. Holding them by
    version lets `may_form_batch` and `groups_without_slot` work without a look at each group.

    Of the running groups some have a reserved slot, from before they hold tokens until they end.

    Args:
        batch_size: B >= 1, groups in a batch.
        max_staleness: S >= 0.
        on_stale: ``wait`` or ``drop``, see `may_form_batch`.
    """

    def __init__(self, batch_size: int, max_staleness: int, on_stale: OnStale) -> None:
        self._batch_size, self._max_staleness = batch_size, max_staleness
        self._on_stale: OnStale = on_stale
        self._kept = _ByVersion()
        self._running = _ByVersion()
        self._reserved = _ByVersion()  # of those that run, with a reserved slot

    def keep(self, prompt_id: str, oldest_version: int, sequence: int) -> None:
        """Note that a group waits for a batch.

        Args:
            prompt_id: names it.
            oldest_version: of its tokens.
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

    def runs(self, prompt_id: str, start_version: int) -> None:
        """Note that a group's tokens are of `start_version` or later: it starts, also again."""
        has_reservation = prompt_id in self._reserved.versions
        (self._reserved if has_reservation else self._running).put(prompt_id, start_version)

    def pauses(self, prompt_id: str) -> None:
        """Note that a group holds no tokens any more; its reservation remains."""
        self._running.take(prompt_id)

    def left(self, prompt_id: str) -> None:
        """Note that a group runs no more; harmless if it did not run."""
        self._running.take(prompt_id)
        self._reserved.take(prompt_id)

    def decide(self, version: int, kept_bound: Callable[[int], float] = float) -> BatchDecision:
        """Return what to do now towards the batch for `version`; see `may_form_batch`."""
        return may_form_batch(
            self._kept.groups,
            self._running.groups,
            version=version,
            max_staleness=self._max_staleness,
            batch_size=self._batch_size,
            on_stale=self._on_stale,
            kept_bound=kept_bound,
            reserved=self._reserved.groups,
        )

    def without_slot(self, next_version: int) -> tuple[str, ...]:
        """Return running groups without a slot from `next_version` on (`groups_without_slot`)."""
        return groups_without_slot(
            self._kept.groups,
            self._running.groups,
            next_version=next_version,
            max_staleness=self._max_staleness,
            batch_size=self._batch_size,
            reserved=self._reserved.groups,
        )

    def drops(self, prompt_id: str, next_version: int) -> bool:
        """Return whether a group without a slot is dropped for its age; if not, it starts again.

        Raises:
            KeyError: the group is not running, or has a reserved slot (it is never dropped).
        """
        is_too_old = self._running.versions[prompt_id] < next_version - self._max_staleness
        return self._on_stale == "drop" and is_too_old


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
    """Return whether a group that starts, and was preempted so often, reserves a batch slot.

    Args:
        num_preemptions: of its prompt, in a row.
        num_reserved: slots reserved by other groups now.
        batch_size: B, groups in a train batch.
    """
    is_due = num_preemptions >= RESERVE_AFTER
    return is_due and num_reserved < max(1, int(RESERVED_SHARE * batch_size))
