"""Runs the processes of one run: ordered start, logs, restarts, one ordered end.

Consumes: specifications. Waits for: the process that ends the run, a failure, or a signal.
Unblocked by: exits of processes and signals. Produces: log lines, an exit code.
On failure: a process that may restart is started again with a growing pause; any other failure
    ends the run, with that process's last lines.
On shutdown: SIGTERM to all in reverse order of start, the grace period, SIGKILL to what is left;
    the exit code is 0 only if the run reached its end and nothing had to be killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sluice.concurrency.parent_death import SUPERVISOR_VARIABLE
from sluice.concurrency.shutdown import stop_on_signals
from sluice.launch.service_spec import ServiceSpec

logger = logging.getLogger(__name__)

LogLine = Callable[[str, str], None]

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_LAST_LINES = 15
_FIRST_PAUSE_S = 0.5
_LINE_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended. `failures` holds one text per failed process, with its last lines."""

    exit_code: int
    failures: tuple[str, ...]


@dataclass(slots=True)
class _Supervised:
    """A process and its history."""

    spec: ServiceSpec
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))


class Supervisor:
    """Starts, watches and ends processes.

    Args:
        specs: in the order of start.
        log_dir: every process's output goes to `<log_dir>/<name>.log`.
        on_line: also takes each line with the process's name.
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self, specs: Sequence[ServiceSpec], log_dir: Path, on_line: LogLine, grace_s: float
    ) -> None:
        self._services = [_Supervised(spec) for spec in specs]
        self._log_dir, self._on_line, self._grace_s = log_dir, on_line, grace_s
        self._over = asyncio.Event()
        self._interrupted = asyncio.Event()
        self._failures: list[str] = []
        self._ending = False

    async def run(self) -> RunEnd:
        """Runs until the run is over; every process has ended when this returns."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with stop_on_signals(self._interrupted):
            async with asyncio.TaskGroup() as tasks:
                interruption = tasks.create_task(self._end_on_signal(), name="signals")
                for service in self._services:
                    tasks.create_task(self._keep(service), name=service.spec.name)
                await self._over.wait()
                killed = await self._end_all()
                interruption.cancel()
        return RunEnd(self._exit_code(killed), tuple(self._failures))

    def pid_of(self, name: str) -> int | None:
        """The process id of a running service."""
        for service in self._services:
            if service.spec.name == name and service.process is not None:
                return service.process.pid
        return None

    async def _end_on_signal(self) -> None:
        await self._interrupted.wait()
        logger.info("interrupted; ending all services in order")
        self._over.set()

    async def _keep(self, service: _Supervised) -> None:
        while True:
            code = await self._run_once(service)
            if self._ending:
                return
            if code == 0:  # ended on purpose: the run's end, or somebody scaled down
                if service.spec.ends_run:
                    self._over.set()
                return
            if not await self._may_restart(service, code):
                return

    async def _may_restart(self, service: _Supervised, code: int) -> bool:
        spec = service.spec
        if service.restarts >= spec.max_restarts:
            lines = "\n".join(f"  {line}" for line in service.last_lines)
            again = f" after {service.restarts} restarts" if service.restarts else ""
            self._failures.append(f"{spec.name} ended with code {code}{again}:\n{lines}")
            self._over.set()
            return False
        pause_s = _FIRST_PAUSE_S * 2**service.restarts
        service.restarts += 1
        logger.warning("%s ended with code %d; starting it again in %g s", spec.name, code, pause_s)
        return not await self._is_over_within(pause_s)

    async def _is_over_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            return False
        return True

    async def _run_once(self, service: _Supervised) -> int:
        spec = service.spec
        environment = {**os.environ, **spec.environment, "PYTHONUNBUFFERED": "1"}
        environment[SUPERVISOR_VARIABLE] = str(os.getpid())
        process = await asyncio.create_subprocess_exec(
            *spec.command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us alone, and we end them in order
            limit=_LINE_LIMIT_BYTES,
        )
        service.process = process
        try:
            await self._forward(service, process)
            return await process.wait()
        finally:
            service.process = None

    async def _forward(self, service: _Supervised, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        name = service.spec.name
        with (self._log_dir / f"{name}.log").open("a", encoding="utf-8") as file:
            async for raw in process.stdout:
                line = raw.decode(errors="replace").rstrip()
                file.write(line + "\n")
                service.last_lines.append(line)
                self._on_line(name, line)

    async def _end_all(self) -> bool:
        """Ends every process in reverse order of start; whether any had to be killed."""
        self._ending = True
        running = [s.process for s in reversed(self._services) if s.process is not None]
        for process in running:
            _send(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(self._grace_s):
                for process in running:
                    await process.wait()
        except TimeoutError:
            left = [process for process in running if process.returncode is None]
            logger.warning("%d processes did not end within %g s", len(left), self._grace_s)
            for process in left:
                _send(process, signal.SIGKILL)
            return True
        return False

    def _exit_code(self, killed: bool) -> int:
        if self._failures or killed:
            return EXIT_FAILED
        return EXIT_INTERRUPTED if self._interrupted.is_set() else 0


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signals the process's whole session; one that ended already needs nothing."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
