"""Reads a run's folder as it grows, beside the event loop, only while somebody looks."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sluice.dashboard.curve_points import curve_points
from sluice.dashboard.live_status import LiveAnswer
from sluice.dashboard.run_overview import RunAtRest, overview, read_final_accounts
from sluice.dashboard.sample_browser import FoundGroup, Page, SampleBrowser
from sluice.dashboard.sample_files import SampleFolders
from sluice.dashboard.sample_index import Cursor, SampleFilter
from sluice.dashboard.staleness_counts import StalenessCounts
from sluice.dashboard.step_history import StepHistory

__all__ = ["RunRecordReader"]

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
LOOKED_AT_S = 15.0
_ResultT = TypeVar("_ResultT")


class RunRecordReader:
    """What the page shows of the folder. Files are read in other threads, in bounded pieces.

    Args:
        run_dir: the run's folder.
        folders: where its samples are.
        total_steps: that the configuration asks for; ``None``: it depends on the data set.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        run_dir: Path,
        folders: SampleFolders,
        total_steps: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir, self._total_steps, self._clock = run_dir, total_steps, clock
        self._history, self._staleness = StepHistory(run_dir), StalenessCounts(run_dir)
        self._browser = SampleBrowser(folders)
        # Steps and samples apart: a long search holds up no curve.
        self._steps_lock, self._samples_lock = threading.Lock(), threading.Lock()
        self._asked_s = clock()
        self._is_broken = False
        self.is_behind = True

    async def follow(self) -> None:
        """Reads until cancelled; nothing while nobody asks for anything."""
        while True:
            if self._clock() - self._asked_s < LOOKED_AT_S:
                self.is_behind = await asyncio.to_thread(self._read)
            await asyncio.sleep(0 if self.is_behind else LOOK_EVERY_S)

    async def overview(self, live: LiveAnswer | None) -> dict[str, Any]:
        """The page's first lines."""
        return await self._steps(lambda: self._overview(live))

    async def curves(self, most: int) -> dict[str, Any]:
        """Curves and composition in at most so many points, and the histogram of staleness."""
        return await self._steps(
            lambda: {**curve_points(self._history, most), "staleness": self._staleness.bars()}
        )

    async def page(
        self, wanted: SampleFilter, text: str, after: Cursor | None, most: int
    ) -> tuple[Page, dict[str, int]]:
        """Some groups of the list, and how many there are by outcome."""
        return await self._samples(
            lambda: (self._browser.page(wanted, text, after=after, most=most), self._browser.counts)
        )

    async def group(self, ordinal: int) -> FoundGroup | None:
        """One group; ``None``: it is not there."""
        return await self._samples(lambda: self._browser.group(ordinal))

    async def _steps(self, question: Callable[[], _ResultT]) -> _ResultT:
        return await self._asked(question, self._steps_lock)

    async def _samples(self, question: Callable[[], _ResultT]) -> _ResultT:
        return await self._asked(question, self._samples_lock)

    async def _asked(self, question: Callable[[], _ResultT], lock: threading.Lock) -> _ResultT:
        self._asked_s = self._clock()

        def answer() -> _ResultT:
            with lock:
                return question()

        return await asyncio.to_thread(answer)

    def _overview(self, live: LiveAnswer | None) -> dict[str, Any]:
        accounts = read_final_accounts(self._run_dir)
        rest = RunAtRest(self._run_dir.absolute().name, self._total_steps, accounts)
        return {**overview(rest, self._history, live), "is_reading": self.is_behind}

    def _read(self) -> bool:
        """Takes in a piece of every file; whether there is more at once."""
        try:
            with self._steps_lock:
                has_more = self._history.read() | self._staleness.read()
            with self._samples_lock:
                has_more |= self._browser.read()
        except OSError as error:
            if not self._is_broken:
                logger.warning("the run's folder cannot be read: %s", error)
            self._is_broken = True
            return False
        self._is_broken = False
        return has_more
