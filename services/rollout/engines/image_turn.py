"""Images are decoded for one prompt at a time: the memory they take is that of one prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from sluice.concurrency.waits import waiting_for

__all__ = ["ImageTurn"]

ResultT = TypeVar("ResultT")


class ImageTurn:
    """Whose images are decoded; of one event loop.

    Attributes:
        samples: of the prompts whose images are being decoded, or wait for it.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._turn = asyncio.Semaphore(1)

    async def read(self, samples: int, decode: Callable[[], ResultT]) -> ResultT:
        """What `decode` returns, from a thread, as soon as no other one runs.

        A caller that goes away gives its turn up when its thread has ended, which nothing can end
        earlier: callers that come and go never have two decoders at work.

        Args:
            samples: that wait for it.
            decode: called in a thread, while neither event loop nor step loop waits.
        """
        self.samples += samples
        try:
            with waiting_for("image decoder", "decoding a prompt's images"):
                await self._turn.acquire()
                decoding = asyncio.get_running_loop().run_in_executor(None, decode)
                decoding.add_done_callback(self._has_ended)
                return await asyncio.shield(decoding)
        finally:
            self.samples -= samples

    def _has_ended(self, decoding: asyncio.Future[ResultT]) -> None:
        self._turn.release()
        if not decoding.cancelled():
            decoding.exception()  # of a caller that went away: nobody else asks for it
