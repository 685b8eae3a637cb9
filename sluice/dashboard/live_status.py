"""What a run says of itself at the moment, asked no more often than somebody looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sluice.client.run_address import CONFIG_NAME, RunLocation, locate_run
from sluice.client.run_monitor import RunMonitor, RunSnapshot
from sluice.client.wait_survey import ServiceWaits, survey_waits
from sluice.concurrency.deadlines import deadline
from sluice.errors import ConfigError, SluiceError

ASK_EVERY_S = 1.0
SURVEY_EVERY_S = 4.0
ANSWER_WITHIN_S = 3.0
_NO_PROCESS = frozenset({"", "gone"})


class Explained(Protocol):
    """Why a run stands where it stands."""

    @property
    def cause(self) -> str:
        """One sentence."""
        ...

    @property
    def root(self) -> str | None:
        """The service behind it; none if nobody waits for any."""
        ...


Explain = Callable[[Sequence[ServiceWaits]], Explained]


@dataclass(frozen=True, slots=True)
class WaitCause:
    """Who is behind what the run waits for.

    Attributes:
        cause: in a sentence.
        root: the service; none if nobody waits for any.
        seconds: the longest wait of any service for another; 0 without any.
    """

    cause: str
    root: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class LiveAnswer:
    """The state of a run of which at least a process is there.

    Attributes:
        run: as `sluice status` has it; ``None``: the trainer does not answer.
        wait: as `sluice status --why` has it, some seconds old at most; ``None`` before the first.
    """

    run: RunSnapshot | None
    wait: WaitCause | None


class LiveStatus:
    """Asks the services of a run; answers are shared by all who look.

    Args:
        run_dir: the run's folder.
        explain: finds who is behind the waits of services.
        clock: seconds, monotonic.
        answer_within_s: how long the trainer is waited for.
    """

    def __init__(
        self,
        run_dir: Path,
        explain: Explain,
        clock: Callable[[], float] = time.monotonic,
        *,
        answer_within_s: float = ANSWER_WITHIN_S,
    ) -> None:
        self._run_dir, self._explain, self._clock = run_dir, explain, clock
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
        """The present state, or one of a moment ago; ``None``: nothing of the run is there."""
        async with self._turn:
            now_s = self._clock()
            if now_s - self._asked_s >= ASK_EVERY_S:
                self._answer = await self._fresh()
                self._asked_s = self._clock()
            return self._answer

    async def close(self) -> None:
        """Closes the channels."""
        await self._stack.aclose()

    async def _fresh(self) -> LiveAnswer | None:
        try:
            monitor, location = await self._connected()
        except (SluiceError, OSError):
            return None
        try:
            async with deadline(
                self._answer_within_s, peer="trainer", phase="asking for its status"
            ):
                run = await monitor.snapshot()
        except SluiceError:
            run = None
        if self._clock() - self._surveyed_s >= SURVEY_EVERY_S:
            self._wait = await self._survey(location)
            self._surveyed_s = self._clock()
        return None if run is None and self._wait is None else LiveAnswer(run, self._wait)

    async def _survey(self, location: RunLocation) -> WaitCause | None:
        config_file = location.run_dir / CONFIG_NAME
        try:
            services = await survey_waits(
                location.trainer,
                location.reward,
                location.run_dir,
                since_s=config_file.stat().st_mtime,
                credentials=location.credentials,
            )
        except (SluiceError, OSError):
            return None
        if all(service.failure and service.process in _NO_PROCESS for service in services):
            return None
        found = self._explain(services)
        longest = max((w.seconds for service in services for w in service.waits), default=0.0)
        return WaitCause(found.cause, found.root, longest if found.root else 0.0)

    async def _connected(self) -> tuple[RunMonitor, RunLocation]:
        """Where the run listens; looked up again when it is started anew.

        Raises:
            ConfigError, OSError: nothing was started in the folder.
        """
        stamp = (self._run_dir / CONFIG_NAME).stat().st_mtime_ns
        if self._monitor is None or self._location is None or stamp != self._config_stamp:
            await self._stack.aclose()
            location = locate_run(self._run_dir)
            monitor = RunMonitor(
                location.trainer, location.reward, credentials=location.credentials
            )
            self._monitor = await self._stack.enter_async_context(monitor)
            self._location, self._config_stamp = location, stamp
        return self._monitor, self._location


def check_location(run_dir: Path) -> RunLocation:
    """The run of a folder.

    Raises:
        ConfigError: nothing was started there, or it is no folder.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"run: {run_dir} is no folder; give the folder of a started run")
    return locate_run(run_dir)
