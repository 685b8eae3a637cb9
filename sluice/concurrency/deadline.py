"""Waits that end and say for whom they waited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sluice.concurrency.waits import waiting_for
from sluice.errors import DeadlineError


@asynccontextmanager
async def deadline(
    seconds: float, *, peer: str, phase: str, remedy: str = ""
) -> AsyncIterator[None]:
    """Ends the block after `seconds`; meanwhile it is among the process's waits (`waits`).

    Raises:
        DeadlineError: naming `peer` and `phase`.
    """
    try:
        async with asyncio.timeout(seconds) as scope:
            with waiting_for(peer, phase):
                yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineError(peer, phase, seconds, remedy) from error
