"""Ray nodes on one machine, with different addresses of the loopback network.

Every process carries the test's mark, ports are free ones, and the cluster's files are in a folder
of its own, so it meets no other cluster of the machine. It is ended by process ids.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from sluice.concurrency.process import stat_fields
from tools.commands import CommandError, free_port, output_of
from tools.phases import PhaseError

HEAD = "127.0.0.1"
NODE: Mapping[str, float] = {"CPU": 4.0, "NPU": 1.0}
NO_VARIABLES: Mapping[str, str] = {}
_MARK_VARIABLE = "SLUICE_RAY_TEST"
_START_S, _ATTEMPTS, _END_S, _POLL_S = 120.0, 4, 15.0, 0.2
_OBJECT_STORE_BYTES = 100_000_000


class MarkedProcesses:
    """Processes whose environment holds one mark, or which have opened files of one folder.

    Some of Ray's set a title of their own, which overwrites the environment that others see.

    Args:
        mark: unique on this machine.
        folder: absolute; no other process opens files there.
    """

    def __init__(self, mark: str, folder: Path) -> None:
        self.environment = {_MARK_VARIABLE: mark}
        self._needle, self._folder = f"{_MARK_VARIABLE}={mark}".encode(), f"{folder}/"

    def running(self) -> dict[int, str]:
        """Return command lines by process id, without this process; zombies have ended."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            # A process that has just ended, or is a zombie, has no files.
            with suppress(OSError):
                if int(process.name) != os.getpid() and self._is_mine(process):
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(process.name)] = command.decode(errors="replace").strip()
        return found

    def _is_mine(self, process: Path) -> bool:
        if self._needle in (process / "environ").read_bytes().split(b"\0"):
            return True
        for link in (process / "cwd", *(process / "fd").iterdir()):
            with suppress(OSError):  # it was closed meanwhile
                if str(link.readlink()).startswith(self._folder):
                    return True
        return False

    def left_after(
        self, seconds: float, belongs: Callable[[str], bool] = lambda _: True
    ) -> dict[int, str]:
        """Return matching processes, once there are none or the time is over."""
        until_s = time.monotonic() + seconds
        while True:
            left = {pid: command for pid, command in self.running().items() if belongs(command)}
            if not left or time.monotonic() > until_s:
                return left
            time.sleep(_POLL_S)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def is_service(command: str) -> bool:
    """Return whether it is a service of ours, or the actor that hosts one."""
    return " -m services." in command or "ray::RayServiceHost" in command


class SimulatedCluster:
    """A head, and workers that come and go.

    Args:
        folder: for Ray's files; its path is short, since sockets are among them.
        processes: with the test's mark.
        node: what a worker has; the head has twice as many CPUs.
        environment: further variables of its processes.
    """

    def __init__(
        self,
        folder: Path,
        processes: MarkedProcesses,
        node: Mapping[str, float] = NODE,
        environment: Mapping[str, str] = NO_VARIABLES,
    ) -> None:
        self._folder, self._processes, self._node = folder, processes, node
        self.address, self.job_server = f"{HEAD}:{free_port()}", f"{HEAD}:{free_port()}"
        self.environment = {
            **processes.environment,
            "RAY_USAGE_STATS_ENABLED": "0",
            # As the documentation requires: a caller who reaches Ray's ports could run code here.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "OMP_NUM_THREADS": "1",
            # As in an activated environment: a job calls commands by their names.
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.getenv("PYTHONPATH")))),
            **environment,
        }

    def start_head(self, *, serves_jobs: bool) -> None:
        """Start the first node; one that serves jobs does so at `job_server`."""
        self._start(
            "--head",
            f"--port={self.address.rpartition(':')[2]}",
            f"--temp-dir={self._folder}",
            f"--node-ip-address={HEAD}",
            f"--ray-client-server-port={free_port()}",
            f"--include-dashboard={str(serves_jobs).lower()}",
            f"--dashboard-host={HEAD}",
            f"--dashboard-port={self.job_server.rpartition(':')[2]}",
            resources={**self._node, "CPU": 2 * self._node["CPU"], "head": 4.0},
        )

    def start_worker(self, address: str) -> None:
        """Start another node."""
        self._start(
            f"--address={self.address}", f"--node-ip-address={address}", resources=self._node
        )

    def kill_node(self, address: str) -> None:
        """Send SIGKILL to a node's raylet; its children end with it.

        Raises:
            PhaseError: there is no such node.
        """
        mine = f"--node_ip_address={address} "
        found = [
            pid
            for pid, command in self._processes.running().items()
            if "/raylet/raylet " in command and mine in command
        ]
        if len(found) != 1:
            raise PhaseError(f"raylets at {address}: {found}, wanted one")
        send(found[0], signal.SIGKILL)

    def stop(self) -> None:
        """End all of its processes, and those that they left."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._processes.running():
                send(pid, number)
            self._processes.left_after(_END_S)

    def actor_worker_of(self, pid: int) -> int:
        """Return the process of the actor that a service's process belongs to.

        Raises:
            PhaseError: its parent is none.
        """
        parent = int(stat_fields(pid)[1])
        command = self._processes.running().get(parent, "")
        if "ray::" not in command:
            raise PhaseError(f"the parent of {pid} is no actor: {command!r}")
        return parent

    def _start(self, *options: str, resources: Mapping[str, float]) -> None:
        own = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
        command = (
            *(str(Path(sys.executable).with_name("ray")), "start", *options),
            *(f"--num-cpus={resources['CPU']:g}", f"--num-gpus={resources.get('GPU', 0):g}"),
            *(f"--resources={json.dumps(own)}", f"--object-store-memory={_OBJECT_STORE_BYTES}"),
            # Each node has an agent, at one port of the machine unless another is given.
            f"--dashboard-agent-listen-port={free_port()}",
        )
        before = self._processes.running()
        for left in reversed(range(_ATTEMPTS)):
            try:
                output_of(*command, timeout_s=_START_S, environment=self.environment)
            except CommandError:  # Ray allows 30 s, which a machine under load may exceed
                for pid in self._processes.running().keys() - before.keys():
                    send(pid, signal.SIGKILL)
                if not left:
                    raise
            else:
                return
