"""`sluice agents run` beside a run that leases its samples, kept running as a supervisor would."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from pathlib import Path

from sluice.client.launcher import LaunchedProcess
from tools.chaos.faults import Injector
from tools.chaos.observation import Observer
from tools.commands import started
from tools.launched_run import SLUICE

NAME = "agents"
_AGENT = Path(__file__).with_name("jar_agent.py")
_PARALLEL, _PAUSE_S, _END_S, _LOOK_S = 8, 0.5, 20.0, 0.5


class Front:
    """The process, which has the front of its agents.

    Args:
        injector: of the run's faults; it kills this process, too.
        folder: gets ``agents.log``.
    """

    def __init__(self, injector: Injector, folder: Path) -> None:
        self._injector, self._log = injector, folder / f"{NAME}.log"
        self._may_run = asyncio.Event()
        self._may_run.set()

    async def keep(self) -> None:
        """Start it whenever it has ended, until cancelled."""
        # Without `site` an agent starts in half the time.
        agent = shlex.join((sys.executable, "-S", str(_AGENT)))
        run_dir = str(self._injector.run.run_dir)
        options = ("--command", agent, "--parallel", str(_PARALLEL))
        while True:
            await self._may_run.wait()
            command = (*SLUICE, "agents", "run", run_dir, *options)
            with started(command, self._log, ends_within_s=_END_S) as process:
                self._injector.front = LaunchedProcess(NAME, process.pid, 0, is_draining=False)
                try:
                    await asyncio.to_thread(process.wait)
                finally:
                    self._injector.front = None
            await asyncio.sleep(_PAUSE_S)

    async def leases_left(self, observer: Observer, within_s: float) -> int | None:
        """Kill it; return how many leases the reward service still counts after so many seconds,
        None if it never answered meanwhile."""
        self._may_run.clear()
        if self._injector.front is not None:
            os.kill(self._injector.front.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        try:
            while time.monotonic() < killed_s + within_s:
                await asyncio.sleep(_LOOK_S)
                seen_s, count = observer.leases
                if count == 0 and seen_s > killed_s + 2 * _LOOK_S:
                    return 0
            seen_s, count = observer.leases
            return count if seen_s > killed_s + 2 * _LOOK_S else None
        finally:
            self._may_run.set()
