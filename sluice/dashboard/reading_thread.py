"""Files that grow, read by a thread that also answers questions about them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["ReadingThread"]

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
