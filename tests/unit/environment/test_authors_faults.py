"""What the policy causes is its error; calls of an episode never overlap; what hangs is seen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from services.reward.episodes.drivers import EpisodeFailedError
from sluice.api.environment.v1 import environment_pb2 as environment
from sluice.api.environment.v1 import environment_pb2_grpc
from sluice.environment.servicer import served_environment
from sluice.types import Answer, FinishReason, Scored
from tests.support.environments import author_file, calls, episode, served
from tests.support.scripted_environment import eventually

STOP = FinishReason.STOP
TOOLS = """
import asyncio
import sys
from typing import Literal

class Tools:
    def power(self, base: int, exponent: int) -> int:
        '''Raise.'''
        return base ** exponent

    def pairs(self) -> dict:
        '''Return what JSON cannot write.'''
        return {(1, 2): 3}

    def side(self, side: Literal["left", "right"]) -> str:
        '''Turn.'''
        return side

    def divide(self, number: int, by: int) -> tuple:
        '''Divide.'''
        return divmod(number, by)

    def repeat(self, text: str, times: int) -> str:
        '''Repeat.'''
        return text * times

    async def leave(self) -> str:
        '''Leave.'''
        sys.exit(3)

    def interrupt(self) -> str:
        '''Interrupt.'''
        raise KeyboardInterrupt("now")

    async def cancel(self) -> str:
        '''Wait for a task that was cancelled.'''
        task = asyncio.ensure_future(asyncio.sleep(9))
        task.cancel()
        await task

    def spell(self) -> str:
        '''Quote half a surrogate pair, such as of an answer read as JSON.'''
        raise ValueError("no word: \\ud83d")
"""


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("power", {"base": 10, "exponent": 5000}, "Error: ValueError"),
        ("pairs", {}, "Error: TypeError"),
        ("side", '{"side": "\\ud800"}', "Error: argument 'side'"),
        ("divide", {"number": 17, "by": 5}, "[3, 2]"),
        ("repeat", {"text": "a", "times": 10**17}, "Error: MemoryError"),
        ("leave", {}, "Error: RuntimeError: it called sys.exit(3)"),
        ("interrupt", {}, "Error: RuntimeError: it raised KeyboardInterrupt: now"),
        ("cancel", {}, "Error: RuntimeError: it raised CancelledError"),
        ("spell", {}, "Error: ValueError: no word: ?"),
    ],
)
async def test_what_a_call_of_the_policy_causes_is_read_by_the_policy(
    tmp_path: Path, name: str, arguments: object, said: str
) -> None:
    async with served(author_file(tmp_path, TOOLS), tmp_path) as servers:
        played = episode(servers)
        await played.open()
        seen = await played.step(0, calls((name, arguments)), STOP)
        assert seen.messages[0].content.startswith(said)
        assert seen.reward is None
        await played.abandon()


JUDGE = """
import json

class Judge:
    def turn(self, text: str) -> None:
        if text == "null":
            raise ValueError("not an answer: \\ud83d")

    def score(self, answer: str) -> dict:
        read = json.loads(answer)
        return {"score": 1.0, "pred": read, read: 2.0}
"""


async def test_half_a_surrogate_pair_of_an_answer_costs_no_grade_and_no_other_episode(
    tmp_path: Path,
) -> None:
    async with served(author_file(tmp_path, JUDGE), tmp_path) as servers:
        others = [episode(servers) for _ in range(3)]
        failing = episode(servers)
        for played in (*others, failing):
            await played.open()

        async def fail() -> None:
            with pytest.raises(EpisodeFailedError, match=r"not an answer: \?"):
                await failing.step(0, Answer("null"), STOP)
            await failing.abandon()

        async with asyncio.TaskGroup() as tasks:  # they travel in one Play
            tasks.create_task(fail())
            steps = [
                tasks.create_task(played.step(0, Answer(r'"\ud83d"'), STOP)) for played in others
            ]
        assert all(step.result().done for step in steps)
        for played in others:
            assert await played.close() == Scored(1.0, 1.0, {"?": 2.0}, "?")


SLOW = """
from pathlib import Path
from time import sleep

class Slow:
    def reset(self, **row):
        self.opened = []

    def begin(self, folder: str) -> str:
        '''Open a file once the folder has one named go.'''
        (Path(folder) / "running").touch()
        while not (Path(folder) / "go").exists():
            sleep(0.01)
        self.opened.append(folder)
        return "opened"

    def close(self):
        (Path(self.folder) / "closed").write_text(str(len(self.opened)))

    folder = FOLDER
"""


async def test_close_runs_after_the_call_that_was_given_up(tmp_path: Path) -> None:
    source = author_file(tmp_path, SLOW.replace("FOLDER", repr(str(tmp_path))))
    closed = tmp_path / "closed"
    async with served(source, tmp_path) as servers, asyncio.TaskGroup() as tasks:
        played = episode(servers)
        await played.open()
        call = calls(("begin", {"folder": str(tmp_path)}))
        step = tasks.create_task(played.step(0, call, STOP))
        try:
            await eventually((tmp_path / "running").exists)
            step.cancel()
            await asyncio.wait([step])
            given_up = tasks.create_task(played.abandon())
            await asyncio.wait([given_up], timeout=0.3)
            assert not closed.exists()
        finally:  # else nothing ends it
            (tmp_path / "go").touch()
        await given_up
        await eventually(closed.exists)
        await eventually(lambda: closed.read_text() == "1")


STUBBORN = """
import asyncio, sys

async def run(task, policy):
    await policy.chat(task.prompt)
    if task.seed == 1:
        sys.exit(3)
    while not RELEASE.exists():
        RELEASE.with_name("begun").touch()
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            RELEASE.with_name("caught").touch()
"""


@asynccontextmanager
async def stub(folder: Path) -> AsyncIterator[environment_pb2_grpc.EnvironmentServiceStub]:
    text = f"from pathlib import Path\nRELEASE = Path({str(folder / 'release')!r})\n{STUBBORN}"
    world = author_file(folder, text).load()
    async with (
        served_environment(world, f"unix:{folder / 'world.sock'}", 0) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        try:
            yield environment_pb2_grpc.EnvironmentServiceStub(channel)
        finally:  # else nothing ends the loop
            (folder / "release").touch()


async def test_a_loop_that_catches_its_cancellation_counts_as_a_running_call(
    tmp_path: Path,
) -> None:
    async with stub(tmp_path) as calls_:
        messages = [{"role": "user", "content": "Go."}]
        request = environment.OpenRequest(episode_id="a", messages=messages, timeout_s=60)
        await calls_.Open(request, timeout=30)
        seen = await calls_.GetStatus(environment.GetStatusRequest())
        assert seen.longest_call_s == 0  # it waits for the policy
        step = environment.StepRequest(episode_id="a", answer={"content": "Hm."})
        stepping = calls_.Step(step, timeout=300)
        await eventually((tmp_path / "begun").exists)
        closing = environment.CloseRequest(episode_id="a", is_abandoned=True)
        given_up = calls_.Close(closing, timeout=300)
        await eventually((tmp_path / "caught").exists)
        seen = await calls_.GetStatus(environment.GetStatusRequest())
        assert seen.longest_call_s > 0
        stepping.cancel()
        given_up.cancel()


async def test_a_loop_that_exits_fails_its_episode_alone(tmp_path: Path) -> None:
    text = f"from pathlib import Path\nRELEASE = Path({str(tmp_path)!r})\n{STUBBORN}"
    async with served(author_file(tmp_path, text), tmp_path) as servers:
        played, other = episode(servers, seed=1), episode(servers, seed=2)
        await played.open()
        await other.open()
        with pytest.raises(EpisodeFailedError, match="SystemExit"):
            await played.step(0, Answer("Hm."), STOP)
        await played.abandon()
        assert (await other.step(0, Answer("Hm."), STOP)).done


async def test_a_loop_that_waits_for_a_cancelled_task_fails_with_that(tmp_path: Path) -> None:
    text = """
import asyncio
async def run(task, policy):
    await policy.chat(task.prompt)
    waited = asyncio.ensure_future(asyncio.sleep(9))
    waited.cancel()
    await waited
"""
    async with served(author_file(tmp_path, text), tmp_path) as servers:
        played = episode(servers)
        await played.open()
        with pytest.raises(EpisodeFailedError, match="run raised CancelledError"):
            await played.step(0, Answer("Hm."), STOP)
        await played.abandon()
