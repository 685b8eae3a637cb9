"""SIGTERM and SIGINT set one event, and only inside the block."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from sluice.concurrency.process import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_sets_the_event(number: signal.Signals) -> None:
    stop = asyncio.Event()
    with stop_on_signals(stop):
        os.kill(os.getpid(), number)
        async with asyncio.timeout(60):
            await stop.wait()


async def test_after_the_block_a_signal_acts_as_before() -> None:
    stop = asyncio.Event()
    with stop_on_signals(stop):
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not stop.is_set()
