"""Runs the processes of one run: ordered start, logs, restarts, one ordered end.

Consumes: specifications. Waits for: the process that ends the run, a failure, or a signal.
Unblocked by: exits of processes and signals. Produces: log lines, an exit code.
On failure: a process that may restart is started again with a growing pause, until it has failed
    too often in a row (a crash loop); any other failure ends the run, with that process's last
    lines. That a needed process leaves early, in order, is a failure.
On shutdown: SIGTERM to all in reverse order of start, the grace period, SIGKILL to what is left;
    the exit code is 0 only if the run reached its end and nothing failed or had to be killed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sluice.concurrency.shutdown import stop_on_signals
from sluice.errors import ConfigError
from sluice.launch.child_process import ChildProcess, start_child
from sluice.launch.service_spec import ServiceSpec

logger = logging.getLogger(__name__)

LogLine = Callable[[str, str], None]

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_LAST_LINES = 15
_FIRST_PAUSE_S = 0.5
# A process that lived this long was no part of a crash loop: its restarts are counted anew.
_STABLE_S = 120.0
_LAST_OUTPUT_S = 2.0


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended. `failures` holds one text per failed process, with its last lines."""

    exit_code: int
    failures: tuple[str, ...]


@dataclass(slots=True)
class _Supervised:
    """A process and its history."""

    spec: ServiceSpec
    child: ChildProcess | None = None
    restarts: int = 0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))

    def diagnosis(self, code: int, when: str = "") -> str:
        """How it ended, with its last lines."""
        again = f" after {self.restarts} restarts" if self.restarts else ""
        lines = "".join(f"\n  {line}" for line in self.last_lines)
        end = f"{_meaning(code)}{again}{when}{':' if lines else ''}"
        return f"{self.spec.name} ended with {end}{lines}"


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
        """Runs until the run is over; every process has ended when this returns or raises."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with stop_on_signals(self._interrupted):
            async with asyncio.TaskGroup() as tasks:
                interruption = tasks.create_task(self._end_on_signal(), name="signals")
                for service in self._services:
                    tasks.create_task(self._keep(service), name=service.spec.name)
                await self._over.wait()
                await self._end_all()
                interruption.cancel()
        return RunEnd(self._exit_code(), tuple(self._failures))

    def pid_of(self, name: str) -> int | None:
        """The process id of a running service."""
        for service in self._services:
            if service.spec.name == name and service.child is not None:
                return service.child.pid
        return None

    async def _end_on_signal(self) -> None:
        await self._interrupted.wait()
        logger.info("interrupted; ending all services in order")
        self._over.set()

    async def _keep(self, service: _Supervised) -> None:
        """Runs one process, again and again as far as its policy allows."""
        while True:
            began_s = time.monotonic()
            try:
                code = await self._run_once(service)
            except ConfigError as error:
                self._fail(str(error))
                return
            if self._ending:
                self._note_last_exit(service, code)
                return
            if code == 0:
                self._note_end(service)
                return
            if time.monotonic() - began_s > _STABLE_S:
                service.restarts = 0
            if not await self._may_restart(service, code):
                return

    def _note_end(self, service: _Supervised) -> None:
        if service.spec.ends_run:
            self._over.set()
        elif service.spec.is_needed:
            self._fail(service.diagnosis(0, when=" in the middle of the run"))
        else:  # somebody asked it to: fewer replicas are no failure
            logger.info("%s has ended", service.spec.name)

    def _note_last_exit(self, service: _Supervised, code: int) -> None:
        """An end that we asked for; SIGTERM may come before the process can handle it."""
        if code not in (0, -signal.SIGTERM, -signal.SIGKILL):
            self._failures.append(service.diagnosis(code))

    async def _may_restart(self, service: _Supervised, code: int) -> bool:
        spec = service.spec
        is_refusal = code > 0 and not spec.retries_errors
        if is_refusal or service.restarts >= spec.max_restarts:
            self._fail(service.diagnosis(code))
            return False
        pause_s = _FIRST_PAUSE_S * 2**service.restarts
        service.restarts += 1
        logger.warning(
            "%s ended with %s; starting it again in %g s", spec.name, _meaning(code), pause_s
        )
        return not await self._is_over_within(pause_s)

    def _fail(self, diagnosis: str) -> None:
        self._failures.append(diagnosis)
        self._over.set()

    async def _is_over_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            return False
        return True

    async def _run_once(self, service: _Supervised) -> int:
        child = await start_child(service.spec)
        service.child = child
        if self._ending:  # it was being started when the others were asked to end
            child.kill()
        try:
            async with asyncio.TaskGroup() as tasks:
                forwarding = tasks.create_task(self._forward(service, child), name="output")
                code = await child.wait()
                child.kill()  # what it started and left behind
                await asyncio.wait([forwarding], timeout=_LAST_OUTPUT_S)
                forwarding.cancel()
            return code
        finally:
            await child.end(self._grace_s)
            service.child = None

    async def _forward(self, service: _Supervised, child: ChildProcess) -> None:
        name = service.spec.name
        with (self._log_dir / f"{name}.log").open("a", encoding="utf-8") as file:
            async for line in child.lines():
                file.write(line + "\n")
                file.flush()
                service.last_lines.append(line)
                self._on_line(name, line)

    async def _end_all(self) -> None:
        """Ends every process, asking in reverse order of start."""
        self._ending = True
        running = [(s.spec.name, s.child) for s in reversed(self._services) if s.child is not None]
        for _, child in running:
            child.terminate()
        try:
            async with asyncio.timeout(self._grace_s):
                for _, child in running:
                    await child.wait()
        except TimeoutError:
            for name, child in running:
                if not child.has_ended:
                    self._failures.append(
                        f"{name} did not end within {self._grace_s:g} s and was killed"
                    )
                    child.kill()

    def _exit_code(self) -> int:
        if self._failures:
            return EXIT_FAILED
        return EXIT_INTERRUPTED if self._interrupted.is_set() else 0


def _meaning(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
