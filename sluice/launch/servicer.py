"""LaunchService: its address in the run's folder, its calls, and the number of replicas."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc

from sluice.api.launch.v1 import launch_pb2 as launch
from sluice.api.launch.v1 import launch_pb2_grpc
from sluice.client.launcher import LaunchedProcess, Launcher
from sluice.concurrency.process import ENDED, MARKS_FOLDER, process_marks
from sluice.device.host import available_bytes
from sluice.errors import DeadlineError, InvalidRequestError, NotReadyError, SluiceError
from sluice.launch.processes.supervisor import ServiceState
from sluice.launch.service_spec import ServiceSpec, replica_name, replica_number
from sluice.rpc.credentials import Credentials
from sluice.rpc.server import RpcServer
from sluice.sandbox.contained import descendants
from sluice.security.token_file import GivenToken, write_private

MAX_REPLICAS = 1024
LAUNCHER_NAME = "launcher.json"
_SECRET_BYTES = 32
_SERVICE = "sluice.api.launch.v1.LaunchService"
_HOST = "127.0.0.1"
_MAX_MESSAGE_BYTES = 1 << 20
_LAST_ANSWERS_S = 1.0
_PROC = Path("/proc")
_OWN_MEMORY = re.compile(r"^Pss_Anon:\s+(\d+) kB$", re.MULTILINE)
Context = grpc.aio.ServicerContext[Any, Any]


class Processes(Protocol):
    """The part of a `Supervisor` that changes the number of its processes."""

    def services(self) -> tuple[ServiceState, ...]: ...

    def add(self, spec: ServiceSpec, /) -> None: ...

    def dismiss(self, name: str, /) -> None: ...


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """The numbers of the replicas to start, and of those to drain, each in that order."""

    start: tuple[int, ...]
    drain: tuple[int, ...]


def scale_change(serving: Sequence[int], draining: Sequence[int], num_wanted: int) -> ScaleChange:
    """Return the change from the replicas numbered `serving` to `num_wanted` replicas.

    The lowest free numbers start, the highest ones drain. The number of a replica that still drains
    is not free: two processes never have one name.
    """
    if num_wanted >= len(serving):
        taken_numbers = {*serving, *draining}
        free = (
            number
            for number in range(MAX_REPLICAS + len(taken_numbers))
            if number not in taken_numbers
        )
        return ScaleChange(tuple(next(free) for _ in range(num_wanted - len(serving))), ())
    return ScaleChange((), tuple(sorted(serving, reverse=True)[: len(serving) - num_wanted]))


def check_number(num_wanted: int) -> None:
    """Refuse an impossible number of replicas.

    Raises:
        InvalidRequestError: with the reason.
    """
    if num_wanted < 1:
        raise InvalidRequestError(
            f"replicas: {num_wanted} is below 1; a run without replicas only waits until it fails "
            "(sluice.trainer.batch_timeout_s); end it with Ctrl-C and start it again later, "
            "it resumes from its last checkpoint"
        )
    if num_wanted > MAX_REPLICAS:
        raise InvalidRequestError(f"replicas: {num_wanted} is above {MAX_REPLICAS}")


def check_memory(added: int, pids: Sequence[int]) -> None:
    """Refuse more replicas than this machine has memory for, each as large as the smallest one.

    Args:
        added: number of replicas to start.
        pids: process ids of the serving replicas; without any there is nothing to compare with.

    Raises:
        InvalidRequestError: with both numbers.
    """
    free, sizes = available_bytes(), [size for size in map(_memory_of, pids) if size]
    if free is None or not sizes or added * min(sizes) <= free:
        return
    raise InvalidRequestError(
        f"replicas: {added} more would take at least {added * min(sizes) / 2**30:.1f} GiB, each as "
        f"much as the smallest that serves, and this machine has {free / 2**30:.1f} GiB free; "
        f"start at most {free // min(sizes)} more"
    )


def _memory_of(pid: int) -> int:
    """Return the memory of a process and its descendants, bytes, without the files that it maps."""
    num_bytes = 0
    for process in descendants(pid):
        with suppress(OSError):  # it has ended, or the system has no such files
            text = (_PROC / str(process) / "smaps_rollup").read_text(encoding="ascii")
            num_bytes += int(match[1]) * 1024 if (match := _OWN_MEMORY.search(text)) else 0
    return num_bytes


@dataclass(frozen=True, slots=True)
class ReplicaScale:
    """Starts and drains replicas.

    Attributes:
        processes: the processes of the run.
        make_replica: returns the specification of the replica with a number.
        has_fixed_port: whether all replicas would listen on the same port, or answer probes there.
        is_local: whether they run on this machine, whose memory is looked at before more start.
    """

    processes: Processes
    make_replica: Callable[[int], ServiceSpec]
    has_fixed_port: bool = False
    is_local: bool = False

    def set(self, num_wanted: int) -> ScaleChange:
        """Start or drain replicas until `num_wanted` are left; return the changes begun.

        Raises:
            ConfigError: no device is left for a replica; none is started.
            InvalidRequestError: a number that a run cannot have, or more than memory is left for.
            NotReadyError: the run is starting or ending.
        """
        check_number(num_wanted)
        if num_wanted > 1 and self.has_fixed_port:
            raise InvalidRequestError(
                f"replicas: {num_wanted} cannot share one port; start the run with "
                "sluice.rollout.endpoint.port=0, sluice.rollout.endpoint.health_port=0 and no "
                "fixed sluice.rollout.endpoint.metrics_port"
            )
        serving: dict[int, int | None] = {}  # process ids
        draining: list[int] = []
        for state in self.processes.services():
            if (number := replica_number(state.name)) is None:
                continue
            if state.is_draining:
                draining.append(number)
            else:
                serving[number] = state.pid
        change = scale_change([*serving], draining, num_wanted)
        if self.is_local:
            check_memory(len(change.start), [pid for pid in serving.values() if pid is not None])
        for replica in [self.make_replica(number) for number in change.start]:
            self.processes.add(replica)
        for number in change.drain:
            self.processes.dismiss(replica_name(number))
        return change


@dataclass(frozen=True, slots=True)
class LauncherAddress:
    """host:port of a launcher, the one secret that it accepts, and its process id (0: unknown).

    The secret opens nothing else: a process that takes the port of a killed launcher receives no
    token of the run.
    """

    address: str
    secret: str = field(repr=False)
    pid: int = 0

    @property
    def credentials(self) -> Credentials:
        """Return the credentials that it accepts, and that its client shows."""
        return Credentials(tokens=GivenToken(self.secret, LAUNCHER_NAME))


def write_launcher(run_dir: Path, launcher: LauncherAddress) -> None:
    """Record a launcher in the run's folder, readable by its owner alone."""
    content = json.dumps(asdict(launcher)).encode()
    write_private(run_dir, {LAUNCHER_NAME: content}, replace=True)


def launcher_of(run_dir: Path) -> LauncherAddress:
    """Return the launcher that runs in `run_dir`; a killed one may have left its file.

    Raises:
        NotReadyError: none does, or this user cannot use its file.
    """
    file = run_dir / LAUNCHER_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return LauncherAddress(
            str(content["address"]), str(content["secret"]), int(content.get("pid", 0))
        )
    except PermissionError as error:
        raise NotReadyError(
            f"run: {file} belongs to another user; use the command as the user that started the run"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotReadyError(
            f"run: {run_dir} has no {LAUNCHER_NAME}, so no launcher runs there; give the folder "
            "(sluice.run_dir) of a run that `sluice up` has started and that is active. Scale and "
            "stop what another launcher has started (containers, Kubernetes) with that launcher"
        ) from error


async def launched_processes(run_dir: Path) -> tuple[LaunchedProcess, ...] | None:
    """Return what the run's launcher on this machine runs.

    None if no launcher answers; nothing if it is too busy to answer.
    """
    try:
        launcher_address = launcher_of(run_dir)
        async with Launcher(launcher_address.address, launcher_address.credentials) as launcher:
            return await launcher.services()
    except DeadlineError:
        return ()
    except SluiceError:
        return None


async def have_all_left(run_dir: Path) -> bool:
    """Return whether all processes of a run have left its folder.

    What answers at its addresses is then of another run, such as one that began with its
    `config.yaml`. It is false of a run whose processes could not note themselves in the folder.
    """
    if not (run_dir / MARKS_FOLDER).is_dir():
        return False
    # One that was killed leaves its mark behind.
    has_left = all(mark.state() in ENDED for mark in process_marks(run_dir))
    return has_left and await launched_processes(run_dir) is None


class LaunchServicer(launch_pb2_grpc.LaunchServiceServicer):
    """The launcher's calls; `scale` changes the number of replicas."""

    def __init__(self, scale: ReplicaScale) -> None:
        self._scale = scale

    async def SetReplicas(
        self, request: launch.SetReplicasRequest, context: Context
    ) -> launch.SetReplicasResponse:
        """Start or drain replicas."""
        change = self._scale.set(request.replicas)
        return launch.SetReplicasResponse(
            started=map(replica_name, change.start), drained=map(replica_name, change.drain)
        )

    async def GetServices(
        self, request: launch.GetServicesRequest, context: Context
    ) -> launch.GetServicesResponse:
        """Return all processes."""
        return launch.GetServicesResponse(
            services=[
                launch.ServiceProcess(
                    name=state.name,
                    pid=state.pid,
                    restarts=state.restarts,
                    draining=state.is_draining,
                    max_restarts=state.max_restarts,
                )
                for state in self._scale.processes.services()
            ]
        )


@asynccontextmanager
async def launch_service(run_dir: Path, scale: ReplicaScale) -> AsyncIterator[LauncherAddress]:
    """Serve on a free port of the loopback interface while the block runs; yield the address.

    The run's folder holds the address meanwhile, with a new secret for each start. Its bearer
    may call the launcher, and nothing else. The launcher accepts no token of the run, so that
    callers send it none.
    """
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    servicer = LaunchServicer(scale)
    server = RpcServer(
        [lambda server: launch_pb2_grpc.add_LaunchServiceServicer_to_server(servicer, server)],
        (_SERVICE,),
        host=_HOST,
        port=0,
        max_message_bytes=_MAX_MESSAGE_BYTES,
        credentials=LauncherAddress("", secret).credentials,
    )
    await server.start()
    launcher = LauncherAddress(server.address, secret, os.getpid())
    write_launcher(run_dir, launcher)
    try:
        yield launcher
    finally:
        (run_dir / LAUNCHER_NAME).unlink(missing_ok=True)
        await server.stop(_LAST_ANSWERS_S)
