"""Three Ray nodes on one machine, with different addresses of the loopback network.

Every process carries the test's mark, ports are drawn, and the cluster's files are in a folder of
its own, so that it meets no other cluster of the machine. It is ended by process ids.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.commands import CommandError, output_of
from tools.phases import PhaseError
from tools.ray_test.marked_processes import MarkedProcesses, parent_of, send

_START_S, _ATTEMPTS = 120.0, 4
HEAD = "127.0.0.1"
_OBJECT_STORE_BYTES = 100_000_000


class SimulatedCluster:
    """A head, and workers that come and go.

    Args:
        folder: for Ray's files; its path is short, since sockets are among them.
        processes: with the test's mark.
    """

    def __init__(self, folder: Path, processes: MarkedProcesses) -> None:
        self._folder, self._processes = folder, processes
        self.address = f"{HEAD}:{_free_port()}"
        self.job_server = f"{HEAD}:{_free_port()}"
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
        }

    def start_head(self, resources: Mapping[str, float], *, serves_jobs: bool = False) -> None:
        """Start the first node; one that serves jobs does so at `job_server`."""
        port = self.address.rpartition(":")[2]
        server = (
            "--include-dashboard=true",
            f"--dashboard-host={HEAD}",
            f"--dashboard-port={self.job_server.rpartition(':')[2]}",
        )
        self._start(
            "--head",
            f"--port={port}",
            f"--temp-dir={self._folder}",
            f"--node-ip-address={HEAD}",
            f"--ray-client-server-port={_free_port()}",
            *(server if serves_jobs else ("--include-dashboard=false",)),
            resources=resources,
        )

    def start_worker(self, address: str, resources: Mapping[str, float]) -> None:
        """Start another node."""
        self._start(
            f"--address={self.address}", f"--node-ip-address={address}", resources=resources
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
        self._processes.end(signal.SIGTERM, 15.0)
        self._processes.end(signal.SIGKILL, 15.0)

    def actor_worker_of(self, pid: int) -> int:
        """Return the process of the actor that a service's process belongs to.

        Raises:
            PhaseError: its parent is none.
        """
        parent = parent_of(pid)
        command = self._processes.running().get(parent, "")
        if "ray::" not in command:
            raise PhaseError(f"the parent of {pid} is no actor: {command!r}")
        return parent

    def _start(self, *options: str, resources: Mapping[str, float]) -> None:
        cpus = resources.get("CPU", 1)
        own = {name: amount for name, amount in resources.items() if name != "CPU"}
        command = (
            *(str(Path(sys.executable).with_name("ray")), "start", *options),
            *(f"--num-cpus={cpus:g}", "--num-gpus=0", f"--resources={json.dumps(own)}"),
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            # Each node has an agent, at one port of the machine unless another is given.
            f"--dashboard-agent-listen-port={_free_port()}",
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


def _free_port() -> int:
    with socket.create_server((HEAD, 0)) as server:
        return int(server.getsockname()[1])
