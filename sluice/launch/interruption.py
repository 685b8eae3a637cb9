"""Work that is given up once it is not wanted any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def done_unless(unwanted: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Does `work`, which is cancelled if `unwanted` is set first; whether it was done.

    Raises:
        Exception: whatever `work` raises.
    """
    errors: list[Exception] = []

    async def kept() -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 raised below, as itself and not in a group
            errors.append(error)

    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(kept(), name="work")
        waiting = tasks.create_task(unwanted.wait(), name="unwanted")
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        waiting.cancel()
    if errors:
        raise errors[0]
    return not working.cancelled()
