"""Small child processes with a script, for a supervisor to run."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from sluice.launch.processes.supervisor import RunEnd, Supervisor
from sluice.launch.service_spec import RestartPolicy, ServiceSpec

WAIT_S = 60.0

SLEEP = "import time; print('ready'); time.sleep(600)"
# Says `ready`, and ends with `code` after saying `bye` when it is asked to.
POLITE = """
import signal, sys, time
def end(*_):
    print("bye", flush=True)
    sys.exit({code})
signal.signal(signal.SIGTERM, end)
print("ready")
while True:
    time.sleep(60)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready")
while True:
    time.sleep(60)
"""


def spec(
    name: str, script: str, *, max_restarts: int = 0, retries_errors: bool = True, **policy: Any
) -> ServiceSpec:
    """A Python process that runs `script`; `policy` as `ServiceSpec` takes it."""
    command = sys.executable, "-c", textwrap.dedent(script)
    restarts = RestartPolicy(max_restarts, retries_errors)
    return ServiceSpec(name, command, restarts=restarts, **policy)


def polite(name: str, code: int = 0) -> ServiceSpec:
    """A process that ends in order when asked to."""
    return spec(name, POLITE.format(code=code))


class Supervised:
    """A supervisor with what its processes have said, and their ids."""

    def __init__(
        self,
        log_dir: Path,
        *specs: ServiceSpec,
        grace_s: float = WAIT_S,
        on_dismissed: Callable[[str], None] | None = None,
        save: Callable[[], Coroutine[Any, Any, bool]] | None = None,
    ) -> None:
        self.lines: list[tuple[str, str]] = []
        self.pids: set[int] = set()
        self._said = asyncio.Event()
        self._names = [each.name for each in specs]
        self.supervisor = Supervisor(
            specs, log_dir, self._on_line, grace_s, on_dismissed=on_dismissed, save=save
        )

    def _on_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self.pids.update(pid for n in self._names if (pid := self.supervisor.pid_of(n)))
        self._said.set()

    def said(self, name: str) -> list[str]:
        """Lines of one process."""
        return [line for who, line in self.lines if who == name]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for lines that make `condition` true."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._said.clear()
                await self._said.wait()

    async def until_ready(self) -> None:
        """Waits until every process has said so."""
        await self.until(lambda: all("ready" in self.said(name) for name in self._names))

    async def run(self, when_ready: Callable[[], object] | None = None) -> RunEnd:
        """Runs to the end; `when_ready` is called once all processes are."""
        async with asyncio.timeout(2 * WAIT_S), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.supervisor.run())
            if when_ready is not None:
                await self.until_ready()
                when_ready()
        return running.result()


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (
        FileNotFoundError,
        ProcessLookupError,
    ):  # the latter: it ended since the file was opened
        return False
    return state != "Z"


async def until_gone(*pids: int) -> None:
    """Waits until none of the processes is left."""
    async with asyncio.timeout(WAIT_S):
        while any(map(is_alive, pids)):
            await asyncio.sleep(0.01)


def end_self(number: int) -> Callable[[], None]:
    """Sends a signal to this process, as a terminal would."""
    return lambda: os.kill(os.getpid(), number)


async def open_gate(gate: Path) -> None:
    """Lets a process continue that reads a named pipe to its end; waits until it has opened it."""
    async with asyncio.timeout(WAIT_S):
        while (writer := _writer_of(gate)) is None:
            await asyncio.sleep(0.01)
    os.close(writer)


def _writer_of(gate: Path) -> int | None:
    # An open that waits for the reader would never end if that has died.
    with suppress(OSError):
        return os.open(gate, os.O_WRONLY | os.O_NONBLOCK)
    return None
