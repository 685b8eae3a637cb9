"""Read a run's folder while it grows, outside the event loop, and only while somebody looks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sluice.dashboard.comparison import compare_validations
from sluice.dashboard.curves import curve_points
from sluice.dashboard.live_status import LiveAnswer
from sluice.dashboard.overview import RunAtRest, overview, read_final_accounts
from sluice.dashboard.sample_browser import Cursor, FoundGroup, Page, SampleBrowser, SampleFilter
from sluice.dashboard.sample_files import SampleFolders
from sluice.dashboard.step_history import StalenessCounts, StepHistory

logger = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")
LOOK_EVERY_S = 1.0
LOOKED_AT_S = 15.0


class ReadingThread:
    """A thread that reads some files in pieces and answers questions about them.

    Args:
        name: the name of the thread.
        read: reads a piece, and returns whether more is there already.

    Attributes:
        is_behind: whether the last piece left more to read.
    """

    def __init__(self, name: str, read: Callable[[], bool]) -> None:
        self.name = name
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._is_broken = False
        self.is_behind = True

    async def ask(self, question: Callable[[], _ResultT]) -> _ResultT:
        """Return the answer, after those to all earlier questions."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, question)

    async def resume_reading(self) -> None:
        """Read a piece. A failure is logged once; the next call tries again."""
        self.is_behind = await self.ask(self._piece)

    def close(self) -> None:
        """End the thread after its present work, and cancel the waiting questions."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _piece(self) -> bool:
        try:
            has_more = self._read()
        except OSError as error:
            self._note_broken("cannot be read", error)
            return False
        except Exception as error:  # noqa: BLE001 - logged; it must not end the page
            self._note_broken("cannot be understood, a defect of the page", error)
            return False
        self._is_broken = False
        return has_more

    def _note_broken(self, problem: str, error: Exception) -> None:
        if not self._is_broken:
            is_defect = not isinstance(error, OSError)
            logger.warning("%s of the run %s: %s", self.name, problem, error, exc_info=is_defect)
        self._is_broken = True


class RunRecordReader:
    """The data of the page from a run's folder, read by other threads in bounded pieces.

    Args:
        run_dir: the run's folder.
        folders: the folders with its samples.
        total_steps: steps that the configuration asks for; ``None``: it depends on the data set.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        run_dir: Path,
        folders: SampleFolders,
        total_steps: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._clock = clock
        self._history = StepHistory(run_dir)
        self._staleness = StalenessCounts(run_dir)
        self._browser = SampleBrowser(folders)
        # Two threads, so that a long search in the samples delays no curve.
        self._steps = ReadingThread("steps", self._read_steps)
        self._samples = ReadingThread("samples", self._read_samples)
        self._num_unread_samples = 0
        self._asked_s = clock()

    @property
    def is_behind(self) -> bool:
        """Whether files hold more than the threads have read so far."""
        return self._steps.is_behind or self._samples.is_behind

    async def follow(self) -> None:
        """Read until cancelled, but only while somebody asks for data."""
        async with asyncio.TaskGroup() as tasks:
            for reading in (self._steps, self._samples):
                tasks.create_task(self._follow(reading), name=f"run folder: {reading.name}")

    def close(self) -> None:
        """End the threads after their present work, and cancel the waiting questions."""
        self._steps.close()
        self._samples.close()

    async def _follow(self, reading: ReadingThread) -> None:
        while True:
            if self._clock() - self._asked_s < LOOKED_AT_S:
                await reading.resume_reading()
            await asyncio.sleep(0 if reading.is_behind else LOOK_EVERY_S)

    async def overview(self, live: LiveAnswer | None) -> dict[str, Any]:
        """Return the page's first lines."""
        return await self._asked(self._steps, lambda: self._overview(live))

    async def curves(self, most: int) -> dict[str, Any]:
        """Return curves and composition in at most `most` points, and the staleness counts."""
        return await self._asked(
            self._steps,
            lambda: {**curve_points(self._history, most), "staleness": self._staleness.bars()},
        )

    async def comparison(self) -> dict[str, Any]:
        """Return responses of the first and of the last validation to the same problems."""
        return await self._asked(
            self._steps,
            lambda: compare_validations(self._run_dir, self._history.validated_steps()),
        )

    async def page(
        self, wanted: SampleFilter, text: str, after: Cursor | None, most: int
    ) -> tuple[Page, dict[str, int]]:
        """Return some groups of the list, and the number of all groups by outcome."""
        return await self._asked(
            self._samples,
            lambda: (
                self._browser.page(wanted, text, after=after, most=most),
                self._browser.counts,
            ),
        )

    async def group(self, ordinal: int) -> FoundGroup | None:
        """Return one group; ``None``: it is not there."""
        return await self._asked(self._samples, lambda: self._browser.group(ordinal))

    async def _asked(self, reading: ReadingThread, question: Callable[[], _ResultT]) -> _ResultT:
        self._asked_s = self._clock()
        return await reading.ask(question)

    def _read_steps(self) -> bool:
        return self._history.read() | self._staleness.read()

    def _read_samples(self) -> bool:
        has_more = self._browser.read()
        self._num_unread_samples = self._browser.num_unread  # read by the other thread
        return has_more

    def _overview(self, live: LiveAnswer | None) -> dict[str, Any]:
        accounts = read_final_accounts(self._run_dir)
        rest = RunAtRest(self._run_dir.absolute().name, self._total_steps, accounts)
        num_unread = self._history.num_unread + self._staleness.num_unread
        num_unread += self._num_unread_samples
        shown = overview(rest, self._history, live)
        return {**shown, "num_unread_lines": num_unread, "is_reading": self.is_behind}
