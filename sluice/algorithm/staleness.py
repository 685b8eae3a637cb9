"""When a train batch may be formed, and of which groups (bounded staleness).

The batch for version v moves the policy from v to v + 1. A group may be in it if its oldest token
was drawn by a version >= v - S. Groups are taken oldest first, by (oldest version, sequence), so
none is overtaken for ever.

``wait`` loses nothing: before v passes, it waits for running groups that would have no place
afterwards. A group started under u has its last chance in the batch of u + S, so after the batch
of v there are ``(u + S - v) * B`` places for everything started under u or earlier. For u = v - S
there are none: any such group still running is waited for. For younger u the wait is needed only
when the batch would take groups younger than u, and so give away a place that the running ones
need. Waits end, because no group starts under an old version.

``drop`` never waits: a group that comes too late is dropped.

Admission may start more groups than turn out to have a place: rarely at a low yield, and every time
where an on-policy batch is filled on average. They are found while they still run
(`doomed_groups`), so that what is lost is the tokens so far and never a kept group: cancel them and
start their prompts again under a newer policy. A running group that claims its place
(`withdrawals`) counts as a kept one there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

OnStale = Literal["wait", "drop"]

KeptByVersion = Mapping[int, Mapping[str, int]]
"""Kept groups: oldest version -> prompt id -> sequence."""

RunningByVersion = Mapping[int, Collection[str]]
"""Groups still being generated or graded: start version -> prompt ids. Their tokens are of that
version or later."""

_NONE: RunningByVersion = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """What to do with the kept groups now, by prompt id.

    `chosen` (oldest first) is empty or of exactly the batch size. `dropped` (oldest version first)
    are beyond the bound for ever, whether or not a batch is formed. `waiting_for` are the start
    versions of the running groups that hold a batch back. `doomed` names running groups to cancel
    (`doomed_groups`). `num_missing` is how many more kept groups a batch needs.
    """

    chosen: tuple[str, ...]
    dropped: tuple[str, ...]
    waiting_for: tuple[int, ...]
    expired: tuple[str, ...]
    num_missing: int


def staleness(current_version: int, oldest_version: int) -> int:
    """How many versions the oldest token of a group is behind the policy about to be updated.

    Raises:
        ValueError: the token is from a version that does not exist yet.
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
    """Decide whether the batch for `version` is formed now, and of which groups.

    A kept group newer than `version` is neither chosen nor dropped: its policy is published but
    not announced yet. Costs O(versions), and O(groups) of the versions that something is decided
    about.

    Args:
        kept: the kept groups that wait.
        running: all running groups, but for those in `claimed`.
        version: the version the batch will update.
        max_staleness: S >= 0.
        batch_size: B >= 1, groups in a batch.
        on_stale: ``wait`` or ``drop``, see the top of this file.
        kept_bound: upper bound on how many of a number of running groups will be kept. The
            default (all) loses nothing; `admission.kept_upper_bound` waits less at low yield.
        claimed: running groups whose place is certain.
    """
    oldest_allowed = version - max_staleness
    dropped = _older_than(kept, oldest_allowed)
    first_alive = _first_alive(kept, running, reserved, oldest_allowed, batch_size)
    expired = _older_than(running, first_alive) + _older_than(reserved, oldest_allowed)
    eligible = sorted(v for v in kept if oldest_allowed <= v <= version)
    num_missing = max(0, batch_size - sum(len(kept[v]) for v in eligible))
    if num_missing:
        return BatchDecision((), dropped, (), expired, num_missing)
    filling = _filling(kept, eligible, batch_size)
    waiting_for: tuple[int, ...] = ()
    if on_stale == "wait":
        alive = {v: len(ids) for v, ids in running.items() if v >= first_alive and ids}
        for v, ids in reserved.items():
            if v >= oldest_allowed and ids:
                alive[v] = alive.get(v, 0) + len(ids)
        waiting_for = _last_chance(
            alive, filling[-1], oldest_allowed, batch_size=batch_size, kept_bound=kept_bound
        )
    chosen = () if waiting_for else _in_order(kept, filling)[:batch_size]
    return BatchDecision(chosen, dropped, waiting_for, expired, 0)


def expired_groups(
    kept: KeptByVersion,
    running: RunningByVersion,
    *,
    next_version: int,
    max_staleness: int,
    batch_size: int,
    reserved: RunningByVersion = _NONE,
) -> tuple[str, ...]:
    """Running groups that would have no place in time if they were kept: their prompt ids.

    Batches of `next_version` to u + S have ``(u + S - next_version + 1) * B`` places for groups of
    version u or older. Where kept groups fill them, no running group that old has one left; nor
    has it one where it would push out a kept group of a younger version. Ask whenever a group is
    kept and whenever one starts: nothing else leaves a running group without a place. Costs
    O(versions) where none is doomed.

    Args:
        kept: the kept groups that wait.
        running: all running groups, but for those in `claimed`.
        next_version: version of the next batch to be formed: the current one, or the one after it
            while the trainer holds a batch.
        max_staleness: S.
        batch_size: B.
        claimed: running groups whose place is certain.
    """
    oldest_allowed = next_version - max_staleness
    first_alive = _first_alive(kept, running, reserved, oldest_allowed, batch_size)
    return _older_than(running, first_alive) + _older_than(reserved, oldest_allowed)


def _first_alive(
    kept: KeptByVersion,
    running: RunningByVersion,
    reserved: RunningByVersion,
    oldest_allowed: int,
    batch_size: int,
) -> int:
    """Running groups of this version or later may have a place; older ones have none."""
    first_alive, filled = oldest_allowed, 0
    if not kept and not reserved:  # asked at every start: nothing fills a place
        return first_alive
    for version in sorted(v for v in {*kept, *running, *reserved} if v >= oldest_allowed):
        filled += len(kept.get(version, ())) + len(reserved.get(version, ()))
        if filled >= (version - oldest_allowed + 1) * batch_size:
            first_alive = version + 1
    return first_alive


def _older_than(groups: Mapping[int, Collection[str]], version: int) -> tuple[str, ...]:
    old = sorted([v for v in groups if v < version])  # a list is faster than a generator
    if not old:
        return ()
    return tuple(prompt_id for v in old for prompt_id in groups[v])


def _filling(kept: KeptByVersion, eligible: Sequence[int], batch_size: int) -> list[int]:
    """The oldest of the eligible versions whose groups fill a batch; all of them are needed."""
    filling, filled = [], 0
    for version in eligible:
        filling.append(version)
        filled += len(kept[version])
        if filled >= batch_size:
            break
    return filling


def _in_order(kept: KeptByVersion, versions: Sequence[int]) -> tuple[str, ...]:
    """Kept groups of ascending versions, by sequence within each."""
    return tuple(
        prompt_id for v in versions for prompt_id in sorted(kept[v], key=kept[v].__getitem__)
    )


def _last_chance(
    alive: Mapping[int, int],
    newest_chosen: int,
    oldest_allowed: int,
    *,
    batch_size: int,
    kept_bound: Callable[[int], float],
) -> tuple[int, ...]:
    """Start versions of running groups that would find no place if the batch were formed now.

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
        places = (start_version - oldest_allowed) * batch_size
        if kept_bound(sum(alive[v] for v in older)) > places:
            waiting_for = older
    return tuple(waiting_for)
