"""Supervise the processes of a run: ordered start, logs, restarts, ordered end.

A crew that may restart is started again after a growing pause, until it has failed too often in a
row (a crash loop). Any other failure ends the run, with the last lines of that process; a needed
process that leaves early is a failure, whatever its exit code. The first SIGINT lets the run save
and end; the next one, or SIGTERM, ends it at once. At the end all crews get SIGTERM in reverse
order of start, and after the grace period SIGKILL. The exit code is 0 only if the run
reached its end and nothing failed or had to be killed. An interrupted run did not fail because a
process, such as a trainer in a long step, had to be killed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.concurrency.process import EXIT_MISSING_PACKAGE, ending_text, stop_on_signals
from sluice.concurrency.waits import ends_within, run_unless
from sluice.concurrency.watchdog import EXIT_STALLED
from sluice.errors import ConfigError, NotFoundError, NotReadyError
from sluice.launch.processes.child import ProcessHost, ThisMachine
from sluice.launch.processes.crew import REQUESTS, Crew, CrewEnd, LogLine
from sluice.launch.service_spec import ServiceSpec

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_FIRST_PAUSE_S = 0.5  # least time between two starts; it doubles with each restart


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended. `failures` holds one text per failed process, with its last lines."""

    exit_code: int
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServiceState:
    """A process of the run. `pid` is None while it waits for a restart."""

    name: str
    pid: int | None
    restarts: int
    is_draining: bool
    max_restarts: int = 0


class Supervisor:
    """Starts, watches and ends processes.

    Args:
        specs: in the order of start.
        log_dir: every process's output goes to `<log_dir>/<name>.log`.
        on_line: called with each line and the process's name.
        grace_s: seconds between SIGTERM and SIGKILL.
        host: starts the processes; by default on this machine.
        save: asks the run to save and end, at the first SIGINT; returns false if it cannot. A
            second signal ends everything at once; with ``None`` the first one does.
        on_dismissed: takes the name of each process that was dismissed, once it has ended, even if
            it had to be killed and could leave nothing in order.
    """

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        log_dir: Path,
        on_line: LogLine,
        grace_s: float,
        host: ProcessHost | None = None,
        on_dismissed: Callable[[str], None] | None = None,
        save: Callable[[], Coroutine[Any, Any, bool]] | None = None,
    ) -> None:
        self._on_dismissed = on_dismissed
        self._save = save
        self._log_dir = log_dir
        self._on_line = on_line
        self._grace_s = grace_s
        self._host: ProcessHost = host or ThisMachine()
        members: dict[str, list[ServiceSpec]] = {}
        for spec in specs:
            members.setdefault(spec.crew_name, []).append(spec)
        self._crews = [self._crew(crew_specs) for crew_specs in members.values()]
        self._tasks: asyncio.TaskGroup | None = None
        self._over = asyncio.Event()
        self._interrupted = asyncio.Event()
        self._ends_at_once = asyncio.Event()
        self._failures: list[str] = []
        self._ending = False

    def _crew(self, specs: Sequence[ServiceSpec]) -> Crew:
        return Crew(specs, self._log_dir, self._on_line, self._grace_s, self._host)

    async def run(self) -> RunEnd:
        """Run until the run is over; every process has ended when this returns or raises."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with stop_on_signals(self._ends_at_once, interrupt=self._interrupt):
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                interruption = tasks.create_task(self._end_on_signal(), name="signals")
                for crew in self._crews:
                    tasks.create_task(self._keep_running(crew), name=crew.name)
                await self._over.wait()
                await self._end_all()
                interruption.cancel()
        return RunEnd(self._exit_code(), tuple(self._failures))

    def end(self) -> None:
        """End all processes in order, as SIGTERM would."""
        self._ends_at_once.set()

    def _interrupt(self) -> None:
        if self._save is None or self._interrupted.is_set():
            self._ends_at_once.set()
        self._interrupted.set()

    def pid_of(self, name: str) -> int | None:
        """Return the process id of a running service."""
        pids = (pid for crew in self._crews if (pid := crew.pid_of(name)) is not None)
        return next(pids, None)

    def services(self) -> tuple[ServiceState, ...]:
        """Return all processes that run or wait for their restart, in the order of start."""
        return tuple(
            ServiceState(
                spec.name,
                crew.pid_of(spec.name),
                crew.restarts,
                crew.is_dismissed,
                spec.restarts.max_restarts,
            )
            for crew in self._crews
            for spec in crew.specs
        )

    def add(self, spec: ServiceSpec) -> None:
        """Start one more process.

        Raises:
            NotReadyError: the run has not begun or is over.
        """
        if self._tasks is None or self._ending or self._over.is_set():
            raise NotReadyError(f"{spec.name}: the run is starting or ending; nothing is started")
        crew = self._crew((spec,))
        self._crews.append(crew)
        self._tasks.create_task(self._keep_running(crew), name=crew.name)
        logger.info("%s is started", spec.name)

    def dismiss(self, name: str) -> None:
        """Let a process leave in order, permanently; kill it after the grace period.

        Raises:
            NotFoundError: no process has that name.
            NotReadyError: the run has not begun or is over.
        """
        crew = next((crew for crew in self._crews if crew.name == name), None)
        if crew is None:
            raise NotFoundError(f"{name}: no process of this run has that name")
        if self._tasks is None or self._ending or self._over.is_set():
            raise NotReadyError(f"{name}: the run is starting or ending; no process is dismissed")
        logger.info("%s is leaving: it gets SIGTERM", name)
        crew.is_dismissed = True
        crew.released.set()
        crew.terminate()
        self._tasks.create_task(self._kill_late(crew), name=f"{name} leaves")

    async def _kill_late(self, crew: Crew) -> None:
        try:
            async with asyncio.timeout(self._grace_s):
                await crew.wait()
        except TimeoutError:
            logger.warning("%s did not leave within %g s: killed", crew.name, self._grace_s)
            crew.kill()

    async def _end_on_signal(self) -> None:
        await run_unless(self._ends_at_once, self._interrupted.wait())
        if self._save is not None and not self._ends_at_once.is_set():
            logger.info(
                "interrupted: the run ends after the present step and saves; "
                "press Ctrl-C again to end it at once"
            )
            if not await run_unless(self._ends_at_once, self._save()):
                self._ends_at_once.set()
        await self._ends_at_once.wait()
        self._interrupted.set()
        logger.info("ending all services in order")
        self._over.set()

    async def _keep_running(self, crew: Crew) -> None:
        await self._run_with_restarts(crew)
        for spec in crew.specs:
            self._host.release(spec.name)
            if crew.is_dismissed and self._on_dismissed is not None:
                self._on_dismissed(spec.name)

    async def _run_with_restarts(self, crew: Crew) -> None:
        """Run one crew as often as its policy allows."""
        while True:
            try:
                end = await crew.run_once()
            except ConfigError as error:
                self._fail(str(error))
                return
            if self._ending:
                self._note_last_exits(crew, end)
                return
            if crew.is_dismissed or end.cause.code == 0 or _was_asked_to_leave(end):
                self._handle_end(crew, end)
                return
            lived_s = time.monotonic() - crew.began_s
            if lived_s > end.cause.spec.restarts.stable_s:
                crew.restarts = 0
            if not await self._may_restart(crew, end, lived_s):
                return

    def _handle_end(self, crew: Crew, end: CrewEnd) -> None:
        spec, code = end.cause.spec, end.cause.code
        if spec.ends_run and code == 0:
            self._note_last_exits(crew, end)
            self._over.set()
        elif spec.is_needed:
            moment = " in the middle of the run" if code == 0 else ""
            self._fail(crew.diagnosis(end.cause, moment))
        else:  # dismissed, or ended by an operator: fewer replicas are no failure
            logger.info("%s has ended", crew.name)
            self._crews.remove(crew)

    def _note_last_exits(self, crew: Crew, end: CrewEnd) -> None:
        """Record exits after our signals; SIGTERM may come before a process can handle it."""
        self._failures.extend(
            crew.diagnosis(ended)
            for ended in end.exits
            if ended.code not in (0, -signal.SIGTERM, -signal.SIGKILL)
        )

    async def _may_restart(self, crew: Crew, end: CrewEnd, lived_s: float) -> bool:
        spec, code = end.cause.spec, end.cause.code
        if self._interrupted.is_set() and spec.ends_run:  # a new one would not know of the end
            self._fail(crew.diagnosis(end.cause))
            return False
        if end.survivors:
            names = ", ".join(end.survivors)
            self._fail(f"{names}: not ended by SIGKILL; nothing is started beside what it holds")
            return False
        # A process that its watchdog ended was stuck; it refused nothing.
        is_error = code > 0 and code != EXIT_STALLED
        is_refusal = (is_error and not spec.restarts.retries_errors) or code == EXIT_MISSING_PACKAGE
        if is_refusal or crew.restarts >= spec.restarts.max_restarts:
            self._fail(crew.diagnosis(end.cause))
            return False
        pause_s = max(0.0, _FIRST_PAUSE_S * 2**crew.restarts - lived_s)
        crew.restarts += 1
        name = spec.name if len(crew.specs) == 1 else f"{spec.name}, with all of {crew.name},"
        delay = f"in {pause_s:.1f} s" if pause_s else "at once"
        logger.warning("%s ended with %s; starting again %s", name, ending_text(code), delay)
        if not await ends_within(pause_s, crew.released.wait()):
            return True
        if crew.is_dismissed:
            self._crews.remove(crew)
        return False

    def _fail(self, diagnosis: str) -> None:
        self._failures.append(diagnosis)
        self._over.set()

    async def _end_all(self) -> None:
        """End every process, with SIGTERM in reverse order of start."""
        self._ending = True
        crews = list(reversed(self._crews))
        for crew in crews:
            crew.released.set()
            crew.terminate()
        try:
            async with asyncio.timeout(self._grace_s):
                for crew in crews:
                    await crew.wait()
        except TimeoutError:
            for crew in crews:
                for name in crew.names_running():
                    late = f"{name} did not end within {self._grace_s:g} s and was killed"
                    if self._interrupted.is_set():
                        logger.warning("%s", late)
                    else:
                        self._failures.append(late)
                crew.kill()

    def _exit_code(self) -> int:
        if self._failures:
            return EXIT_FAILED
        return EXIT_INTERRUPTED if self._interrupted.is_set() else 0


def _was_asked_to_leave(end: CrewEnd) -> bool:
    """Return whether another process sent the signal that ended this one."""
    return end.cause.code in REQUESTS and not end.cause.was_asked
