"""Explain what a run waits for: ask all services at once, then follow the waits to the service that
blocks the others.

A service that does not answer in time is part of the result, with the state of its process if that
runs on this machine.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from sluice.api.reward.v1 import reward_pb2
from sluice.api.rollout.v1 import rollout_pb2
from sluice.api.trainer.v1 import trainer_pb2
from sluice.client.run_address import RunLocation
from sluice.codec.messages import wait_report_from_proto
from sluice.concurrency.process import ENDED, process_marks
from sluice.concurrency.waits import Waiting
from sluice.errors import AccessDeniedError, DeadlineError, HandshakeError, PeerError, SluiceError
from sluice.rpc.client import open_channel, reward_stub, rollout_stub, trainer_stub, unary_call
from sluice.rpc.credentials import OPEN, Credentials
from sluice.service_contract import CONFIG_NAME

TRAINER, REWARD, FLEET = "trainer", "reward service", "rollout fleet"
MIN_REPORTED_S = 1.0
"""Shorter waits are normal."""

_MAX_WAITERS_REPORTED = 3
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
        still_s: seconds without progress despite work; ``None`` if unknown or without work.
        failure: why there is no answer; empty if it answered.
        is_refused: the service is up, but caller and service do not accept each other's certificate
            or token.
        pid: its process id; 0 if unknown.
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
class Explanation:
    """Why a run does not advance.

    Attributes:
        cause: the explanation in one sentence.
        root: the service that blocks the others; ``None`` if no service waits for another.
        services: the root, then the services that wait for it, the nearest first.
    """

    cause: str
    root: str | None
    services: tuple[ServiceWaits, ...]


async def explain_run(location: RunLocation) -> Explanation | None:
    """Ask the services of a run what they wait for; ``None`` if none answers or has a process."""
    # Written at the start of a run: processes noted before it belong to an earlier one.
    config_file = location.run_dir / CONFIG_NAME
    services = await survey_waits(
        location.trainer,
        location.reward,
        location.run_dir,
        since_s=config_file.stat().st_mtime if config_file.is_file() else 0.0,
        credentials=location.credentials,
    )
    if all(service.failure and service.process in ENDED | {""} for service in services):
        return None
    return explain(services)


def explain(services: Sequence[ServiceWaits]) -> Explanation:
    """Find the service that blocks the others.

    A service that refuses the caller comes first: nothing is known of the services behind it.
    Otherwise it is the silent service that most waits lead to, and if all answer, the end of the
    chain of the longest waits.

    Args:
        services: all services of one run, with different names.
    """
    by_name = {service.name: service for service in services}
    refused = [service for service in services if service.is_refused]
    silent = [service for service in services if service.failure]
    if refused:
        root = refused[0].name
        other_names = ", ".join(service.name for service in refused[1:])
        cause = refused[0].failure + (f"; also refused by {other_names}" if other_names else "")
    elif silent:
        root = max(
            silent,
            key=lambda candidate: (_num_waits_behind(candidate.name, by_name), candidate.name),
        ).name
        cause = _silence_text(by_name[root], [s for s in silent if s.name != root], by_name)
    elif chain := _longest_chain(by_name):
        root, cause = chain[-1][1], _chain_text(chain, by_name)
    else:
        return Explanation(
            "every service answers, and none waits for another", None, tuple(services)
        )
    distances = _distances(root, by_name)
    num_services = len(services)
    ordered = sorted(services, key=lambda s: (distances.get(s.name, num_services), s.name))
    return Explanation(cause, root, tuple(ordered))


def _targets(peer: str, by_name: Mapping[str, ServiceWaits]) -> tuple[str, ...]:
    """Return the services that the peer of a wait means; none if it is not a service."""
    if peer in by_name:
        return (peer,)
    if peer == FLEET:
        return tuple(service.name for service in by_name.values() if service.is_replica)
    return ()


def _waits_on(
    root: str, by_name: Mapping[str, ServiceWaits]
) -> tuple[tuple[ServiceWaits, Waiting], ...]:
    """Return the waits for `root`: by its own name before the fleet's, then longest first."""
    waits = [
        (service, wait)
        for service in by_name.values()
        for wait in service.waits
        if service.name != root and root in _targets(wait.peer, by_name)
    ]
    return tuple(sorted(waits, key=lambda pair: (pair[1].peer != root, -pair[1].seconds)))


def _distances(root: str, by_name: Mapping[str, ServiceWaits]) -> dict[str, int]:
    """Return the number of waits from each service to `root`, for those that wait for it."""
    distances, reached = {root: 0}, deque([root])
    while reached:
        name = reached.popleft()
        for service, _ in _waits_on(name, by_name):
            if service.name not in distances:
                distances[service.name] = distances[name] + 1
                reached.append(service.name)
    return distances


def _num_waits_behind(root: str, by_name: Mapping[str, ServiceWaits]) -> int:
    """Return the number of waits that end at `root`, directly or through other services."""
    return sum(
        wait.count for name in _distances(root, by_name) for _, wait in _waits_on(name, by_name)
    )


def _silence_text(
    root: ServiceWaits, other_services: Sequence[ServiceWaits], by_name: Mapping[str, ServiceWaits]
) -> str:
    waits = _waits_on(root.name, by_name)
    known_s = [wait.seconds for _, wait in waits if wait.peer == root.name]
    known_s += [root.unheard_s] if root.unheard_s is not None else []
    lasting = f"has not answered for {max(known_s):.0f} s" if known_s else "does not answer"
    process = f" (its process {root.pid} is {root.process})" if root.process else ""
    reported = [_wait_text(service, wait) for service, wait in waits[:_MAX_WAITERS_REPORTED]]
    parts = [f"{root.name} {lasting}{process}", *reported]
    if other_services:
        parts.append(f"also no answer from {', '.join(service.name for service in other_services)}")
    return "; ".join(parts)


def _wait_text(service: ServiceWaits, wait: Waiting) -> str:
    subject = (
        f"{wait.count} waits of {service.name} are" if wait.count > 1 else f"{service.name} is"
    )
    peer = "it" if wait.peer != FLEET else f"the {FLEET}"
    return f"{subject} waiting for {peer} ({wait.phase}, {wait.seconds:.0f} s)"


def _longest_chain(by_name: Mapping[str, ServiceWaits]) -> list[tuple[str, str, Waiting]]:
    """Return the longest waits from service to service, as (waiting service, peer, wait).

    The chain begins with the service that no other waits for, and whose wait is the longest.
    """
    waiting = [name for name in by_name if _next_wait(name, by_name, {name}) is not None]
    heads = [name for name in waiting if not _waits_on(name, by_name)] or waiting
    if not heads:
        return []
    name = max(heads, key=lambda head: max(w.seconds for w in by_name[head].waits))
    chain: list[tuple[str, str, Waiting]] = []
    visited = {name}
    while (step := _next_wait(name, by_name, visited)) is not None:
        chain.append((name, *step))
        name = step[0]
        visited.add(name)
    return chain


def _next_wait(
    name: str, by_name: Mapping[str, ServiceWaits], visited: set[str]
) -> tuple[str, Waiting] | None:
    """Return the peer of the longest wait and the wait; in a fleet, the replica with most waits."""
    for wait in sorted(by_name[name].waits, key=lambda wait: -wait.seconds):
        targets = [target for target in _targets(wait.peer, by_name) if target not in visited]
        if targets and wait.seconds >= MIN_REPORTED_S:
            counts = Counter[str]()
            for waiting in by_name[name].waits:
                counts[waiting.peer] += waiting.count
            return max(targets, key=lambda each: (counts[each], each)), wait
    return None


def _chain_text(
    chain: Sequence[tuple[str, str, Waiting]], by_name: Mapping[str, ServiceWaits]
) -> str:
    links = [f"waits for {peer} ({wait.phase}, {wait.seconds:.0f} s)" for _, peer, wait in chain]
    root = by_name[chain[-1][1]]
    longest_wait = max(
        (wait for wait in root.waits if not _targets(wait.peer, by_name)),
        key=lambda wait: wait.seconds,
        default=None,
    )
    if root.still_s is not None and root.still_s >= MIN_REPORTED_S:
        end = f"has made no progress for {root.still_s:.0f} s"
    elif longest_wait is not None and longest_wait.seconds >= MIN_REPORTED_S:
        end = f"waits for {longest_wait.peer} ({longest_wait.phase}, {longest_wait.seconds:.0f} s)"
    else:
        end = "is working"
    return ", which ".join([f"{chain[0][0]} {links[0]}", *links[1:], end])


class _Replica(NamedTuple):
    address: str
    unheard_s: float | None = None


async def survey_waits(
    trainer: str,
    reward: str,
    run_dir: Path,
    *,
    since_s: float = 0.0,
    timeout_s: float = 2.0,
    credentials: Credentials = OPEN,
) -> tuple[ServiceWaits, ...]:
    """Return trainer, reward service and all replicas that these or the run's folder know.

    Args:
        trainer, reward: host:port.
        run_dir: the run's folder, which lists the processes on this machine.
        since_s: older entries there (seconds of the file system's clock) are of an earlier run.
        timeout_s: time that each service has to answer.
        credentials: credentials for the services.
    """
    marks = {_MARKED_AS.get(m.name, m.name): m for m in process_marks(run_dir, since_s)}
    replicas = {
        name: _Replica(mark.address)
        for name, mark in marks.items()
        if name not in {TRAINER, REWARD}
    }
    # Two rounds: the answers of the first name the replicas.
    answers = await _ask_all({TRAINER: trainer, REWARD: reward}, timeout_s, credentials)
    for _, named_replicas in answers:
        for name, replica in named_replicas.items():
            earlier = replicas.get(name)
            # Only the trainer knows the last heartbeat, and its answer comes first.
            unheard_s = replica.unheard_s or (earlier.unheard_s if earlier else None)
            replicas[name] = _Replica(replica.address, unheard_s)
    addresses = {name: replica.address for name, replica in sorted(replicas.items())}
    second = await _ask_all(addresses, timeout_s, credentials)
    services = [service for service, _ in answers]
    for service, _ in second:
        unheard_s = replicas[service.name].unheard_s
        services.append(replace(service, unheard_s=unheard_s, is_replica=True))
    return tuple(
        replace(service, pid=mark.pid, process=mark.state())
        if (mark := marks.get(service.name))
        else service
        for service in services
    )


async def _ask_all(
    addresses: Mapping[str, str], timeout_s: float, credentials: Credentials
) -> list[tuple[ServiceWaits, Mapping[str, _Replica]]]:
    async with asyncio.TaskGroup() as tasks:
        asking = [
            tasks.create_task(_ask(name, address, timeout_s, credentials), name=f"asking {name}")
            for name, address in addresses.items()
        ]
    return [task.result() for task in asking]


async def _ask(
    name: str, address: str, timeout_s: float, credentials: Credentials
) -> tuple[ServiceWaits, Mapping[str, _Replica]]:
    """Return what a service waits for, or why it does not say, and the replicas that it names."""
    stub, request = _STATUS_CALLS.get(name, _REPLICA_CALL)
    channel = open_channel(address, max_message_bytes=_MESSAGE_BYTES, credentials=credentials)
    try:
        async with channel:
            status: Any = await unary_call(
                stub(channel).GetStatus, request, peer=name, phase=_PHASE, deadline_s=timeout_s
            )
    except DeadlineError:
        return ServiceWaits(name, failure=f"no answer within {timeout_s:g} s"), {}
    except (AccessDeniedError, HandshakeError) as error:
        return ServiceWaits(name, failure=str(error), is_refused=True), {}
    except SluiceError as error:
        # The transport's words add nothing about a port where no process listens.
        failure = "no answer" if type(error) is PeerError else str(error)
        return ServiceWaits(name, failure=failure), {}
    replicas: dict[str, _Replica] = {}
    if name == TRAINER:
        replicas = {
            member.replica.name: _Replica(member.replica.address, member.heartbeat_age_seconds)
            for member in status.replicas
        }
    elif name == REWARD:
        replicas = {replica.name: _Replica(replica.address) for replica in status.replicas}
    report = wait_report_from_proto(status.wait_report)
    return ServiceWaits(name, report.waits, report.still_s), replicas
