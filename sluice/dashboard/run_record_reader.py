"""Read a run's folder as it grows, in a thread beside the event loop, only while somebody looks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sluice.dashboard.curves import curve_points
from sluice.dashboard.live_status import LiveAnswer
from sluice.dashboard.overview import RunAtRest, overview, read_final_accounts
from sluice.dashboard.sample_browser import Cursor, FoundGroup, Page, SampleBrowser, SampleFilter
from sluice.dashboard.sample_files import SampleFolders
from sluice.dashboard.step_history import StalenessCounts, StepHistory

logger = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")


class ReadingThread:
    """One thread for all of it, so that what waits for it holds no other.

    Args:
        name: of what is read.
        read: takes in a piece; whether there is more at once.

    Attributes:
        is_behind: whether the last piece left more to read.
    """

    def __init__(self, name: str, read: Callable[[], bool]) -> None:
        self.name, self._read = name, read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._is_broken = False
        self.is_behind = True

    async def ask(self, question: Callable[[], _ResultT]) -> _ResultT:
        """The answer, after all that was asked before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, question)

    async def resume_reading(self) -> None:
        """Reads a piece; what goes wrong is told once, and tried again the next time."""
        self.is_behind = await self.ask(self._piece)

    def close(self) -> None:
        """Ends the thread after what it does at the moment; questions that wait are cancelled."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _piece(self) -> bool:
        try:
            has_more = self._read()
        except OSError as error:
            self._note_broken("cannot be read", error)
            return False
        except Exception as error:  # noqa: BLE001 - it is logged, and must not end the page
            self._note_broken("is not understood, a defect of the page", error)
            return False
        self._is_broken = False
        return has_more

    def _note_broken(self, problem: str, error: Exception) -> None:
        if not self._is_broken:
            is_defect = not isinstance(error, OSError)
            logger.warning("%s of the run %s: %s", self.name, problem, error, exc_info=is_defect)
        self._is_broken = True


LOOK_EVERY_S = 1.0
LOOKED_AT_S = 15.0


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
