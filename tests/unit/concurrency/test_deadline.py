"""Waits that end and say for whom they waited."""

from __future__ import annotations

import asyncio

import pytest

from sluice.concurrency.waits import deadline
from sluice.errors import DeadlineError


async def test_a_wait_that_runs_out_names_peer_phase_seconds_and_remedy() -> None:
    with pytest.raises(DeadlineError) as caught:
        async with deadline(0.01, peer="fleet", phase="waiting for 2 replicas", remedy="start one"):
            await asyncio.Event().wait()
    assert str(caught.value) == (
        "fleet: no answer within 0.01 s while waiting for 2 replicas; start one"
    )


async def test_a_block_that_ends_in_time_is_left_alone() -> None:
    async with deadline(10, peer="a", phase="b"):
        await asyncio.sleep(0)


async def test_a_timeout_of_something_inside_is_not_taken_for_ours() -> None:
    with pytest.raises(TimeoutError, match="inner") as caught:
        async with deadline(10, peer="a", phase="b"):
            raise TimeoutError("inner")
    assert not isinstance(caught.value, DeadlineError)


async def test_cancellation_passes_through() -> None:
    async def wait() -> None:
        async with deadline(60, peer="a", phase="b"):
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()
