"""Work in a thread that never keeps the process from ending, as one of `to_thread` does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


def in_daemon_thread(work: Callable[[], None], name: str) -> asyncio.Future[None]:
    """Begins work in a thread of its own.

    Args:
        name: of the thread.

    Returns:
        done when the work is; cancelling it lets the thread go on.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def report(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001 - it belongs to who waits
            error = raised
        try:
            loop.call_soon_threadsafe(report, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
