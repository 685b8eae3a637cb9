"""SIGTERM, SIGINT and the end of the terminal set one event, and only inside the block."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from sluice.concurrency.process import stop_on_signals
from tests.support.scripted_environment import eventually


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
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


async def test_the_end_of_a_terminal_is_one_ctrl_c_however_often_it_is_signalled() -> None:
    interrupts: list[None] = []
    with stop_on_signals(asyncio.Event(), interrupt=lambda: interrupts.append(None)):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
        await eventually(lambda: bool(interrupts))
        await asyncio.sleep(0)
    assert len(interrupts) == 1


async def test_nohup_keeps_a_run_beyond_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals(stop := asyncio.Event()):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
            assert not stop.is_set()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
