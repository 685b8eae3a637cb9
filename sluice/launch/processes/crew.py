"""Processes that start and end together: one replica, or all ranks of a trainer.

When one of several ends, the others get a moment to end on their own, then SIGTERM and after the
grace period SIGKILL: ranks of a trainer cannot continue without one of them, and a new one cannot
join in the middle. A process that SIGKILL does not end is given up, and counts as killed. A
cancelled `Crew.run_once` ends all processes that run.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from sluice.concurrency.process import ending_text
from sluice.concurrency.waits import run_unless
from sluice.concurrency.watchdog import EXIT_STALLED
from sluice.launch.processes.child import KILLED_S, Child, ProcessHost
from sluice.launch.service_spec import ServiceSpec
from sluice.service_contract import RESTARTS_VARIABLE

logger = logging.getLogger(__name__)

LogLine = Callable[[str, str], None]
_LAST_LINES = 15
_LAST_OUTPUT_S = 2.0
_COMPANIONS_S = 3.0
# Sent by people and schedulers to end a process, not by faults.
REQUESTS = (-signal.SIGTERM, -signal.SIGINT)


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How one process ended. `was_asked`: after the crew had sent it a signal."""

    spec: ServiceSpec
    code: int
    was_asked: bool


@dataclass(frozen=True, slots=True)
class CrewEnd:
    """All exits of one run of a crew, in order; `survivors`: members that SIGKILL did not end."""

    exits: tuple[ProcessExit, ...]
    survivors: tuple[str, ...] = ()

    @property
    def cause(self) -> ProcessExit:
        """The exit that the others followed from.

        A rank that loses another one may notice it and fail before the lost one's exit is seen, so
        a process that a signal ended comes before one that reported an error.
        """
        unasked = [ended for ended in self.exits if not ended.was_asked] or list(self.exits)
        done = [ended for ended in unasked if ended.spec.ends_run and ended.code == 0]
        killed = [ended for ended in unasked if ended.code < 0 or ended.code == EXIT_STALLED]
        failed = [ended for ended in unasked if ended.code != 0]
        return (done or killed or failed or unasked)[0]


class Crew:
    """Runs its processes, once at a time.

    Args:
        specs: in the order of start; the first one's crew is the name.
        log_dir: every process's output is appended to `<log_dir>/<name>.log`.
        on_line: called with each line and the process's name.
        grace_s: seconds between SIGTERM and SIGKILL.
        host: starts the processes.

    Attributes:
        restarts: number of restarts since the crew last ran for long.
        began_s: when its last start ended or failed, by the monotonic clock: it lives from then.
        released: set once it must not be started again.
        is_dismissed: whether it is leaving while the run is active.
    """

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        log_dir: Path,
        on_line: LogLine,
        grace_s: float,
        host: ProcessHost,
    ) -> None:
        self.specs = tuple(specs)
        self.restarts = 0
        self.began_s = time.monotonic()
        self.released = asyncio.Event()
        self.is_dismissed = False
        self._log_dir = log_dir
        self._on_line = on_line
        self._grace_s = grace_s
        self._host = host
        self._starts = 0
        self._running: dict[str, Child] = {}
        self._asked: set[str] = set()
        self._given_up = asyncio.Event()
        self._last_lines = {spec.name: deque[str](maxlen=_LAST_LINES) for spec in specs}

    @property
    def name(self) -> str:
        """The crew's name, for logs."""
        return self.specs[0].crew_name

    def pid_of(self, name: str) -> int | None:
        """Return the process id of a running member."""
        child = self._running.get(name)
        return None if child is None else child.pid

    async def run_once(self) -> CrewEnd:
        """Start all processes and return when all have ended.

        Raises:
            ConfigError: a program cannot be run.
        """
        exits: list[ProcessExit] = []
        one_has_ended = asyncio.Event()
        self._asked.clear()
        self._given_up = asyncio.Event()
        try:
            for spec in self.specs:
                try:
                    child = await run_unless(self.released, self._start(spec))
                except OSError as error:
                    logger.warning("%s cannot be started at present: %s", spec.name, error)
                    self._last_lines[spec.name].append(str(error))
                    # The code after which a policy restarts it, unlike an error of its own.
                    return CrewEnd((ProcessExit(spec, EXIT_STALLED, was_asked=False),))
                if child is None:
                    # Dismissed while it was being started, or waited for capacity.
                    return CrewEnd((ProcessExit(spec, -signal.SIGTERM, was_asked=True),))
            self._starts += 1
            if self.released.is_set():  # while the last one was
                self.kill()
            async with asyncio.TaskGroup() as tasks:
                watching = [
                    tasks.create_task(self._watch(spec, exits, one_has_ended), name=spec.name)
                    for spec in self.specs
                ]
                ending = tasks.create_task(self._end_rest(one_has_ended, exits), name="companions")
                await asyncio.wait(watching)
                ending.cancel()
            return CrewEnd(tuple(exits), tuple(self.names_running()))
        finally:
            await self._end_children()
            self._running.clear()

    def terminate(self) -> None:
        """Send SIGTERM to all running processes."""
        for name, child in self._running.items():
            if not child.has_ended:
                self._asked.add(name)
                child.terminate()

    def kill(self) -> None:
        """Send SIGKILL to all running processes and to all processes that they started."""
        self._asked.update(self.names_running())
        for child in self._running.values():
            child.kill()
        asyncio.get_running_loop().call_later(KILLED_S, self._given_up.set)

    def names_running(self) -> list[str]:
        """Return the names of running members."""
        return [name for name, child in self._running.items() if not child.has_ended]

    async def wait(self) -> None:
        """Return when all processes that run at the moment have ended."""
        for child in list(self._running.values()):
            await child.wait()

    def diagnosis(self, ended: ProcessExit, moment: str = "") -> str:
        """Return how a process ended, with its last lines."""
        again = f" after {self.restarts} restarts" if self.restarts else ""
        lines = "".join(f"\n  {line}" for line in self._last_lines[ended.spec.name])
        return (
            f"{ended.spec.name} ended with {ending_text(ended.code)}{again}{moment}"
            f"{':' if lines else ''}{lines}"
        )

    async def _start(self, spec: ServiceSpec) -> Child:
        starts = str(spec.starts_before + self._starts)
        environment: Mapping[str, str] = {**spec.environment, RESTARTS_VARIABLE: starts}
        try:
            child = await self._host.start(replace(spec, environment=environment))
        finally:
            self.began_s = time.monotonic()
        self._running[spec.name] = child
        return child

    async def _watch(
        self, spec: ServiceSpec, exits: list[ProcessExit], one_has_ended: asyncio.Event
    ) -> None:
        child = self._running[spec.name]
        async with asyncio.TaskGroup() as tasks:
            forwarding = tasks.create_task(self._forward(spec.name, child), name="output")
            code = await self._exit_code(child)
            exits.append(ProcessExit(spec, code, spec.name in self._asked))
            one_has_ended.set()
            child.kill()  # what it started and left behind
            await asyncio.wait([forwarding], timeout=_LAST_OUTPUT_S)
            forwarding.cancel()

    async def _exit_code(self, child: Child) -> int:
        code = await run_unless(self._given_up, child.wait())
        return -signal.SIGKILL if code is None else code

    async def _end_rest(self, one_has_ended: asyncio.Event, exits: Sequence[ProcessExit]) -> None:
        await one_has_ended.wait()
        # After an end in order the others are on their way out, after a failure they may hang.
        await asyncio.sleep(self._grace_s if exits[0].code == 0 else _COMPANIONS_S)
        self.terminate()
        await asyncio.sleep(self._grace_s)
        self.kill()

    async def _end_children(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name, child in self._running.items():
                tasks.create_task(child.end(self._grace_s), name=name)

    async def _forward(self, name: str, child: Child) -> None:
        with closing(_LogFile(self._log_dir / f"{name}.log")) as file:
            async for line in child.lines():
                file.append(line)
                self._last_lines[name].append(line)
                self._on_line(name, line)


class _LogFile:
    """A process's log. A disk that is full loses lines, and ends no process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._is_failing = False

    def append(self, line: str) -> None:
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            self._file.write(line.encode() + b"\n")
        except OSError as error:
            if not self._is_failing:
                logger.warning("%s: lines are lost until it can be written: %s", self._path, error)
            self._is_failing = True
        else:
            self._is_failing = False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
