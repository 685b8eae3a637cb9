"""Reads a run's folder as it grows, beside the event loop, only while somebody looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sluice.dashboard.curve_points import curve_points
from sluice.dashboard.live_status import LiveAnswer
from sluice.dashboard.reading_thread import ReadingThread
from sluice.dashboard.run_overview import RunAtRest, overview, read_final_accounts
from sluice.dashboard.sample_browser import FoundGroup, Page, SampleBrowser
from sluice.dashboard.sample_files import SampleFolders
from sluice.dashboard.sample_index import Cursor, SampleFilter
from sluice.dashboard.staleness_counts import StalenessCounts
from sluice.dashboard.step_history import StepHistory

__all__ = ["RunRecordReader"]

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
        # Steps and samples apart: a long search holds up no curve, and questions that wait for
        # it hold no thread that others need.
        self._steps = ReadingThread("steps", self._read_steps)
        self._samples = ReadingThread("samples", self._read_samples)
        self._num_unread_samples = 0
        self._asked_s = clock()

    @property
    def is_behind(self) -> bool:
        """Whether files hold more than was read so far."""
        return self._steps.is_behind or self._samples.is_behind

    async def follow(self) -> None:
        """Reads until cancelled; nothing while nobody asks for anything."""
        async with asyncio.TaskGroup() as tasks:
            for reading in (self._steps, self._samples):
                tasks.create_task(self._follow(reading), name=f"run folder: {reading.name}")

    def close(self) -> None:
        """Ends the threads after what they do at the moment; questions that wait are cancelled."""
        self._steps.close()
        self._samples.close()

    async def _follow(self, reading: ReadingThread) -> None:
        while True:
            if self._clock() - self._asked_s < LOOKED_AT_S:
                await reading.resume_reading()
            await asyncio.sleep(0 if reading.is_behind else LOOK_EVERY_S)

    async def overview(self, live: LiveAnswer | None) -> dict[str, Any]:
        """The page's first lines."""
        return await self._asked(self._steps, lambda: self._overview(live))

    async def curves(self, most: int) -> dict[str, Any]:
        """Curves and composition in at most so many points, and the histogram of staleness."""
        return await self._asked(
            self._steps,
            lambda: {**curve_points(self._history, most), "staleness": self._staleness.bars()},
        )

    async def page(
        self, wanted: SampleFilter, text: str, after: Cursor | None, most: int
    ) -> tuple[Page, dict[str, int]]:
        """Some groups of the list, and how many there are by outcome."""
        return await self._asked(
            self._samples,
            lambda: (
                self._browser.page(wanted, text, after=after, most=most),
                self._browser.counts,
            ),
        )

    async def group(self, ordinal: int) -> FoundGroup | None:
        """One group; ``None``: it is not there."""
        return await self._asked(self._samples, lambda: self._browser.group(ordinal))

    async def _asked(self, reading: ReadingThread, question: Callable[[], _ResultT]) -> _ResultT:
        self._asked_s = self._clock()
        return await reading.ask(question)

    def _read_steps(self) -> bool:
        return self._history.read() | self._staleness.read()

    def _read_samples(self) -> bool:
        has_more = self._browser.read()
        self._num_unread_samples = self._browser.num_unread  # for the other thread
        return has_more

    def _overview(self, live: LiveAnswer | None) -> dict[str, Any]:
        accounts = read_final_accounts(self._run_dir)
        rest = RunAtRest(self._run_dir.absolute().name, self._total_steps, accounts)
        num_unread = self._history.num_unread + self._staleness.num_unread
        num_unread += self._num_unread_samples
        shown = overview(rest, self._history, live)
        return {**shown, "num_unread_lines": num_unread, "is_reading": self.is_behind}
