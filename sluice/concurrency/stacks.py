"""Where every thread and every task of this process stands."""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import Iterator
from typing import TextIO

_MOST_TASKS = 500


def write_stacks(file: TextIO, loop: asyncio.AbstractEventLoop | None) -> None:
    """Writes them; callable from any thread, while the loop runs or hangs.

    Args:
        file: one with a file descriptor.
        loop: whose tasks; ``None``: only threads.
    """
    file.write("threads:\n")
    file.flush()
    faulthandler.dump_traceback(file, all_threads=True)
    if loop is None:
        return
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    file.write(f"{len(tasks)} tasks:\n")
    for task in tasks[:_MOST_TASKS]:
        file.write(f"  {task.get_name()}\n")
        for line in _frames(task.get_coro()):
            file.write(f"    {line}\n")
    file.flush()


def _frames(waiting: object) -> Iterator[str]:
    """From the task's coroutine down to what it awaits in the end."""
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is not None:
            code = frame.f_code
            yield f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
