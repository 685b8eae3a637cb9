"""Membership: replicas by name and instance, their versions, and whether their engines progress.

A replica is a member as long as its heartbeats arrive. A held replica keeps the version that
is being validated while the others get the next one. A live replica that has work but samples no
token is stalled: nothing new is sent to it. It returns as a newcomer when its engine progresses.

The state is pure: callers pass the time in, from one event loop; `drop_silent` looks at the clock
for it. `Fleet.changed` is set at every change of membership or state; its reader clears it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from sluice.algorithm.accounting import ReplicaCounters, fleet_counters
from sluice.algorithm.routing import AnnouncedReplica, ReplicaUse
from sluice.errors import InvalidRequestError, NotFoundError
from sluice.types import ReplicaInfo, TensorSpec
from sluice.weights.share import check_share

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S, _STOOD_STILL_S = 0.5, 2.0

MAX_MEMBERS = 4_096
"""Replicas at one time; as many as an announcement to the reward service may name."""

MAX_INSTANCES = 65_536
"""Processes over the life of a trainer: the counters of those that left still count."""


@dataclass(frozen=True, slots=True)
class EngineActivity:
    """An engine's progress as reported in a heartbeat. `turns` is 0 if the engine does not count
    turns."""

    tokens: int
    turns: int
    has_work: bool


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """An engine's last progress.

    Args:
        activity: the last heartbeat that showed progress.
        since_s: its time.
        is_stalled: whether the engine is out of use until it progresses again.
    """

    activity: EngineActivity
    since_s: float
    is_stalled: bool = False

    def after_heartbeat(
        self, activity: EngineActivity, now_s: float, stall_s: float
    ) -> EngineProgress:
        """Return the progress after a heartbeat.

        An engine with work progresses when it samples tokens; one without work has nothing to
        sample. A stalled engine whose work was taken away progresses by answering: its last known
        load may be outdated.
        """
        has_progress = activity.tokens > self.activity.tokens
        if not self.is_stalled:
            if has_progress or not activity.has_work:
                return EngineProgress(activity, now_s)
            # Tokens and turns keep their values from the beginning of the stall.
            return replace(self, is_stalled=now_s - self.since_s > stall_s)
        answers = activity.turns > self.activity.turns or activity.turns == 0
        if has_progress or (answers and not activity.has_work):
            return EngineProgress(activity, now_s)
        return self

    def mark_stalled(self) -> EngineProgress:
        """Return the progress marked as stalled, for a replica that failed to answer another call.

        An engine that counts no turns could not prove the opposite, so it is not suspected.
        """
        return replace(self, is_stalled=self.activity.turns > 0)


class MemberState(StrEnum):
    """The state of a replica, which decides what it is used for."""

    PENDING = "pending"  # registered, without the current weights
    SERVING = "serving"
    HELD = "held"  # keeps its version for a validation, and gets no newer one meanwhile
    DRAINING = "draining"  # takes nothing new; its samples are generated elsewhere
    STALLED = "stalled"  # alive, but its engine makes no progress; used like a draining one


@dataclass(frozen=True, slots=True)
class FleetMember:
    """A replica, as of its last heartbeat."""

    info: ReplicaInfo
    state: MemberState
    version: int
    last_seen_s: float
    load: ReplicaCounters
    tokens_per_second: float
    idle_share: float


class Fleet:
    """All known replicas.

    Args:
        layout_digest: refuse replicas whose weights have other names, dtypes or shapes; ``None``
            refuses none, since no weights are sent.
        ttl_s: seconds without a heartbeat after which a replica is dropped.
        stall_s: seconds with work but without a token after which a replica is stalled.
        weights: the trainer's weights; replicas may take shares of them.
    """

    def __init__(
        self,
        layout_digest: str | None,
        ttl_s: float,
        stall_s: float = math.inf,
        weights: Sequence[TensorSpec] = (),
    ) -> None:
        self._layout_digest = layout_digest
        self._weights = weights
        self._ttl_s = ttl_s
        self._stall_s = stall_s
        self._members: dict[str, FleetMember] = {}
        # By instance id, also of replicas that left: if they return, their counters continue.
        self._loads: dict[str, ReplicaCounters] = {}
        self._first_loads: dict[str, ReplicaCounters] = {}
        self._progress: dict[str, EngineProgress] = {}
        self._refusals: dict[str, str] = {}
        self._held_version: int | None = None
        self.changed = asyncio.Event()

    def register(self, info: ReplicaInfo, layout_digest: str, now_s: float) -> None:
        """Add a replica as pending; a new instance replaces the old one.

        Raises:
            InvalidRequestError: its weights, or a worker's share of them, do not fit the trainer's
                model, it was refused, or there are too many.
        """
        refusal = self._refusals.get(info.instance_id)
        if refusal is not None:
            raise InvalidRequestError(f"replica {info.name}: {refusal}")
        if self._layout_digest is not None:
            self._check_weights(info, layout_digest)
        earlier = self._members.get(info.name)
        if earlier is not None and earlier.info.instance_id == info.instance_id:
            self._members[info.name] = replace(earlier, info=info, last_seen_s=now_s)
            return
        if earlier is None and len(self._members) >= MAX_MEMBERS:
            raise InvalidRequestError(
                f"replica {info.name}: {MAX_MEMBERS} replicas are registered, which is the limit"
            )
        if info.instance_id not in self._loads and len(self._loads) >= MAX_INSTANCES:
            raise InvalidRequestError(
                f"replica {info.name}: {MAX_INSTANCES} processes have registered so far; "
                "restart the trainer, which forgets those that are gone"
            )
        if earlier is not None and earlier.state is not MemberState.DRAINING:
            logger.warning(
                "replica %s at %s takes the place of the one at %s, heard %.1f s ago; if both run, "
                "start one with another --name",
                info.name,
                info.address,
                earlier.info.address,
                now_s - earlier.last_seen_s,
            )
        load = self._loads.setdefault(info.instance_id, ReplicaCounters())
        progress = self._progress.get(info.instance_id)
        is_stalled = progress is not None and progress.is_stalled
        state = MemberState.STALLED if is_stalled else MemberState.PENDING
        self._members[info.name] = FleetMember(info, state, -1, now_s, load, 0.0, 0.0)
        logger.info("replica %s registered at %s", info.name, info.address)
        self.changed.set()

    def _check_weights(self, info: ReplicaInfo, layout_digest: str) -> None:
        if layout_digest != self._layout_digest:
            raise InvalidRequestError(
                f"replica {info.name}: its weights have other names, dtypes or shapes than the "
                "trainer's; use the same model path and rollout.dtype for both"
            )
        for worker, share in enumerate(info.shares):
            check_share(share, self._weights, f"replica {info.name}, share of worker {worker}")

    def heartbeat(
        self,
        name: str,
        instance_id: str,
        load: ReplicaCounters,
        *,
        draining: bool,
        now_s: float,
        turns: int = 0,
    ) -> None:
        """Record a heartbeat, and whether the engine progresses.

        Args:
            turns: calls that the engine's loop has answered; 0 if they are not counted.

        Raises:
            NotFoundError: this instance is unknown and must register again.
        """
        member = self._instance(name, instance_id)
        if member is None:
            raise NotFoundError(f"replica {name} ({instance_id}) is unknown; register again")
        elapsed_s = max(now_s - member.last_seen_s, 1e-6)
        tokens = load.generated_tokens - member.load.generated_tokens
        busy_s = load.busy_seconds - member.load.busy_seconds
        activity = EngineActivity(load.generated_tokens, turns, load.slots_busy + load.queued > 0)
        progress = self._note_progress(instance_id, activity, now_s)
        state = MemberState.DRAINING if draining else _next_state(member.state, progress)
        self._note(instance_id, load)
        self._members[name] = replace(
            member,
            state=state,
            last_seen_s=now_s,
            load=load,
            tokens_per_second=tokens / elapsed_s,
            idle_share=min(1.0, max(0.0, 1.0 - busy_s / elapsed_s)),
        )
        if state is not member.state:
            _log_change(name, member.state, state, now_s - progress.since_s)
            self.changed.set()

    def note_counters(self, info: ReplicaInfo, load: ReplicaCounters) -> None:
        """Keep the counters that a replica reported on request; this does not count as a
        heartbeat."""
        if info.instance_id in self._loads:
            self._note(info.instance_id, load)

    def expire(self, now_s: float, awake_s: float = -math.inf) -> tuple[ReplicaInfo, ...]:
        """Drop and return the replicas that sent no heartbeat for longer than `ttl_s`.

        A running delivery of weights to such a replica does not end for that reason
        (`fleet.delivery`).

        Args:
            awake_s: end of this process's last standstill; silence before it does not count.
        """
        silent = [
            m for m in self._members.values() if now_s - max(m.last_seen_s, awake_s) > self._ttl_s
        ]
        for member in silent:
            is_expected = member.state is MemberState.DRAINING
            reason = f"no heartbeat for {now_s - member.last_seen_s:.1f} s"
            self._drop(member.info, reason, logging.INFO if is_expected else logging.WARNING)
        return tuple(member.info for member in silent)

    def expel(self, info: ReplicaInfo, reason: str) -> None:
        """Drop one instance; its later heartbeats get NOT_FOUND."""
        if self._instance(info.name, info.instance_id) is None:
            return
        self._drop(info, reason)
        # It may be alive although it failed; if it registers again, its engine must answer first.
        if (progress := self._progress.get(info.instance_id)) is not None:
            self._progress[info.instance_id] = progress.mark_stalled()

    def refuse(self, info: ReplicaInfo, reason: str) -> None:
        """Drop one instance permanently, since its fault is permanent."""
        self._refusals[info.instance_id] = reason
        self.expel(info, reason)

    def mark_serving(self, info: ReplicaInfo, version: int) -> None:
        """Record that a replica serves `version`, unless another instance has its name."""
        member = self._instance(info.name, info.instance_id)
        if member is None:
            return
        state = member.state
        if state is MemberState.PENDING:
            state = MemberState.SERVING
            logger.info("replica %s serves version %d", info.name, version)
        self._members[info.name] = replace(member, state=state, version=version)
        self.changed.set()

    @property
    def held_version(self) -> int | None:
        """The version that `hold` named, until `release`; replicas that were held may be gone."""
        return self._held_version

    def hold(self, version: int, choose: Callable[[int], int]) -> tuple[ReplicaInfo, ...]:
        """Let some of the replicas that serve `version` keep it; return them.

        Args:
            choose: returns how many of a number of replicas to hold; 0 changes nothing.
        """
        serving = [m for m in self.members() if _serves(m, version)]
        chosen = serving[: choose(len(serving))]
        for member in chosen:
            self._members[member.info.name] = replace(member, state=MemberState.HELD)
        if chosen:
            self._held_version = version
            self.changed.set()
        return tuple(member.info for member in chosen)

    def release(self) -> None:
        """End the hold: the held replicas need the current weights, like newcomers."""
        if self._held_version is None:
            return
        self._held_version = None
        for name, member in self._members.items():
            if member.state is MemberState.HELD:
                self._members[name] = replace(member, state=MemberState.PENDING)
        self.changed.set()

    def announced_replicas(self) -> tuple[AnnouncedReplica, ...]:
        """Return the replicas in use, in order of name, each with its version and use."""
        return tuple(
            AnnouncedReplica(member.info, member.version, self._use_of(member))
            for member in self.members()
            if member.state in (MemberState.SERVING, MemberState.HELD)
        )

    def _use_of(self, member: FleetMember) -> ReplicaUse:
        if member.state is MemberState.HELD:
            return ReplicaUse.VALIDATION
        leaves = self._held_version is not None and member.version <= self._held_version
        return ReplicaUse.TRAINING if leaves else ReplicaUse.ANY

    def members(self) -> tuple[FleetMember, ...]:
        """Return all members, in order of name."""
        return tuple(self._members[name] for name in sorted(self._members))

    def in_state(self, *states: MemberState) -> tuple[ReplicaInfo, ...]:
        """Return the members in one of `states`, in order of name."""
        return tuple(member.info for member in self.members() if member.state in states)

    def totals(self) -> tuple[int, float]:
        """Return tokens generated and seconds busy of all replicas that ever registered."""
        loads = self._loads.values()
        return sum(load.generated_tokens for load in loads), sum(
            load.busy_seconds for load in loads
        )

    def reports(self) -> Mapping[str, tuple[ReplicaCounters, ReplicaCounters]]:
        """Return the first and the newest counters of all that ever reported, by instance id."""
        return {id_: (oldest, self._loads[id_]) for id_, oldest in self._first_loads.items()}

    def counters(self) -> ReplicaCounters:
        """Return the sums over all replicas that ever registered.

        Tokens that a replica had not sent when it left count as abandoned.
        """
        present = {member.info.instance_id for member in self._members.values()}
        return fleet_counters(
            load if instance_id in present else load.with_running_unsent()
            for instance_id, load in self._loads.items()
        )

    def _drop(self, info: ReplicaInfo, reason: str, level: int = logging.WARNING) -> None:
        logger.log(level, "replica %s dropped: %s", info.name, reason)
        del self._members[info.name]
        self.changed.set()

    def _note_progress(
        self, instance_id: str, activity: EngineActivity, now_s: float
    ) -> EngineProgress:
        progress = self._progress.get(instance_id) or EngineProgress(activity, now_s)
        self._progress[instance_id] = progress.after_heartbeat(activity, now_s, self._stall_s)
        return self._progress[instance_id]

    def _note(self, instance_id: str, load: ReplicaCounters) -> None:
        """Keep the newest counters, since answers and heartbeats may arrive out of order."""
        self._first_loads.setdefault(instance_id, load)
        newest = self._loads.get(instance_id)
        if newest is None or load.wall_seconds >= newest.wall_seconds:
            self._loads[instance_id] = load

    def _instance(self, name: str, instance_id: str) -> FleetMember | None:
        member = self._members.get(name)
        return member if member is not None and member.info.instance_id == instance_id else None


async def drop_silent(
    fleet: Fleet,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Drop silent replicas at intervals, until cancelled.

    While this process stands still, nobody reads heartbeats: afterwards each replica has the whole
    time to live for the next one.
    """
    looked_s, awake_s = clock(), -math.inf
    while True:
        await sleep(_WATCH_INTERVAL_S)
        now_s = clock()
        if now_s - looked_s > _STOOD_STILL_S:
            awake_s = now_s
        looked_s = now_s
        fleet.expire(now_s, awake_s)


def _serves(member: FleetMember, version: int) -> bool:
    return member.state is MemberState.SERVING and member.version == version


def _next_state(state: MemberState, progress: EngineProgress) -> MemberState:
    """Return the state after a heartbeat; a replica that recovers needs the weights first."""
    in_use = (MemberState.PENDING, MemberState.SERVING, MemberState.HELD)
    if state in in_use and progress.is_stalled:
        return MemberState.STALLED
    if state is MemberState.STALLED and not progress.is_stalled:
        return MemberState.PENDING
    return state


def _log_change(name: str, former: MemberState, state: MemberState, idle_s: float) -> None:
    if state is MemberState.DRAINING:
        logger.info("replica %s drains", name)
    elif state is MemberState.STALLED:
        logger.warning("replica %s out of use: work, but no token for %.1f s", name, idle_s)
    elif former is MemberState.STALLED:
        logger.info("replica %s progresses again and needs the current weights", name)
