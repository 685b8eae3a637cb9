"""A thin host of one service's process on a node of a cluster: the body of an actor.

It decides nothing. The launcher decides what starts and when it ends, and fetches output and exit
code by calls that wait. When this host dies, the kernel ends the process with it; a restarted host
reports such a process as ended by SIGKILL.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

import msgspec

from sluice.errors import ConfigError
from sluice.launch.cluster.nodes import ServicePlan, look_around
from sluice.launch.processes.child import LocalChild, start_child
from sluice.launch.service_spec import ServiceSpec, free_ports

# Lines that come together travel together.
_GATHER_S = 0.02


class ServiceHost:
    """Keeps at most one process.

    Args:
        address: of this node, as peers reach it.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._child: LocalChild | None = None

    async def place(self, num_ports: int) -> tuple[str, list[int]]:
        """Return the address of the node, and free ports there."""
        return self._address, free_ports([self._address] * num_ports)

    async def look(self, plan: bytes) -> bytes:
        """Get the node ready for a service; take a `ServicePlan`, return `NodeFacts`, as JSON."""
        asked = msgspec.json.decode(plan, type=ServicePlan)
        return msgspec.json.encode(look_around(asked, self._address))

    async def start(
        self, name: str, command: list[str], environment: dict[str, str]
    ) -> tuple[int, str]:
        """Start a process in place of one that may be left; return its id, or 0 and the reason."""
        if self._child is not None:
            await self._child.end(0.0)
            if not self._child.has_ended:
                return 0, f"process {self._child.pid}, started before, does not end after SIGKILL"
        try:
            self._child = await start_child(ServiceSpec(name, tuple(command), environment))
        except ConfigError as error:
            return 0, str(error)
        return self._child.pid, ""

    async def lines(self, pid: int) -> tuple[list[str], bool]:
        """Return its next lines of output, and whether they were the last; for one caller only."""
        child = self._of(pid)
        if child is None:
            return [], True
        found: list[str] = []
        some = asyncio.Event()

        async def read() -> None:
            async for line in child.lines():
                found.append(line)
                some.set()

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read(), name="output")
            waiting = tasks.create_task(some.wait(), name="first line")
            await asyncio.wait([reading, waiting], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([reading], timeout=_GATHER_S)
            is_over = reading.done()
            reading.cancel()
            waiting.cancel()
        return found, is_over

    async def ended(self, pid: int) -> int:
        """Return its exit code, once it has one."""
        child = self._of(pid)
        return -signal.SIGKILL if child is None else await child.wait()

    async def terminate(self, pid: int) -> None:
        """Send SIGTERM to the process."""
        child = self._of(pid)
        if child is not None:
            with suppress(ProcessLookupError):
                child.terminate()

    async def kill(self, pid: int) -> None:
        """Send SIGKILL to the process and to all that it started."""
        child = self._of(pid)
        if child is not None:
            child.kill()

    def _of(self, pid: int) -> LocalChild | None:
        child = self._child
        return child if child is not None and child.pid == pid else None
