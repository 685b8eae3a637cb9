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

Admission at a low yield may, rarely, start more groups than turn out to have a place. They are
found while they still run (`doomed_groups`), so that what is lost is the tokens so far and never a
kept group: cancel them and start their prompts again under a newer policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

OnStale = Literal["wait", "drop"]


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """A kept group as batch formation sees it."""

    oldest_version: int
    sequence: int


@dataclass(frozen=True, slots=True)
class InFlightGroup:
    """A group still being generated or graded; its tokens are of `start_version` or later."""

    prompt_id: str
    start_version: int


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """What to do with the kept groups now.

    `chosen` (indices, oldest first) is empty or of exactly the batch size. `dropped` (indices) are
    beyond the bound for ever, whether or not a batch is formed. `waiting_for` names the running
    groups that hold a batch back. `doomed` names running groups to cancel (`doomed_groups`).
    `num_missing` is how many more kept groups a batch needs.
    """

    chosen: tuple[int, ...]
    dropped: tuple[int, ...]
    waiting_for: tuple[str, ...]
    doomed: tuple[str, ...]
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
    kept: Sequence[KeptGroup],
    in_flight: Sequence[InFlightGroup],
    *,
    version: int,
    max_staleness: int,
    batch_size: int,
    on_stale: OnStale,
    kept_bound: Callable[[int], float] = float,
) -> BatchDecision:
    """Decide whether the batch for `version` is formed now, and of which groups.

    A kept group newer than `version` is neither chosen nor dropped: its policy is published but
    not announced yet.

    Args:
        kept: the kept groups that wait; the decision's indices point into it.
        in_flight: all running groups.
        version: the version the batch will update.
        max_staleness: S >= 0.
        batch_size: B, groups in a batch.
        on_stale: ``wait`` or ``drop``, see the top of this file.
        kept_bound: upper bound on how many of a number of running groups will be kept. The
            default (all) loses nothing; `admission.kept_upper_bound` waits less at low yield.
    """
    oldest_allowed = version - max_staleness
    dropped = tuple(i for i, group in enumerate(kept) if group.oldest_version < oldest_allowed)
    eligible = sorted(
        (i for i, g in enumerate(kept) if oldest_allowed <= g.oldest_version <= version),
        key=lambda i: (kept[i].oldest_version, kept[i].sequence),
    )
    doomed = doomed_groups(
        kept, in_flight, next_version=version, max_staleness=max_staleness, batch_size=batch_size
    )
    num_missing = max(0, batch_size - len(eligible))
    chosen = tuple(eligible[:batch_size])
    if num_missing:
        return BatchDecision((), dropped, (), doomed, num_missing)
    waiting_for: tuple[str, ...] = ()
    if on_stale == "wait":
        cancelled = set(doomed)
        alive = [group for group in in_flight if group.prompt_id not in cancelled]
        newest_chosen = kept[chosen[-1]].oldest_version
        waiting_for = _last_chance(
            alive, newest_chosen, oldest_allowed, batch_size=batch_size, kept_bound=kept_bound
        )
    return BatchDecision(() if waiting_for else chosen, dropped, waiting_for, doomed, 0)


def doomed_groups(
    kept: Sequence[KeptGroup],
    in_flight: Sequence[InFlightGroup],
    *,
    next_version: int,
    max_staleness: int,
    batch_size: int,
) -> tuple[str, ...]:
    """Running groups that would have no place in time if they were kept: their prompt ids.

    Batches of `next_version` to u + S have ``(u + S - next_version + 1) * B`` places for groups of
    version u or older. Where kept groups fill them, no running group that old has one left; nor
    has it one where it would push out a kept group of a younger version. Ask whenever a group is
    kept and whenever one starts: nothing else leaves a running group without a place.

    Args:
        kept: the kept groups that wait.
        in_flight: all running groups.
        next_version: version of the next batch to be formed: the current one, or the one after it
            while the trainer holds a batch.
        max_staleness: S.
        batch_size: B.
    """
    oldest_allowed = next_version - max_staleness
    horizon = oldest_allowed - 1
    versions = {group.oldest_version for group in kept} | {g.start_version for g in in_flight}
    for version in versions:
        filled = sum(oldest_allowed <= group.oldest_version <= version for group in kept)
        places = (version - oldest_allowed + 1) * batch_size
        if version >= oldest_allowed and filled >= places:
            horizon = max(horizon, version)
    return tuple(group.prompt_id for group in in_flight if group.start_version <= horizon)


def _last_chance(
    alive: Sequence[InFlightGroup],
    newest_chosen: int,
    oldest_allowed: int,
    *,
    batch_size: int,
    kept_bound: Callable[[int], float],
) -> tuple[str, ...]:
    """Running groups that would find no place if the batch were formed now."""
    waiting_for = [g.prompt_id for g in alive if g.start_version == oldest_allowed]
    for start_version in range(oldest_allowed + 1, newest_chosen):
        # All kept groups this old are chosen, since a younger one is: only running ones remain.
        older = [g.prompt_id for g in alive if g.start_version <= start_version]
        places = (start_version - oldest_allowed) * batch_size
        if kept_bound(len(older)) > places:
            waiting_for = older
    return tuple(waiting_for)
