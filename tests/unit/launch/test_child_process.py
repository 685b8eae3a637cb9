"""A started process, and what is left of one that was not started after all."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from sluice.errors import ConfigError
from sluice.launch.child_process import start_child
from sluice.launch.service_spec import ServiceSpec
from tests.support.scripted_children import WAIT_S


def pipes() -> set[tuple[str, str]]:
    """Ends of pipes that this process has open, by descriptor and pipe."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith("pipe:"):
            found.add((name, target))
    return found


async def until_no_more_than(before: set[tuple[str, str]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while pipes() - before:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
async def test_a_start_that_is_given_up_at_any_step_leaves_no_pipe_open(steps: int) -> None:
    before = pipes()
    spec = ServiceSpec("rollout-0", (sys.executable, "-c", "import time; time.sleep(600)"))
    async with asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(start_child(spec))
        for _ in range(steps):
            await asyncio.sleep(0)
        assert not starting.done()
        starting.cancel()
    assert starting.cancelled()
    await until_no_more_than(before)


async def test_a_program_that_is_not_there_leaves_no_pipe_open() -> None:
    before = pipes()
    with pytest.raises(ConfigError, match="/no/such/program cannot be started"):
        await start_child(ServiceSpec("reward", ("/no/such/program",)))
    await until_no_more_than(before)
