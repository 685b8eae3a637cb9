"""What an engine refuses, and the turn to decode a prompt's images."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.thread import ImageTurn
from services.rollout.generation import GenerationRunner
from services.rollout.servicer import ReplicaIdentity, RolloutServicer
from sluice.api.rollout.v1 import rollout_pb2_grpc
from sluice.client import (
    AsyncClient,
    GenerateOptions,
    RetryPolicy,
    RunAddress,
    SampleDelta,
    SampleFinished,
    Sampling,
)
from sluice.errors import ExhaustedError
from sluice.rpc.auth import ClientQuota
from sluice.rpc.server import RpcServer
from tests.support.causal_lms import reference_model, running_engine, save_config
from tests.support.replica_process import ToyEncoder
from tests.unit.rollout.conftest import Steps

ONCE = RetryPolicy(patience_s=0.0)


@asynccontextmanager
async def replica(folder: Path, slots: int) -> AsyncIterator[tuple[str, EmbeddedEngine]]:
    """A replica with a quota of four samples a client."""
    save_config("qwen3", folder)
    model = reference_model(folder)
    async with running_engine(folder, model, slots=slots, max_model_len=128) as engine:
        servicer = RolloutServicer(
            ReplicaIdentity("rollout-0", "one"),
            engine,
            ToyEncoder(),
            GenerationRunner(engine, ToyEncoder().decode),
            engine_name="torch",
            max_n=8,
            quota=ClientQuota(4, "samples", "sluice.limits.max_client_samples"),
        )
        server = RpcServer(
            [lambda grpc_: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, grpc_)],
            ["sluice.api.rollout.v1.RolloutService"],
            host="127.0.0.1",
            port=0,
            max_message_bytes=1 << 20,
        )
        await server.start()
        try:
            yield server.address, engine
        finally:
            await server.stop(0)


def options(tokens: int, **further: int) -> GenerateOptions:
    sampling = Sampling(max_tokens=tokens, ignore_eos=True, seed=1)
    return GenerateOptions(sampling=sampling, **further)


async def test_waiting_samples_of_higher_priority_go_first_and_equal_ones_in_order(
    tmp_path: Path, steps: Steps
) -> None:
    ended: list[str] = []
    steps.left = 3  # the first sample lasts until all others wait

    async def draw(client: AsyncClient, name: str, priority: int) -> None:
        await client.generate(name, options(4, priority=priority))
        ended.append(name)

    async with (
        replica(tmp_path, slots=1) as (address, engine),
        AsyncClient(RunAddress(replicas=(address,)), name="a") as busy,
        AsyncClient(RunAddress(replicas=(address,)), name="b") as client,
        aclosing(busy.stream("first", options(100))) as first,
    ):
        async for event in first:
            if isinstance(event, SampleDelta):
                break
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            for place, (name, priority) in enumerate(
                [("low", -1), ("early", 0), ("late", 0), ("high", 5)], 1
            ):
                tasks.create_task(draw(client, name, priority))
                while engine.load().queued < place:
                    await asyncio.sleep(0.001)
            await first.aclose()
            steps.left = None
    assert ended == ["high", "early", "late", "low"]


async def test_a_token_budget_is_shared_out_and_a_quota_bounds_one_client_alone(
    tmp_path: Path, steps: Steps
) -> None:
    async with replica(tmp_path, slots=8) as (address, _):
        run = RunAddress(replicas=(address,))
        async with (
            AsyncClient(run, name="a", policy=ONCE) as a,
            AsyncClient(run, name="b", policy=ONCE) as b,
        ):
            found = await a.generate("x", options(50, n=3, token_budget=20))
            assert [rollout.num_tokens for rollout in found.rollouts] == [6, 6, 6]
            found = await a.generate("x", options(5, n=3, token_budget=60))
            assert [rollout.num_tokens for rollout in found.rollouts] == [5, 5, 5]
            steps.left = 3
            async with aclosing(a.stream("x", options(100, n=4))) as busy:
                await anext(busy)
                with pytest.raises(ExhaustedError, match="client 'a': 4 samples"):
                    await a.generate("x", options(1))
                steps.left = None
                assert len((await b.generate("x", options(1, n=4))).rollouts) == 4
                left = [event async for event in busy if isinstance(event, SampleFinished)]
            assert len(left) == 4
            assert len((await a.generate("x", options(1, n=4))).rollouts) == 4


class Decoder:
    """Ends when it is let go."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        assert self.may_end.wait(60)
        return "patches"

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.has_begun.wait, 60)


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_caller_that_went_away_gives_up_its_turn_when_its_thread_has_ended() -> None:
    turn, first, second = ImageTurn(), Decoder(), Decoder()
    second.may_end.set()
    async with asyncio.TaskGroup() as tasks:
        gone = tasks.create_task(turn.read(2, first))
        await first.begun()
        waiting = tasks.create_task(turn.read(3, second))
        await _settle()
        assert turn.samples == 5
        gone.cancel()
        await _settle()
        assert gone.cancelled()
        assert turn.samples == 3
        assert not second.has_begun.is_set()
        first.may_end.set()
        assert await waiting == "patches"
    assert turn.samples == 0


async def test_a_caller_that_goes_while_it_waits_takes_no_turn() -> None:
    turn, first, second, third = ImageTurn(), Decoder(), Decoder(), Decoder()
    third.may_end.set()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(turn.read(1, first))
        await first.begun()
        gone = tasks.create_task(turn.read(1, second))
        await _settle()
        gone.cancel()
        first.may_end.set()
        await running
        assert await turn.read(1, third) == "patches"
    assert not second.has_begun.is_set()


async def test_a_failure_is_the_callers_and_the_next_has_its_turn() -> None:
    turn, decoder = ImageTurn(), Decoder()
    decoder.may_end.set()
    with pytest.raises(ZeroDivisionError):
        await turn.read(1, lambda: 1 // 0)
    assert await turn.read(1, decoder) == "patches"
