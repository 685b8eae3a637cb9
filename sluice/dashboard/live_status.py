"""The present state of a run, asked of its services only while somebody looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from sluice.client.launcher import LaunchedProcess
from sluice.client.run_address import RunLocation, locate_run
from sluice.client.run_monitor import RunMonitor, RunSnapshot
from sluice.client.wait_chain import explain_run
from sluice.concurrency.waits import deadline
from sluice.errors import ConfigError, SluiceError
from sluice.launch.servicer import have_all_left, launched_processes
from sluice.service_contract import CONFIG_NAME

ASK_EVERY_S = 1.0
SURVEY_EVERY_S = 4.0
ANSWER_WITHIN_S = 3.0


@dataclass(frozen=True, slots=True)
class WaitCause:
    """The service that the run waits for.

    Attributes:
        cause: the explanation in one sentence.
        root: the service; ``None`` if no service waits for another.
        seconds: the longest wait of a service for another; 0 without one.
    """

    cause: str
    root: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class LiveAnswer:
    """The state of a run that has at least one process.

    Attributes:
        run: the snapshot of `sluice status`; ``None``: the trainer does not answer.
        wait: the explanation of `sluice status --why`, a few seconds old at most; ``None`` before
            the first.
        processes: those of the launcher on this machine; empty: it does not answer this user.
    """

    run: RunSnapshot | None
    wait: WaitCause | None
    processes: tuple[LaunchedProcess, ...] = ()


class LiveStatus:
    """The state of a run from its services; all browsers share the answers.

    Args:
        run_dir: the run's folder.
        clock: seconds, monotonic.
        answer_within_s: the longest wait for the trainer.
    """

    def __init__(
        self,
        run_dir: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        answer_within_s: float = ANSWER_WITHIN_S,
    ) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._answer_within_s = answer_within_s
        self._turn = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._location: RunLocation | None = None
        self._monitor: RunMonitor | None = None
        self._config_stamp: int | None = None
        self._answer: LiveAnswer | None = None
        self._wait: WaitCause | None = None
        self._asked_s = self._surveyed_s = float("-inf")

    async def ask(self) -> LiveAnswer | None:
        """Return the state, at most a second old; ``None``: no process of the run is there."""
        async with self._turn:
            now_s = self._clock()
            if now_s - self._asked_s >= ASK_EVERY_S:
                self._answer = await self._query()
                self._asked_s = self._clock()
            return self._answer

    async def close(self) -> None:
        """Close the channels."""
        await self._stack.aclose()

    async def _query(self) -> LiveAnswer | None:
        try:
            monitor, location = await self._connect()
        except (SluiceError, OSError):
            return None
        try:
            async with deadline(
                self._answer_within_s, peer="trainer", phase="asking for its status"
            ):
                if await have_all_left(self._run_dir):
                    return None
                run = await monitor.snapshot()
        except SluiceError:
            run = None
        if self._clock() - self._surveyed_s >= SURVEY_EVERY_S:
            self._wait = await self._survey(location)
            self._surveyed_s = self._clock()
        processes = await self._launched_processes()
        if run is None and self._wait is None and not processes:
            return None
        return LiveAnswer(run, self._wait, processes)

    async def _launched_processes(self) -> tuple[LaunchedProcess, ...]:
        try:
            async with deadline(
                self._answer_within_s, peer="launcher", phase="asking for its processes"
            ):
                return await launched_processes(self._run_dir) or ()
        except SluiceError:
            return ()

    async def _survey(self, location: RunLocation) -> WaitCause | None:
        try:
            explanation = await explain_run(location)
        except (SluiceError, OSError):
            explanation = None
        if explanation is None:
            return None
        longest = max(
            (w.seconds for service in explanation.services for w in service.waits), default=0.0
        )
        return WaitCause(explanation.cause, explanation.root, longest if explanation.root else 0.0)

    async def _connect(self) -> tuple[RunMonitor, RunLocation]:
        """Return the run's addresses with a client of them, looked up again after a restart.

        Raises:
            ConfigError, OSError: no run was started in the folder.
        """
        stamp = (self._run_dir / CONFIG_NAME).stat().st_mtime_ns
        if self._monitor is None or self._location is None or stamp != self._config_stamp:
            await self._stack.aclose()
            location = locate_run(self._run_dir)
            monitor = RunMonitor.of(location)
            self._monitor = await self._stack.enter_async_context(monitor)
            self._location = location
            self._config_stamp = stamp
        return self._monitor, self._location


def check_location(run_dir: Path) -> RunLocation:
    """Return the addresses of the run in a folder.

    Raises:
        ConfigError: no run was started there, or it is not a folder.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"run: {run_dir} is not a folder; give the folder of a started run")
    return locate_run(run_dir)
