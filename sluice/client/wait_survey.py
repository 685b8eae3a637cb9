"""Ask every service of a run at once what it waits for.

A service that does not answer in time is part of the result, with the state of its process if that
runs on this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from sluice.api.reward.v1 import reward_pb2
from sluice.api.rollout.v1 import rollout_pb2
from sluice.api.trainer.v1 import trainer_pb2
from sluice.codec.messages import WaitReport, wait_report_from_proto
from sluice.concurrency.process import ProcessMark, process_marks
from sluice.concurrency.waits import Waiting
from sluice.errors import AccessDeniedError, DeadlineError, HandshakeError, PeerError, SluiceError
from sluice.rpc.client import open_channel, reward_stub, rollout_stub, trainer_stub, unary_call
from sluice.rpc.credentials import OPEN, Credentials

TRAINER, REWARD = "trainer", "reward service"
ANSWER_TIMEOUT_S = 2.0
_MARKED_AS = {"reward": REWARD}
_MESSAGE_BYTES = 64 << 20
_PHASE = "reporting what it waits for"
_StatusCall = tuple[Callable[[grpc.aio.Channel], Any], Any]

_STATUS_CALLS: dict[str, _StatusCall] = {
    TRAINER: (trainer_stub, trainer_pb2.GetStatusRequest()),
    REWARD: (reward_stub, reward_pb2.GetStatusRequest()),
}
_REPLICA_CALL: _StatusCall = (rollout_stub, rollout_pb2.GetStatusRequest(without_engine=True))


@dataclass(frozen=True, slots=True)
class ServiceWaits:
    """One service of a run.

    Attributes:
        name: "trainer", "reward service" or the replica's name.
        waits: what it waits for, the longest first.
        still_s: seconds without progress although there is work; ``None``: unknown, or no work.
        failure: why there is no answer; empty: it answered.
        is_refused: the service is there, and the failure is that caller and service do not accept
            each other's certificate or token.
        pid: its process id; 0: unknown.
        process: the kernel's state of the process, such as "stopped by a signal"; empty: unknown.
        unheard_s: seconds since its last heartbeat to the trainer; ``None``: unknown.
        is_replica: whether it generates.
    """

    name: str
    waits: tuple[Waiting, ...] = ()
    still_s: float | None = None
    failure: str = ""
    pid: int = 0
    process: str = ""
    unheard_s: float | None = None
    is_replica: bool = False
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class _Replica:
    address: str
    unheard_s: float | None = None


@dataclass(frozen=True, slots=True)
class _HeardWaits:
    report: WaitReport
    replicas: Mapping[str, _Replica]


async def survey_waits(
    trainer: str,
    reward: str,
    run_dir: Path,
    *,
    since_s: float = 0.0,
    timeout_s: float = ANSWER_TIMEOUT_S,
    credentials: Credentials = OPEN,
) -> tuple[ServiceWaits, ...]:
    """Return trainer, reward service and all replicas that these or the run's folder know.

    Args:
        trainer: host:port of the trainer.
        reward: host:port of the reward service.
        run_dir: the run's folder, which lists the processes on this machine.
        since_s: older entries there (seconds of the file system's clock) are of an earlier run.
        timeout_s: time that each service has to answer.
        credentials: what the services ask of callers.
    """
    marks = {_MARKED_AS.get(m.name, m.name): m for m in process_marks(run_dir, since_s)}
    # Two rounds: the answers of the first name the replicas.
    first = await _ask_all({TRAINER: trainer, REWARD: reward}, timeout_s, credentials)
    replicas = _replicas(first.values(), marks)
    addresses = {name: replica.address for name, replica in replicas.items()}
    second = await _ask_all(addresses, timeout_s, credentials)
    found = [_outcome(name, answer, timeout_s) for name, answer in first.items()]
    for name, replica in replicas.items():
        service = _outcome(name, second[name], timeout_s)
        found.append(replace(service, unheard_s=replica.unheard_s, is_replica=True))
    return tuple(_with_process(service, marks.get(service.name)) for service in found)


def _replicas(
    answers: Iterable[_HeardWaits | SluiceError], marks: Mapping[str, ProcessMark]
) -> dict[str, _Replica]:
    """Return replicas by name: those that ran here, updated by what trainer and reward know."""
    known = {
        name: _Replica(mark.address)
        for name, mark in marks.items()
        if name not in {TRAINER, REWARD}
    }
    for answer in answers:
        if isinstance(answer, _HeardWaits):
            for name, reported in answer.replicas.items():
                earlier = known.get(name)
                # Only the trainer knows the last heartbeat, and its answer comes first.
                unheard_s = reported.unheard_s if earlier is None else earlier.unheard_s
                known[name] = replace(reported, unheard_s=reported.unheard_s or unheard_s)
    return dict(sorted(known.items()))


def _outcome(name: str, answer: _HeardWaits | SluiceError, timeout_s: float) -> ServiceWaits:
    if isinstance(answer, _HeardWaits):
        return ServiceWaits(name, answer.report.waits, answer.report.still_s)
    if isinstance(answer, DeadlineError):
        return ServiceWaits(name, failure=f"no answer within {timeout_s:g} s")
    if isinstance(answer, AccessDeniedError | HandshakeError):
        return ServiceWaits(name, failure=str(answer), is_refused=True)
    # The transport's words add nothing about a port where no process listens.
    return ServiceWaits(name, failure="no answer" if type(answer) is PeerError else str(answer))


def _with_process(service: ServiceWaits, mark: ProcessMark | None) -> ServiceWaits:
    return service if mark is None else replace(service, pid=mark.pid, process=mark.state())


async def _ask_all(
    addresses: Mapping[str, str], timeout_s: float, credentials: Credentials
) -> dict[str, _HeardWaits | SluiceError]:
    async def answer(name: str, address: str) -> _HeardWaits | SluiceError:
        try:
            return await _ask(name, address, timeout_s, credentials)
        except SluiceError as error:
            return error

    async with asyncio.TaskGroup() as tasks:
        asked = {
            name: tasks.create_task(answer(name, address), name=f"asking {name}")
            for name, address in addresses.items()
        }
    return {name: task.result() for name, task in asked.items()}


async def _ask(name: str, address: str, timeout_s: float, credentials: Credentials) -> _HeardWaits:
    stub, request = _STATUS_CALLS.get(name, _REPLICA_CALL)
    channel = open_channel(address, max_message_bytes=_MESSAGE_BYTES, credentials=credentials)
    async with channel:
        status: Any = await unary_call(
            stub(channel).GetStatus,
            request,
            peer=name,
            phase=_PHASE,
            deadline_s=timeout_s,
        )
    replicas: dict[str, _Replica] = {}
    if name == TRAINER:
        replicas = {
            one.replica.name: _Replica(one.replica.address, one.heartbeat_age_seconds)
            for one in status.replicas
        }
    elif name == REWARD:
        replicas = {replica.name: _Replica(replica.address) for replica in status.replicas}
    return _HeardWaits(wait_report_from_proto(status.wait_report), replicas)
