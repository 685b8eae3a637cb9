"""Priorities, token budgets and quotas of `Generate`, on a real engine over a real socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from services.rollout.engines.embedded.engine import TorchEngine
from services.rollout.engines.embedded.loop import GenerationLoop
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

STEP_S = 0.02
ONCE = RetryPolicy(patience_s=0.0)


@asynccontextmanager
async def replica(folder: Path, slots: int) -> AsyncIterator[tuple[str, TorchEngine]]:
    """A replica with a quota of four samples a client."""
    save_config("qwen3", folder)
    model = reference_model(folder)
    async with running_engine(folder, model, slots=slots, max_model_len=128) as engine:
        servicer = RolloutServicer(
            ReplicaIdentity("rollout-0", "one"),
            engine,
            ToyEncoder(),
            GenerationRunner(engine, ToyEncoder()),
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    step = GenerationLoop.step

    def slow_step(loop: GenerationLoop) -> None:
        time.sleep(STEP_S)  # the first sample lasts until all others wait
        step(loop)

    monkeypatch.setattr(GenerationLoop, "step", slow_step)

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
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for place, (name, priority) in enumerate(
                [("low", -1), ("early", 0), ("late", 0), ("high", 5)], 1
            ):
                tasks.create_task(draw(client, name, priority))
                while engine.load().queued < place:
                    await asyncio.sleep(0.001)
            tasks.create_task(first.aclose())
    assert ended == ["high", "early", "late", "low"]


async def test_a_token_budget_is_shared_out_and_a_quota_bounds_one_client_alone(
    tmp_path: Path,
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
            async with aclosing(a.stream("x", options(100, n=4))) as busy:
                await anext(busy)
                with pytest.raises(ExhaustedError, match="client 'a': 4 samples"):
                    await a.generate("x", options(1))
                assert len((await b.generate("x", options(1, n=4))).rollouts) == 4
                left = [event async for event in busy if isinstance(event, SampleFinished)]
            assert len(left) == 4
            assert len((await a.generate("x", options(1, n=4))).rollouts) == 4
