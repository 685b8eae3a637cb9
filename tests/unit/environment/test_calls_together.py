"""Calls that are due together travel together; repeated ones get the answer of the first."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.reward.episodes.client import ServedEpisode, spread_over_servers
from services.reward.episodes.drivers import EpisodeFailedError
from sluice.api.environment.v1 import environment_pb2 as environment
from sluice.api.environment.v1 import environment_pb2_grpc
from sluice.concurrency.threads import MethodThreads
from sluice.environment.episodes import AuthorCalls
from sluice.environment.servicer import EnvironmentServicer, served_environment
from sluice.errors import NotFoundError
from sluice.rpc.server import ErrorInterceptor
from sluice.types import Answer, FinishReason, Scored
from tests.support.environments import author_file, drivers, episode, row
from tests.support.scripted_environment import eventually

STOP = FinishReason.STOP
GO = [{"role": "user", "content": "Go."}]
WORLD = """
import asyncio
from pathlib import Path

class Counting:
    made = 0

    def reset(self, ground_truth, **row):
        if ground_truth == "broken":
            raise ValueError("no data")

    async def turn(self, text):
        Counting.made += 1
        (FOLDER / "running").touch()
        while text == "wait" and not (FOLDER / "go").exists():
            await asyncio.sleep(0.01)
        if text == "big":
            return [{"role": "user", "content": "x" * (1 << 20)}] * 17
        return None if text.startswith("end") else f"call {Counting.made}"

    def score(self, answer):
        if answer == "end badly":
            raise ValueError("no grade")
        return 0.5

    def close(self):
        with (FOLDER / "closed").open("a") as file:
            file.write("x")
"""


HANGING = """
import asyncio

class Hanging:
    def turn(self, text):
        return None

    async def close(self):
        await asyncio.Event().wait()
"""


def world(folder: Path, text: str = WORLD) -> Any:
    text = text.replace("FOLDER", f"Path({str(folder)!r})")
    return author_file(folder, text).load()


class Counted(grpc.aio.ServerInterceptor):
    """Counts calls by method; `before` may end one."""

    def __init__(self, before: Any = None) -> None:
        self.seen, self.before = Counter[str](), before

    async def intercept_service(self, continuation: Any, call: Any) -> Any:
        """Count."""
        method = call.method.rpartition("/")[2]
        self.seen[method] += 1
        handler = await continuation(call)
        if self.before is None or not self.before(method):
            return handler

        async def unavailable(_request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")

        return grpc.unary_stream_rpc_method_handler(
            unavailable, handler.request_deserializer, handler.response_serializer
        )


@asynccontextmanager
async def counting(
    folder: Path, before: Any = None, further: Iterable[grpc.aio.ServerInterceptor] = ()
) -> AsyncIterator[tuple[Any, Counter[str]]]:
    """Drivers of a server whose calls are counted."""
    counted, calls = Counted(before), AuthorCalls()
    async with asyncio.TaskGroup() as tasks:
        servicer = EnvironmentServicer(world(folder), tasks, calls)
        server = grpc.aio.server(interceptors=[counted, *further])
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(servicer, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            async with drivers(spread_over_servers([address])) as found:
                yield found, counted.seen
        finally:
            await server.stop(None)
            await servicer.close()
            calls.close()


async def together(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results or errors of calls that are made at the same moment."""

    async def kept(call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await call
        except EpisodeFailedError as error:
            return error

    async with asyncio.TaskGroup() as tasks:
        made = [tasks.create_task(kept(call)) for call in calls]
    return [one.result() for one in made]


async def ended(played: ServedEpisode) -> Scored | None:
    assert (await played.step(0, Answer("end"), STOP)).done
    return await played.close()


async def test_calls_of_a_group_are_one_and_an_answer_that_ends_an_episode_grades_it(
    tmp_path: Path,
) -> None:
    async with counting(tmp_path) as (servers, seen):
        group = [episode(servers) for _ in range(8)]
        await together(one.open() for one in group)
        assert await together(map(ended, group)) == [Scored(0.5, 0.5, {"acc": 0.5})] * 8
    assert seen == {"Play": 2}
    assert (tmp_path / "closed").read_text() == "x" * 8


async def test_a_call_that_fails_among_others_fails_alone(tmp_path: Path) -> None:
    async with counting(tmp_path) as (servers, seen):
        group = [episode(servers, row(truth)) for truth in ("1", "broken", "1")]
        found = await together(one.open() for one in group)
        assert isinstance(found[1], EpisodeFailedError)
        assert "Counting.reset raised ValueError: no data (world.py:" in str(found[1])
        assert seen == {"Play": 1}
        good, bad = await together(
            one.step(0, Answer(text), STOP)
            for one, text in ((group[0], "a"), (group[2], "end badly"))
        )
        assert not good.done
        assert "Counting.score raised ValueError: no grade" in str(bad)
        for one in group:
            await one.abandon()


async def test_answers_of_a_broken_connection_are_sent_again_one_by_one(tmp_path: Path) -> None:
    broken: list[str] = []

    def before(method: str) -> bool:
        broken.append(method)
        return broken == ["Play"] * 2

    async with counting(tmp_path, before) as (servers, seen):
        group = [episode(servers) for _ in range(3)]
        await together(one.open() for one in group)
        assert len(await together(map(ended, group))) == 3
    assert seen == {"Play": 2, "Step": 3}


class Held(grpc.aio.ServerInterceptor):
    """Lets no Play in before `let_in`, as a large message on a slow connection."""

    def __init__(self) -> None:
        self.has_come, self.let_in = asyncio.Event(), asyncio.Event()

    async def intercept_service(self, continuation: Any, call: Any) -> Any:
        """Hold a Play back."""
        if call.method.endswith("/Play"):
            self.has_come.set()
            await self.let_in.wait()
        return await continuation(call)


async def test_an_episode_that_is_given_up_before_its_play_arrives_does_not_stay_open(
    tmp_path: Path,
) -> None:
    held = Held()
    async with counting(tmp_path, further=[held]) as (servers, seen):
        given_up, other = episode(servers), episode(servers)
        async with asyncio.TaskGroup() as tasks:
            opening = [tasks.create_task(one.open()) for one in (given_up, other)]
            await held.has_come.wait()
            opening[0].cancel()
            await asyncio.wait(opening[:1])
            await given_up.abandon()
            held.let_in.set()
        await eventually(lambda: (tmp_path / "closed").exists())
        await other.abandon()
    assert seen == {"Play": 1, "Close": 3}
    assert (tmp_path / "closed").read_text() == "xx"


class Confused(environment_pb2_grpc.EnvironmentServiceServicer):
    """A user's server that answers some Steps with what no Step leads to."""

    async def Play(self, request: Any, context: Any) -> None:
        """Answer the first Step as if it were Open, the second with nothing."""
        done = environment.Observation(done=True)
        odd = [
            environment.PlayResult(opened=environment.OpenResponse(observation=done)),
            environment.PlayResult(),
        ]
        for call in (*request.opens, *request.steps):
            result = environment.PlayResult(stepped=environment.StepResponse(observation=done))
            if isinstance(call, environment.OpenRequest):
                result = environment.PlayResult(opened=environment.OpenResponse())
            elif odd:
                result = odd.pop(0)
            result.episode_id = call.episode_id
            await context.write(environment.PlayResponse(results=[result]))

    async def Close(self, _request: Any, _context: Any) -> environment.CloseResponse:
        """End."""
        return environment.CloseResponse()


async def test_a_result_of_another_call_than_the_one_that_was_made_fails_its_episode_alone() -> (
    None
):
    server = grpc.aio.server()
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(Confused(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with drivers(spread_over_servers([address])) as servers:
        group = [episode(servers) for _ in range(3)]
        await together(one.open() for one in group)
        found = await together(one.step(0, Answer("end"), STOP) for one in group)
        assert "Play: it answered opened, not stepped" in str(found[0])
        assert "Play: it answered nothing, not stepped" in str(found[1])
        assert found[2].done
        for one in group:
            await one.abandon()
    await server.stop(None)


class Repeating(environment_pb2_grpc.EnvironmentServiceServicer):
    """A user's server that sends each result of Open twice, and what nobody asked for."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def Play(self, request: Any, context: Any) -> None:
        """Answer too often."""
        for name in (*(call.episode_id for call in request.opens), "of nobody"):
            result = environment.PlayResult(episode_id=name, opened=environment.OpenResponse())
            await context.write(environment.PlayResponse(results=[result] * 2))

    async def Close(self, request: Any, _context: Any) -> environment.CloseResponse:
        """Note it."""
        self.closed.append(request.episode_id)
        return environment.CloseResponse()


async def test_an_episode_whose_result_comes_twice_stays_open() -> None:
    server, servicer = grpc.aio.server(), Repeating()
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with drivers(spread_over_servers([address])) as servers:
        group = [episode(servers) for _ in range(2)]
        await together(one.open() for one in group)
        await asyncio.sleep(0.1)
        assert not servicer.closed
        for one in group:
            await one.abandon()
    await server.stop(None)


class HeldClose(Held):
    """Holds Plays back, and answers no Close until all have come."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.all_close = asyncio.Barrier(num)

    async def intercept_service(self, continuation: Any, call: Any) -> Any:
        """Hold."""
        if call.method.endswith("/Close"):
            await self.all_close.wait()
        return await super().intercept_service(continuation, call)


async def test_episodes_of_a_late_play_are_given_up_at_the_same_time(tmp_path: Path) -> None:
    held = HeldClose(3)
    async with counting(tmp_path, further=[held]) as (servers, seen):
        group = [episode(servers) for _ in range(3)]
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            opening = [tasks.create_task(one.open()) for one in group]
            await held.has_come.wait()
            for task in opening:
                task.cancel()
            await asyncio.wait(opening)
            held.let_in.set()
        await eventually(lambda: (tmp_path / "closed").exists())
        await eventually(lambda: (tmp_path / "closed").read_text() == "xxx")
    assert seen == {"Play": 1, "Close": 3}


def texts(group: Iterable[ServedEpisode], *said: str) -> Iterable[Coroutine[Any, Any, Any]]:
    return (one.step(0, Answer(text), STOP) for one, text in zip(group, said, strict=True))


async def test_an_observation_that_is_too_large_fails_its_episode_alone(tmp_path: Path) -> None:
    async with counting(tmp_path) as (servers, seen):
        group = [episode(servers) for _ in range(3)]
        await together(one.open() for one in group)
        small, big, other = await together(texts(group, "end", "big", "end"))
        assert small.done
        assert other.done
        assert "bytes; give the policy at most 16777216 at once" in str(big)
        await group[1].abandon()
    assert seen == {"Play": 2, "Close": 1}


async def test_answers_beside_one_that_the_caller_cannot_receive_are_sent_again_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.environment.servicer.MAX_RESULT_BYTES", 1 << 30)
    async with counting(tmp_path) as (servers, seen), asyncio.TaskGroup() as tasks:
        group = [episode(servers) for _ in range(3)]
        await together(one.open() for one in group)
        playing = tasks.create_task(together(texts(group, "wait", "big", "wait")))
        await eventually(lambda: seen["Step"] == 3)
        (tmp_path / "go").touch()
        small, big, other = await playing
        assert [found.messages[0].content for found in (small, other)] == ["call 3"] * 2
        assert "larger than max" in str(big)
        for one in group:
            await one.abandon()


@asynccontextmanager
async def stub(folder: Path) -> AsyncIterator[environment_pb2_grpc.EnvironmentServiceStub]:
    async with (
        served_environment(world(folder), f"unix:{folder / 'world.sock'}", 0) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        made = environment_pb2_grpc.EnvironmentServiceStub(channel)
        request = environment.OpenRequest(episode_id="a", messages=GO, timeout_s=60)
        await made.Open(request, timeout=30)
        yield made


def answer(text: str, *, may_end: bool = True) -> environment.StepRequest:
    return environment.StepRequest(episode_id="a", answer={"content": text}, may_end=may_end)


async def test_an_answer_repeated_while_its_first_call_runs_gets_that_calls_result(
    tmp_path: Path,
) -> None:
    async with stub(tmp_path) as calls:
        first = calls.Step(answer("wait"), timeout=30)
        await eventually((tmp_path / "running").exists)
        first.cancel()  # as a broken connection does
        again = calls.Step(answer("wait"), timeout=30)
        third = calls.Step(answer("wait"), timeout=30)
        await asyncio.sleep(0.05)
        (tmp_path / "go").touch()
        for call in (again, third):
            assert (await call).observation.messages[0].content == "call 1"


async def test_an_answer_that_ended_the_episode_is_answered_again_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    async with stub(tmp_path) as calls:
        found = [await calls.Step(answer("end"), timeout=30) for _ in range(2)]
        assert found[0] == found[1]
        assert found[0].end.score.score == 0.5
        assert (await calls.GetStatus(environment.GetStatusRequest())).episodes == 0
    assert (tmp_path / "closed").read_text() == "x"


async def test_a_caller_that_does_not_let_an_answer_end_the_episode_closes_it(
    tmp_path: Path,
) -> None:
    async with stub(tmp_path) as calls:
        seen = await calls.Step(answer("end", may_end=False), timeout=30)
        assert seen.observation.done
        assert not seen.HasField("end")
        closed = await calls.Close(environment.CloseRequest(episode_id="a"), timeout=30)
        assert closed.score.score == 0.5


async def test_a_call_beyond_its_deadline_is_cut_short_and_the_next_one_fails(
    tmp_path: Path,
) -> None:
    calls = AuthorCalls()
    async with asyncio.TaskGroup() as tasks:
        servicer = EnvironmentServicer(world(tmp_path), tasks, calls)
        opening = environment.OpenRequest(episode_id="a", messages=GO, timeout_s=60)
        await servicer.Open(opening, Caller())
        for time_s in (0.05, 60.0):
            with pytest.raises(NotFoundError, match="cut short"):
                await servicer.Step(answer("wait"), Caller(time_s))
        await servicer.close()
    calls.close()


@dataclass
class Caller:
    """The context of a call that has so many seconds."""

    time_s: float = 60.0

    def time_remaining(self) -> float:
        """Seconds."""
        return self.time_s


async def test_a_close_that_hangs_holds_neither_other_calls_nor_the_end_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.environment.servicer.CLOSE_S", 0.1)
    now_s, calls = 0.0, AuthorCalls()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        servicer = EnvironmentServicer(world(tmp_path, HANGING), tasks, calls, lambda: now_s)
        for name in ("expired", "next"):
            await servicer.Open(environment.OpenRequest(episode_id=name, timeout_s=5), Caller())
            now_s += 10
        assert (await servicer.GetStatus(environment.GetStatusRequest(), None)).episodes == 1
        await servicer.close()
    calls.close()


async def test_methods_run_side_by_side() -> None:
    threads, loop, all_run = MethodThreads(8), asyncio.get_running_loop(), asyncio.Event()
    running: set[int] = set()

    def meet(number: int) -> int:
        running.add(number)
        if len(running) == 8:
            loop.call_soon_threadsafe(all_run.set)
        asyncio.run_coroutine_threadsafe(all_run.wait(), loop).result(30)
        return number

    assert await together(threads.run(partial(meet, number)) for number in range(8)) == [*range(8)]
    threads.close()


class Refusing:
    """The start of threads, which the system refuses while `left` counts down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, real = 0, threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if self.left:
                self.left -= 1
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)


async def test_a_first_thread_that_is_refused_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, refusing = MethodThreads(2), Refusing(monkeypatch)
    refusing.left = 5
    async with asyncio.timeout(60):
        assert await threads.run(lambda: "made") == "made"
        assert await threads.run(lambda: "again") == "again"
    threads.close()


async def test_calls_run_side_by_side_after_a_further_thread_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, refusing, go = MethodThreads(3), Refusing(monkeypatch), threading.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(threads.run(partial(go.wait, 300)))
            await asyncio.sleep(0.01)
            refusing.left = 5
        assert await threads.run(lambda: "made") == "made"
        assert refusing.left == 0
        go.set()
    threads.close()


async def test_a_call_that_gets_no_thread_counts_as_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, refusing = 0.0, Refusing(monkeypatch)
    calls = AuthorCalls(lambda: now_s)
    refusing.left = 1 << 30
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(calls.run(lambda: "made"))
        await asyncio.sleep(0)
        now_s = 9.0
        assert calls.longest_s == 9.0
        refusing.left = 0
        assert await waiting == "made"
    assert calls.longest_s == 0.0
    calls.close()


async def test_a_cancelled_method_that_waits_is_not_made(tmp_path: Path) -> None:
    threads, made, go = MethodThreads(1), list[str](), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        made.append("first")
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(30)

    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(threads.run(hold))
        await eventually(lambda: bool(made))
        second = tasks.create_task(threads.run(lambda: made.append("second")))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        assert not first.done()
        go.set()
    assert made == ["first"]
    threads.close()


async def test_an_episode_waits_for_a_server_that_has_as_many_as_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.environment.servicer.MAX_EPISODES", 1)
    async with counting(tmp_path, further=[ErrorInterceptor()]) as (servers, seen):
        first, second = episode(servers), episode(servers)
        await first.open()
        async with asyncio.TaskGroup() as tasks:
            opening = tasks.create_task(second.open())
            await eventually(lambda: seen["Open"] > 2)
            assert await ended(first) == Scored(0.5, 0.5, {"acc": 0.5})
            await opening
        assert await ended(second) == Scored(0.5, 0.5, {"acc": 0.5})
        assert "Close" not in seen


async def test_an_episode_that_waited_for_a_full_server_also_waits_while_none_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skip_time: Callable[[float], None]
) -> None:
    monkeypatch.setattr("sluice.environment.servicer.MAX_EPISODES", 1)
    monkeypatch.setattr("services.reward.episodes.client._LONGEST_BACKOFF_S", 0.05)
    is_down = False

    def before(method: str) -> bool:
        return is_down and method == "Open"

    async with counting(tmp_path, before, further=[ErrorInterceptor()]) as (servers, seen):
        servers.call_timeout_s = 20.0
        first, second = episode(servers), episode(servers)
        await first.open()

        async def further_open() -> None:
            before = seen["Open"]
            await eventually(lambda: seen["Open"] > before + 1)

        async with asyncio.TaskGroup() as tasks:
            opening = tasks.create_task(second.open())
            await further_open()
            skip_time(30.0)  # more than a call may take, less than an episode
            await further_open()
            is_down = True
            await further_open()
            is_down = False
            assert await ended(first) == Scored(0.5, 0.5, {"acc": 0.5})
            await opening
        assert await ended(second) == Scored(0.5, 0.5, {"acc": 0.5})
