"""Find the replicas of a run, and choose one for a client's next request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sluice.api.reward.v1 import reward_pb2
from sluice.api.rollout.v1 import rollout_pb2
from sluice.api.trainer.v1 import trainer_pb2
from sluice.client.channels import ServiceChannels
from sluice.client.run_address import RunAddress
from sluice.errors import (
    ConfigError,
    DeadlineError,
    HandshakeError,
    NotReadyError,
    PeerError,
    SluiceError,
    leaves,
)
from sluice.rpc.client import reward_stub, rollout_stub, trainer_stub, unary_call
from sluice.rpc.retries import own_deadline_is_failure

# Requests within this time share one look-up.
_FRESH_S = 2.0
# A failed replica comes last for this time.
_SUSPECT_S = 10.0
_PHASE = "asking for the replicas that serve"


@dataclass(frozen=True, slots=True)
class FleetReplica:
    """A serving replica; `slots_busy` samples are in its `slots` or wait for one."""

    address: str
    slots: int
    slots_busy: int


def choose_replica(
    replicas: Sequence[FleetReplica],
    under_way: dict[str, int],
    counted_in_load: dict[str, int],
    avoided: Collection[str],
    full: Sequence[str] = (),
) -> FleetReplica | None:
    """Return the replica with the least load per slot; None without replicas.

    The load is the samples that have a slot or wait for one. Of equal replicas the first is chosen.

    Args:
        replicas: the serving replicas.
        under_way: samples of this client, by address.
        counted_in_load: samples of `under_way` that the reported loads include.
        avoided: addresses that failed a moment ago; they come last.
        full: addresses that refused this request for lack of capacity, in the order of their
            refusals. All others come before them.
    """

    def rank(replica: FleetReplica) -> tuple[bool, int, float]:
        # The reported load includes this client's samples of that time. Count the present ones
        # instead.
        of_others = max(replica.slots_busy - counted_in_load.get(replica.address, 0), 0)
        load = (of_others + under_way.get(replica.address, 0)) / max(replica.slots, 1)
        turn = full.index(replica.address) + 1 if replica.address in full else 0
        return replica.address in avoided, turn, load

    return min(replicas, key=rank, default=None)


class ClientFleet:
    """The replicas of a run as one client uses them."""

    def __init__(
        self,
        look_up: Callable[[], Awaitable[Sequence[FleetReplica]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look_up = look_up
        self._clock = clock
        self._replicas: tuple[FleetReplica, ...] = ()
        self._asked_s: float | None = None
        self._under_way: dict[str, int] = {}
        self._counted_in_load: dict[str, int] = {}
        self._failed_s: dict[str, float] = {}
        self._asking = asyncio.Lock()
        self._unanswered: tuple[float, SluiceError] | None = None

    async def choose(self, full: Sequence[str] = ()) -> FleetReplica:
        """Return the replica for the next request.

        Args:
            full: see `choose_replica`.

        Raises:
            NotReadyError: none serves.
            SluiceError: no service that knows the replicas answers.
        """
        if not self._is_fresh():
            await self._refresh(self._clock())
        now_s = self._clock()
        self._failed_s = {
            a: failed_s for a, failed_s in self._failed_s.items() if now_s - failed_s < _SUSPECT_S
        }
        replica = choose_replica(
            self._replicas, self._under_way, self._counted_in_load, self._failed_s.keys(), full
        )
        if replica is None:
            self._asked_s = None  # the next request asks again
            raise NotReadyError("no replica serves; see `sluice status`, and try again in a moment")
        return replica

    def _is_fresh(self) -> bool:
        return self._asked_s is not None and self._clock() - self._asked_s <= _FRESH_S

    async def _refresh(self, since_s: float) -> None:
        # One look-up serves all requests that wait for it. They share its failure, too.
        async with self._asking:
            if self._is_fresh():
                return
            if self._unanswered is not None and self._unanswered[0] > since_s:
                raise self._unanswered[1]
            try:
                replicas = list(await self._look_up())
            except SluiceError as error:
                self._unanswered = self._clock(), error
                raise
            random.shuffle(replicas)  # or many clients with one request each would choose the same
            self._replicas = tuple(replicas)
            self._asked_s = self._clock()
            self._counted_in_load = dict(self._under_way)

    @contextmanager
    def occupy(self, address: str, num_samples: int) -> Iterator[None]:
        """Count samples as under way at a replica during the block."""
        self._under_way[address] = self._under_way.get(address, 0) + num_samples
        try:
            yield
        finally:
            self._under_way[address] -= num_samples

    def note_failed(self, address: str) -> None:
        """Note a failed replica: others come first for a while, after a fresh look-up."""
        self._failed_s[address] = self._clock()
        self._asked_s = None


async def look_up_replicas(
    address: RunAddress, channels: ServiceChannels
) -> Sequence[FleetReplica]:
    """Return the replicas of a run that serve, with their loads.

    Args:
        address: of the run. If it names replicas, each is asked about itself.
        channels: to its services.

    Raises:
        ConfigError: no address is known.
        PeerError: no service answers, or not in time.
    """
    with own_deadline_is_failure():
        if address.replicas:
            return await _known_replicas(address.replicas, channels)
        if address.trainer is None:
            return await _announced_replicas(address, channels)
        try:
            return await _trainer_replicas(address.trainer, channels)
        except HandshakeError:
            raise
        except (PeerError, DeadlineError):
            if address.reward is None:
                raise
            return await _announced_replicas(address, channels)


async def _trainer_replicas(trainer: str, channels: ServiceChannels) -> Sequence[FleetReplica]:
    """Ask the trainer, which knows the loads of all."""
    answer = await unary_call(
        trainer_stub(channels.to(trainer)).GetStatus,
        trainer_pb2.GetStatusRequest(),
        peer="trainer",
        phase=_PHASE,
    )
    return [
        FleetReplica(
            member.replica.address, member.replica.slots, member.slots_busy + member.queued
        )
        for member in answer.replicas
        if member.state == "serving"
    ]


async def _announced_replicas(
    address: RunAddress, channels: ServiceChannels
) -> Sequence[FleetReplica]:
    """Ask the reward service, which knows no loads."""
    if address.reward is None:
        raise ConfigError(
            "client: no address of a trainer, a reward service or a replica; give the run's "
            "folder, or one of them"
        )
    answer = await unary_call(
        reward_stub(channels.to(address.reward)).GetStatus,
        reward_pb2.GetStatusRequest(),
        peer="reward service",
        phase=_PHASE,
    )
    return [FleetReplica(announced.address, announced.slots, 0) for announced in answer.replicas]


async def _known_replicas(
    addresses: Sequence[str], channels: ServiceChannels
) -> Sequence[FleetReplica]:
    """Ask each replica itself. Leave out those that do not answer."""

    async def ask(address: str) -> FleetReplica | None:
        try:
            answer = await unary_call(
                rollout_stub(channels.to(address)).GetStatus,
                rollout_pb2.GetStatusRequest(without_engine=True),
                peer=address,
                phase=_PHASE,
            )
        except HandshakeError:
            raise
        except (PeerError, DeadlineError):
            return None
        if not answer.HasField("policy_version"):
            return None
        return FleetReplica(address, answer.slots, answer.slots_busy + answer.queued)

    try:
        async with asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(ask(known_address), name=f"asking {known_address}")
                for known_address in addresses
            ]
    except ExceptionGroup as group:
        raise leaves(group)[0] from group
    return [replica for task in asking if (replica := task.result()) is not None]
