"""A process on another node, whose host may be away for a while or permanently."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from sluice.errors import PeerError
from sluice.launch.cluster import placed_services
from sluice.launch.cluster.placed_services import RemoteChild
from sluice.launch.cluster.placement import HostLostError
from tests.support.scripted_children import WAIT_S

PID = 77


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_services, "_RETRY_S", 0.01)
    # A machine that is busy for a while is no silent host.
    monkeypatch.setattr(placed_services, "_SILENCE_S", 10 * WAIT_S)


@pytest.fixture
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_services, "_SILENCE_S", 0.1)


class ScriptedHost:
    """Answers what the test says, one answer after the other, and the last one again."""

    def __init__(self, *answers: object) -> None:
        self._answers: Iterator[object] = iter(answers)
        self._last: object = None
        self.calls: list[str] = []

    async def call(self, method: str, /, *arguments: object) -> Any:
        self.calls.append(method)
        self._last = next(self._answers, self._last)
        if isinstance(self._last, Exception):
            raise self._last
        if isinstance(self._last, asyncio.Event):
            await self._last.wait()
            return 0
        return self._last

    def send(self, method: str, /, *arguments: object) -> None:
        self.calls.append(method)


AWAY = PeerError("host", "in a call", "connection reset")
GONE = HostLostError("host", "in a call", "it is dead")


async def code_of(*answers: object) -> int:
    async with asyncio.timeout(WAIT_S):
        return await RemoteChild("rollout-0", PID, ScriptedHost(*answers)).wait()


async def test_a_host_that_was_away_for_a_moment_tells_the_exit_code() -> None:
    assert await code_of(AWAY, AWAY, 3) == 3


async def test_a_process_whose_host_is_dead_was_killed() -> None:
    assert await code_of(GONE) == -signal.SIGKILL


@pytest.mark.usefixtures("_short_silence")
async def test_a_process_whose_host_is_silent_for_long_was_killed() -> None:
    assert await code_of(AWAY) == -signal.SIGKILL


async def lines_of(child: RemoteChild) -> list[str]:
    async with asyncio.timeout(WAIT_S):
        return [line async for line in child.lines()]


async def test_output_ends_with_its_host_and_what_came_before_is_reported() -> None:
    child = RemoteChild("rollout-0", PID, ScriptedHost((["a", "b"], False), (["c"], False), GONE))
    assert await lines_of(child) == ["a", "b", "c"]


async def test_output_continues_after_a_host_was_away_so_that_nobody_blocks_in_a_line() -> None:
    host = ScriptedHost((["a"], False), AWAY, AWAY, (["b"], False), (["c"], True))
    assert await lines_of(RemoteChild("rollout-0", PID, host)) == ["a", "b", "c"]


async def test_output_of_a_process_that_has_ended_is_not_waited_for() -> None:
    child = RemoteChild("rollout-0", PID, ScriptedHost(3, AWAY))
    assert await child.wait() == 3
    assert await lines_of(child) == []


async def test_all_who_wait_ask_once_and_one_who_gives_up_takes_nothing_from_the_others() -> None:
    ended = asyncio.Event()
    host = ScriptedHost(ended)
    child = RemoteChild("rollout-0", PID, host)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        first, second = tasks.create_task(child.wait()), tasks.create_task(child.wait())
        while not host.calls:
            await asyncio.sleep(0)
        assert host.calls == ["ended"]
        first.cancel()
        assert not second.done()
        ended.set()
    assert second.result() == 0
    assert child.has_ended
    assert await child.wait() == 0
    assert host.calls == ["ended", "ended"]


async def test_a_process_that_does_not_end_when_asked_is_killed() -> None:
    ended = asyncio.Event()
    host = ScriptedHost(ended)
    child = RemoteChild("rollout-0", PID, host)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(child.end(0.01))
        while "kill" not in host.calls:
            await asyncio.sleep(0.01)
        ended.set()
    assert [call for call in host.calls if call != "ended"] == ["terminate", "kill"]


async def test_a_process_that_its_node_s_kernel_holds_is_left_behind_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sluice.launch.processes.child.KILLED_S", 0.1)
    host = ScriptedHost(asyncio.Event())
    child = RemoteChild("rollout-0", PID, host)
    async with asyncio.timeout(WAIT_S):
        await child.end(0.0)
    assert not child.has_ended
    assert "rollout-0: process 77 has not ended 0.1 s after SIGKILL" in caplog.text
    assert [call for call in host.calls if call != "ended"] == ["terminate", "kill"]
