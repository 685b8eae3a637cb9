"""SIGTERM, SIGINT and the end of the terminal set one event, and only inside the block."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.concurrency.process import stop_on_signals
from tests.support.scripted_environment import eventually


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what `nohup make test` sets, and keep the output of the tests."""
    monkeypatch.setattr("sluice.concurrency.process._detach_output", lambda: None)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


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
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_on_signals(asyncio.Event()):
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


async def test_a_terminal_that_closes_after_ctrl_c_asks_for_nothing_more() -> None:
    interrupts: list[None] = []
    with stop_on_signals(asyncio.Event(), interrupt=lambda: interrupts.append(None)):
        os.kill(os.getpid(), signal.SIGINT)
        await eventually(lambda: bool(interrupts))
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
    assert len(interrupts) == 1


_PRINTS_AFTER_ITS_TERMINAL = """
import asyncio, os, sys
from pathlib import Path
from sluice.concurrency.process import stop_on_signals

async def main():
    stop = asyncio.Event()
    with stop_on_signals(stop):
        print("ready", flush=True)
        await stop.wait()
    print("saved", flush=True)
    print("saved", file=sys.stderr, flush=True)
    Path(sys.argv[1]).write_text("ended in order")

os.login_tty(int(sys.argv[2]))
asyncio.run(main())
"""


def test_a_process_can_end_in_order_after_its_terminal_has_closed(tmp_path: Path) -> None:
    ours, its = os.openpty()
    command = [sys.executable, "-c", _PRINTS_AFTER_ITS_TERMINAL, str(tmp_path / "end"), str(its)]
    process = subprocess.Popen(command, pass_fds=[its])
    try:
        os.close(its)
        said = b""
        while not said.endswith(b"\n"):
            said += os.read(ours, 100)
        os.close(ours)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "end").read_text(encoding="utf-8") == "ended in order"
