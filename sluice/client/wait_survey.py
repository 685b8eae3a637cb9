"""What every service of a run waits for, asked from all of them at once.

A service that does not answer in time is part of the answer, with what its process looks like from
outside where it runs on this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.api.reward.v1 import reward_pb2
from sluice.api.rollout.v1 import rollout_pb2
from sluice.api.trainer.v1 import trainer_pb2
from sluice.codec.messages import WaitReport, wait_report_from_proto
from sluice.concurrency.process import ProcessMark, process_marks
from sluice.concurrency.waits import Waiting
from sluice.errors import AccessDeniedError, DeadlineError, HandshakeError, PeerError, SluiceError
from sluice.rpc.client import open_channel, reward_stub, rollout_stub, trainer_stub, unary_call
from sluice.rpc.credentials import OPEN, Credentials

if TYPE_CHECKING:
    import grpc

TRAINER, REWARD = "trainer", "reward service"
ANSWER_TIMEOUT_S = 2.0
_MARKED_AS = {"reward": REWARD}
_MESSAGE_BYTES = 64 << 20
_PHASE = "saying what it waits for"


@dataclass(frozen=True, slots=True)
class ServiceWaits:
    """One service of a run.

    Attributes:
        name: "trainer", "reward service" or the replica's.
        waits: what it waits for, the longest first.
        still_s: seconds without progress although there is work; ``None``: not known, or no work.
        failure: why there is no answer; empty: it answered.
        is_refused: it is there, and the failure is that caller and service do not accept each
            other's certificate or token.
        pid: its process id; 0: not known.
        process: what the kernel says of the process, such as "stopped by a signal"; empty: not
            known.
        unheard_s: seconds since the trainer heard of it; ``None``: not known.
        is_replica: whether it samples.
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
class _Answer:
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
    """Trainer, reward service and all replicas that these or the run's folder know of.

    Args:
        trainer: its address, host:port.
        reward: the reward service's.
        run_dir: the run's folder; processes on this machine are noted there.
        since_s: notes from before (seconds of the file system's clock) are of an earlier run.
        timeout_s: how long each has to answer.
        credentials: what the services ask of callers.
    """
    marks = {_MARKED_AS.get(m.name, m.name): m for m in process_marks(run_dir, since_s)}
    surveyor = _Surveyor(timeout_s, credentials)
    first = await _together(
        {TRAINER: lambda: surveyor.trainer(trainer), REWARD: lambda: surveyor.reward(reward)}
    )
    replicas = _replicas(first.values(), marks)
    second = await _together(
        {name: partial(surveyor.replica, name, r.address) for name, r in replicas.items()}
    )
    found = [_outcome(name, answer, timeout_s) for name, answer in first.items()]
    for name, replica in replicas.items():
        service = _outcome(name, second[name], timeout_s)
        found.append(replace(service, unheard_s=replica.unheard_s, is_replica=True))
    return tuple(_with_process(service, marks.get(service.name)) for service in found)


def _replicas(
    answers: Iterable[_Answer | SluiceError], marks: Mapping[str, ProcessMark]
) -> dict[str, _Replica]:
    """By name: those that ran here, and, more up to date, those that trainer and reward know."""
    known = {
        name: _Replica(mark.address)
        for name, mark in marks.items()
        if name not in {TRAINER, REWARD}
    }
    for answer in answers:
        if isinstance(answer, _Answer):
            for name, reported in answer.replicas.items():
                earlier = known.get(name)
                # Only the trainer knows when it heard of a replica; it comes first.
                unheard_s = reported.unheard_s if earlier is None else earlier.unheard_s
                known[name] = replace(reported, unheard_s=reported.unheard_s or unheard_s)
    return dict(sorted(known.items()))


def _outcome(name: str, answer: _Answer | SluiceError, timeout_s: float) -> ServiceWaits:
    if isinstance(answer, _Answer):
        return ServiceWaits(name, answer.report.waits, answer.report.still_s)
    if isinstance(answer, DeadlineError):
        return ServiceWaits(name, failure=f"no answer within {timeout_s:g} s")
    if isinstance(answer, AccessDeniedError | HandshakeError):
        return ServiceWaits(name, failure=str(answer), is_refused=True)
    # Of a connection that nobody takes the transport's words say no more.
    return ServiceWaits(name, failure="no answer" if type(answer) is PeerError else str(answer))


def _with_process(service: ServiceWaits, mark: ProcessMark | None) -> ServiceWaits:
    return service if mark is None else replace(service, pid=mark.pid, process=mark.state())


async def _together(
    questions: Mapping[str, Callable[[], Awaitable[_Answer]]],
) -> dict[str, _Answer | SluiceError]:
    found: dict[str, _Answer | SluiceError] = {}

    async def ask(name: str, question: Callable[[], Awaitable[_Answer]]) -> None:
        try:
            found[name] = await question()
        except SluiceError as error:
            found[name] = error

    async with asyncio.TaskGroup() as tasks:
        for name, question in questions.items():
            tasks.create_task(ask(name, question), name=f"asking {name}")
    return {name: found[name] for name in questions}


@dataclass(frozen=True, slots=True)
class _Surveyor:
    """Asks one service at a time, each over a channel of its own."""

    timeout_s: float
    credentials: Credentials

    async def trainer(self, address: str) -> _Answer:
        async with self._channel(address) as channel:
            status = await unary_call(
                trainer_stub(channel).GetStatus,
                trainer_pb2.GetStatusRequest(),
                name="TrainerService/GetStatus",
                peer=TRAINER,
                phase=_PHASE,
                deadline_s=self.timeout_s,
            )
        replicas = {
            one.replica.name: _Replica(one.replica.address, one.heartbeat_age_seconds)
            for one in status.replicas
        }
        return _Answer(wait_report_from_proto(status.wait_report), replicas)

    async def reward(self, address: str) -> _Answer:
        async with self._channel(address) as channel:
            status = await unary_call(
                reward_stub(channel).GetStatus,
                reward_pb2.GetStatusRequest(),
                name="RewardService/GetStatus",
                peer=REWARD,
                phase=_PHASE,
                deadline_s=self.timeout_s,
            )
        replicas = {replica.name: _Replica(replica.address) for replica in status.replicas}
        return _Answer(wait_report_from_proto(status.wait_report), replicas)

    async def replica(self, name: str, address: str) -> _Answer:
        async with self._channel(address) as channel:
            status = await unary_call(
                rollout_stub(channel).GetStatus,
                rollout_pb2.GetStatusRequest(without_engine=True),
                name="RolloutService/GetStatus",
                peer=name,
                phase=_PHASE,
                deadline_s=self.timeout_s,
            )
        return _Answer(wait_report_from_proto(status.wait_report), {})

    def _channel(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, max_message_bytes=_MESSAGE_BYTES, credentials=self.credentials)
