"""Every fault of a replica in every phase of a weight update, with real processes and sockets.

Whatever happens to one replica, the update ends by its deadlines and names it with the phase and,
where there is one, the tensor; the other replica serves the version, and nobody a mixture. So it is
too if the update runs beside a train step, and the run ends after its last one.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from services.trainer.fleet.publisher import PublishReport
from sluice.errors import SluiceError
from sluice.types import TensorSpec, TrainBatch
from sluice.weights.plan import WeightBuffer, plan_transfer
from tests.support.loop_world import World, run, until
from tests.support.patience import LONG_S, SHORT_S
from tests.support.weight_digest import plain_digest
from tests.support.weight_fault_fleet import FaultFleet, Replica, fault_fleet
from tests.support.weight_fleet import PeerProcess, peer_processes

_SPECS = (
    TensorSpec("embed", "bfloat16", (3 << 18,)),  # tied to the head, and so listed once
    TensorSpec("norm", "float32", (1000,)),
    TensorSpec("steps", "int64", ()),
)


def _weights(number: int) -> dict[str, torch.Tensor]:
    """Each version differs from the one before in 1 of 100 elements, and in a step counter."""
    buffer = WeightBuffer(plan_transfer(_SPECS, 4096))
    embed = buffer.tensors["embed"].view(torch.int16)
    embed.copy_(torch.arange(embed.numel()) % 30_000)
    for earlier in range(1, number + 1):
        embed[earlier::100] += 1
    buffer.tensors["norm"].fill_(0.5)
    buffer.tensors["steps"].fill_(number)
    return dict(buffer.tensors)


@dataclass(frozen=True, slots=True)
class _Fault:
    """What goes wrong in `phase` of the second version, and what is said about it.

    `is_lost`: the replica is no member afterwards; otherwise it serves the second version too.
    """

    phase: str
    how: dict[str, Any]
    said: str
    is_lost: bool = True


_KILL, _STOP = {"before": signal.SIGKILL}, {"before": signal.SIGSTOP}
_FAULTS = {
    "killed in front of join": _Fault("join", _KILL, "victim.*joining epoch"),
    "killed in the middle of stage": _Fault(
        "stage", {"bucket": 2, "signal": int(signal.SIGKILL)}, "victim.*staging version 2"
    ),
    "killed in front of commit": _Fault("commit", _KILL, "victim.*committing version 2"),
    "stopped in front of join": _Fault("join", _STOP, "victim.*forming"),
    "stopped in the middle of stage": _Fault(
        "stage", {"bucket": 2, "signal": int(signal.SIGSTOP)}, "victim.*staging version 2"
    ),
    "stopped in front of commit": _Fault("commit", _STOP, "victim.*committing version 2"),
    "slow to join": _Fault("join", {"before": 0.5}, "", is_lost=False),
    "slow to stage": _Fault("stage", {"bucket": 2, "wait": 0.5}, "", is_lost=False),
    "slow to commit": _Fault("commit", {"before": 0.5}, "", is_lost=False),
    "a replica that refuses the group": _Fault(
        "join", {"refuses": "another model"}, "victim: another model"
    ),
    "a flipped bit": _Fault(
        "stage",
        {"bucket": 0, "flip": 1500},
        "staging version 2: victim: .*receiving version 2 .*(tensor embed|bucket 1 of 7)",
        is_lost=False,
    ),
    "a bucket cut short": _Fault(
        "stage",
        {"bucket": 3, "cut": 800},
        "staging version 2: victim: .*receiving version 2 .*(tensor embed|bucket 4 of 7)",
        is_lost=False,
    ),
}


class _Processes:
    """Processes that outlive a test, as long as they live."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._idle: list[PeerProcess] = []

    def take(self, names: list[str]) -> list[PeerProcess]:
        missing = len(names) - len(self._idle)
        if missing > 0:
            self._idle += self._stack.enter_context(peer_processes(["new"] * missing))
        peers, self._idle = self._idle, []
        for peer, name in zip(peers, names, strict=True):
            peer.name = name
        return peers

    def give_back(self, peer: PeerProcess) -> None:
        self._idle.append(peer)


@pytest.fixture(scope="module")
def processes() -> Iterator[_Processes]:
    with ExitStack() as stack:
        yield _Processes(stack)


async def _assert_serves(replica: Replica, number: int) -> None:
    assert await replica.held() == (number, plain_digest(_weights(number)))


class _BesideSteps(World):
    """A run of three steps with overlap. Step v + 1 trains from the start to the end of the
    transfer of version v, and `spoil` runs in front of that of version 2."""

    def __init__(self, to: FaultFleet, spoil: Callable[[], None]) -> None:
        super().__init__(steps=3)
        self._to, self._spoil, self.fleet = to, spoil, to.fleet

    async def train(self, batch: TrainBatch, step: int) -> Mapping[str, float]:
        self.events.append(f"train {step}")
        await until(lambda: f"published {step - 1}" in self.events)
        return {}

    async def freeze(self, version: int) -> None:
        self._to.freeze(version, _weights(version))

    async def publish(self, version: int) -> PublishReport:
        if 0 < version < 3:
            await until(lambda: f"train {version + 1}" in self.events)
        if version == 2:
            self._spoil()
        report = await self._to.publisher.publish(version)
        self.events.append(f"published {version}")
        return report

    async def seed_newcomers(self) -> None:
        await self._to.publisher.seed_newcomers()


async def _check_beside_steps(fleet: FaultFleet, fault: _Fault) -> None:
    victim, other = fleet.replicas["victim"], fleet.replicas["other"]

    def spoil() -> None:
        assert fleet.serving() == {"victim": 1, "other": 1}
        victim.faults[fault.phase] = dict(fault.how)
        if fault.phase == "join":
            fleet.publisher._main._members = ()  # the next version begins an epoch

    world = _BesideSteps(fleet, spoil)
    await run(world.loop(overlaps=True))
    assert world.state.step == world.state.version == 3
    await _assert_serves(other, 3)
    assert fleet.serving() == ({"other": 3} if fault.is_lost else {"victim": 3, "other": 3})
    if not fault.is_lost:
        await _assert_serves(victim, 3)


async def _check(fleet: FaultFleet, fault: _Fault) -> None:
    victim, other = fleet.replicas["victim"], fleet.replicas["other"]
    both = {"victim": 1, "other": 1}
    await fleet.publish(1, _weights(1))
    assert fleet.serving() == both
    victim.faults[fault.phase] = dict(fault.how)
    if fault.phase == "join":
        fleet.publisher._main._members = ()  # the next version begins an epoch
    await fleet.publish(2, _weights(2))
    await _assert_serves(other, 2)
    if fault.is_lost:
        assert fleet.serving() == {"other": 2}
    else:
        assert fleet.serving() == {"victim": 2, "other": 2}
        await _assert_serves(victim, 2)


@dataclass(frozen=True, slots=True)
class _Way:
    """How versions are sent. In phases other than `phases` that makes no difference."""

    sends_changes: bool
    check: Callable[[FaultFleet, _Fault], Awaitable[None]]
    has_halves: bool = False
    phases: tuple[str, ...] = ("join", "stage", "commit")
    stops: tuple[str, ...] = ("stage",)
    """Of these, the phases in which a replica is stopped, which takes a deadline each."""

    def takes(self, fault: _Fault) -> bool:
        is_stopped = signal.SIGSTOP in fault.how.values()
        return fault.phase in (self.stops if is_stopped else self.phases)


_WAYS = {
    "whole": _Way(False, _check, stops=("join", "stage", "commit")),
    "changes": _Way(True, _check, phases=("stage",), stops=()),
    "beside a step": _Way(True, _check_beside_steps),
    "from two ranks": _Way(True, _check, has_halves=True, phases=("join", "stage")),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for name, fault in _FAULTS.items()
        for way, taken in _WAYS.items()
        if taken.takes(fault)
    ],
)
async def test_a_fault_costs_at_most_the_replica_that_has_it(
    name: str, way: str, processes: _Processes, caplog: pytest.LogCaptureFixture
) -> None:
    fault, taken = _FAULTS[name], _WAYS[way]

    async def attempt(peers: list[PeerProcess], timeout_s: float) -> None:
        async with fault_fleet(
            peers,
            _SPECS,
            timeout_s,
            sends_changes=taken.sends_changes,
            has_halves=taken.has_halves,
        ) as fleet:
            await taken.check(fleet, fault)
        said = _said(caplog)
        assert _matches(fault.said, said) if fault.said else not said, said

    is_stopped = signal.SIGSTOP in fault.how.values()
    ends = fault.how in (_KILL, _STOP) or "signal" in fault.how
    await _in_time(attempt, processes, caplog, is_stopped=is_stopped, ends=ends)


async def test_a_replica_that_hangs_is_left_out_of_the_group_before_the_others_wait_for_it(
    processes: _Processes, caplog: pytest.LogCaptureFixture
) -> None:
    async def attempt(peers: list[PeerProcess], timeout_s: float) -> None:
        async with fault_fleet(peers, _SPECS, timeout_s, sends_changes=True) as fleet:
            peers[0].signal(signal.SIGSTOP)
            report = await fleet.publish(1, _weights(1))
            assert (report.replicas, report.attempts) == (1, 1)
            assert fleet.serving() == {"other": 1}
            await _assert_serves(fleet.replicas["other"], 1)
        said = _said(caplog)
        assert _matches("replica victim dropped: silent when the group of epoch 1", said), said

    await _in_time(attempt, processes, caplog, is_stopped=True, ends=True)


async def _in_time(
    attempt: Callable[[list[PeerProcess], float], Awaitable[None]],
    processes: _Processes,
    caplog: pytest.LogCaptureFixture,
    *,
    is_stopped: bool,
    ends: bool,
) -> None:
    """Make an attempt; if it has to wait for deadlines, first with short ones.

    A busy machine may let a sound process run into those.
    """
    for timeout_s in (SHORT_S, LONG_S) if is_stopped else (LONG_S,):
        caplog.clear()
        caplog.set_level(logging.WARNING)
        victim, other = peers = processes.take(["victim", "other"])
        try:
            await attempt(peers, timeout_s)
        except (AssertionError, SluiceError):
            victim.end()
            other.end()
            if timeout_s == LONG_S:
                raise
            continue
        processes.give_back(other)
        if ends:
            victim.end()
        else:
            processes.give_back(victim)
        break


def _said(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(record.getMessage() for record in caplog.records)


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None
