"""Who serves: replicas by name and incarnation, alive as long as their heartbeats come.

Pure state with the time passed in; the shell calls it from one event loop. `changed` is set at
every change of membership or state and cleared by whoever acts on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from sluice.algorithm.accounts import ReplicaCounters, fleet_counters
from sluice.errors import InvalidRequestError, NotFoundError
from sluice.types import ReplicaInfo

logger = logging.getLogger(__name__)


class MemberState(StrEnum):
    """What a replica may be used for."""

    PENDING = "pending"  # known, without the current weights
    SERVING = "serving"
    DRAINING = "draining"  # takes nothing new; its samples are generated elsewhere


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica tells of itself, in heartbeats and when it is asked."""

    slots_busy: int
    queued: int
    generated_tokens: int
    busy_seconds: float
    unsent_tokens: int = 0
    running_tokens: int = 0
    wall_seconds: float = 0.0
    seconds_by_state: Mapping[str, float] = field(default_factory=dict)

    @property
    def counters(self) -> ReplicaCounters:
        """What enters the run's books."""
        return ReplicaCounters(
            self.generated_tokens,
            self.unsent_tokens,
            self.running_tokens,
            self.wall_seconds,
            self.seconds_by_state,
        )


@dataclass(frozen=True, slots=True)
class Member:
    """One replica as last heard of."""

    info: ReplicaInfo
    state: MemberState
    version: int
    last_seen_s: float
    load: Load
    tokens_per_second: float
    idle_share: float


class Fleet:
    """All known replicas.

    Args:
        layout_digest: replicas whose weights have other names, dtypes or shapes are refused.
        ttl_s: seconds without a heartbeat after which a replica is dropped.
    """

    def __init__(self, layout_digest: str, ttl_s: float) -> None:
        self._layout_digest, self._ttl_s = layout_digest, ttl_s
        self._members: dict[str, Member] = {}
        # By incarnation, also of those who left: their counters count on when they come back.
        self._loads: dict[str, Load] = {}
        self._refusals: dict[str, str] = {}
        self.changed = asyncio.Event()

    def register(self, info: ReplicaInfo, layout_digest: str, now_s: float) -> None:
        """Adds a replica as pending; a new incarnation replaces the old one.

        Raises:
            InvalidRequestError: its weights do not fit the trainer's model, or it was refused.
        """
        refusal = self._refusals.get(info.incarnation)
        if refusal is not None:
            raise InvalidRequestError(f"replica {info.name}: {refusal}")
        if layout_digest != self._layout_digest:
            raise InvalidRequestError(
                f"replica {info.name}: its weights have other names, dtypes or shapes than the "
                "trainer's; use the same model path and rollout.dtype for both"
            )
        known = self._members.get(info.name)
        if known is not None and known.info.incarnation == info.incarnation:
            self._members[info.name] = replace(known, info=info, last_seen_s=now_s)
            return
        load = self._loads.setdefault(info.incarnation, Load(0, 0, 0, 0.0))
        self._members[info.name] = Member(info, MemberState.PENDING, -1, now_s, load, 0.0, 0.0)
        logger.info("replica %s registered at %s", info.name, info.address)
        self.changed.set()

    def heartbeat(
        self, name: str, incarnation: str, load: Load, *, draining: bool, now_s: float
    ) -> None:
        """Notes that a replica lives.

        Raises:
            NotFoundError: this incarnation is unknown; it registers again.
        """
        member = self._find(name, incarnation)
        elapsed_s = max(now_s - member.last_seen_s, 1e-6)
        tokens = load.generated_tokens - member.load.generated_tokens
        busy_s = load.busy_seconds - member.load.busy_seconds
        state = MemberState.DRAINING if draining else member.state
        self._note(incarnation, load)
        self._members[name] = replace(
            member,
            state=state,
            last_seen_s=now_s,
            load=load,
            tokens_per_second=tokens / elapsed_s,
            idle_share=min(1.0, max(0.0, 1.0 - busy_s / elapsed_s)),
        )
        if state is not member.state:
            logger.info("replica %s drains", name)
            self.changed.set()

    def note_counters(self, info: ReplicaInfo, load: Load) -> None:
        """Notes what a replica told when it was asked; that it lives, only heartbeats say."""
        if info.incarnation in self._loads:
            self._note(info.incarnation, load)

    def expire(self, now_s: float) -> tuple[ReplicaInfo, ...]:
        """Drops and returns the replicas that were silent for longer than the time to live."""
        silent = [m for m in self._members.values() if now_s - m.last_seen_s > self._ttl_s]
        for member in silent:
            self.expel(member.info, f"no heartbeat for {now_s - member.last_seen_s:.1f} s")
        return tuple(member.info for member in silent)

    def expel(self, info: ReplicaInfo, reason: str) -> None:
        """Drops one incarnation; a later heartbeat of it is answered with NOT_FOUND."""
        member = self._members.get(info.name)
        if member is None or member.info.incarnation != info.incarnation:
            return
        logger.warning("replica %s dropped: %s", info.name, reason)
        del self._members[info.name]
        self.changed.set()

    def refuse(self, info: ReplicaInfo, reason: str) -> None:
        """Drops one incarnation for good: what is wrong with it does not pass."""
        self._refusals[info.incarnation] = reason
        self.expel(info, reason)

    def mark_serving(self, info: ReplicaInfo, version: int) -> None:
        """The replica proved that it holds `version`."""
        member = self._members.get(info.name)
        if member is None or member.info.incarnation != info.incarnation:
            return
        state = MemberState.SERVING if member.state is MemberState.PENDING else member.state
        self._members[info.name] = replace(member, state=state, version=version)
        self.changed.set()

    def members(self) -> tuple[Member, ...]:
        """Everyone, in order of name."""
        return tuple(self._members[name] for name in sorted(self._members))

    def in_state(self, *states: MemberState) -> tuple[ReplicaInfo, ...]:
        """Who is in one of `states`, in order of name."""
        return tuple(member.info for member in self.members() if member.state in states)

    def totals(self) -> tuple[int, float]:
        """Tokens generated and seconds busy, over all replicas that ever registered."""
        loads = self._loads.values()
        return sum(load.generated_tokens for load in loads), sum(
            load.busy_seconds for load in loads
        )

    def counters(self) -> ReplicaCounters:
        """Sums over all replicas that ever registered.

        What those who have left had not sent by their last word, nobody gets any more.
        """
        present = {member.info.incarnation for member in self._members.values()}
        return fleet_counters(
            load.counters if incarnation in present else load.counters.abandoned()
            for incarnation, load in self._loads.items()
        )

    def _note(self, incarnation: str, load: Load) -> None:
        """Keeps the newest counters: answers and heartbeats overtake each other."""
        known = self._loads.get(incarnation)
        if known is None or load.wall_seconds >= known.wall_seconds:
            self._loads[incarnation] = load

    def _find(self, name: str, incarnation: str) -> Member:
        member = self._members.get(name)
        if member is None or member.info.incarnation != incarnation:
            raise NotFoundError(f"replica {name} ({incarnation}) is unknown; register again")
        return member
