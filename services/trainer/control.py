"""Long waits of the loop that control calls (Stop, Pause, SaveCheckpoint) do not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from services.trainer.run_state import RunPhase, RunState

ResultT = TypeVar("ResultT")


async def under_control(
    work: Coroutine[None, None, ResultT],
    state: RunState,
    phase: RunPhase,
    *,
    gives_way: Callable[[], bool],
    save: Callable[[], Awaitable[None]],
) -> ResultT | None:
    """Waits for `work` and obeys control calls meanwhile.

    Args:
        work: what is waited for; cancelled when `gives_way` becomes true before its end.
        state: where control calls arrive.
        phase: what the run does while it waits.
        gives_way: whether a control call ends the wait.
        save: saves a checkpoint and answers who asked for it; `work` goes on meanwhile.

    Returns:
        what `work` returned, or None if it had to give way.

    Raises:
        ExceptionGroup: with the error of `work`.
    """
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work, name=str(phase))
        task.add_done_callback(lambda _: state.wake())
        while not task.done():
            if gives_way():
                task.cancel()
                break
            if state.is_save_wanted:
                await save()
                continue
            state.enter(phase)
            await state.control_call()
    return None if task.cancelled() else task.result()
