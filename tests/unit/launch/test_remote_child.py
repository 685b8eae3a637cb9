"""A process on another node, whose host may be away for a while or for good."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from sluice.errors import PeerError
from sluice.launch import remote_child
from sluice.launch.cluster import HostGoneError
from sluice.launch.remote_child import RemoteChild
from tests.support.scripted_children import WAIT_S

PID = 77


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_child, "_PAUSE_S", 0.01)
    monkeypatch.setattr(remote_child, "_SILENCE_S", 0.1)


class ScriptedHost:
    """Answers what it is told to, one answer after the other, and the last one again."""

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
GONE = HostGoneError("host", "in a call", "it is dead")


async def code_of(*answers: object) -> int:
    async with asyncio.timeout(WAIT_S):
        return await RemoteChild("rollout-0", PID, ScriptedHost(*answers)).wait()


async def test_a_host_that_was_away_for_a_moment_tells_the_exit_code() -> None:
    assert await code_of(AWAY, AWAY, 3) == 3


@pytest.mark.parametrize("answer", [AWAY, GONE])
async def test_a_process_whose_host_is_lost_was_killed(answer: Exception) -> None:
    assert await code_of(answer) == -signal.SIGKILL


async def test_output_ends_with_its_host_and_what_came_before_is_told() -> None:
    child = RemoteChild("rollout-0", PID, ScriptedHost((["a", "b"], False), (["c"], False), AWAY))
    assert [line async for line in child.lines()] == ["a", "b", "c"]


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
        assert not child.has_ended
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
        ending = tasks.create_task(child.end(0.01))
        while "kill" not in host.calls:
            await asyncio.sleep(0.01)
        ended.set()
    assert ending.result() is True
    assert [call for call in host.calls if call != "ended"] == ["terminate", "kill"]
