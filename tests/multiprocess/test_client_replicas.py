"""The client against real engines: replicas that are killed, calls that are left, queues."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import numpy as np

from sluice.client import (
    AsyncClient,
    GenerateOptions,
    GenerationEvent,
    GenerationStarted,
    RunAddress,
    SampleDelta,
    SampleFinished,
    Sampling,
)
from sluice.errors import DeadlineError
from sluice.types import Rollout
from tests.support.causal_lms import save_config
from tests.support.replica_process import ReplicaProcess, replica_process

STEP_S = 0.02
OPTIONS = GenerateOptions(n=3, sampling=Sampling(seed=5, max_tokens=40, ignore_eos=True))
WAIT_S = 240


async def test_generation_outlives_replicas_and_what_is_left_frees_its_slots(
    tmp_path: Path,
) -> None:
    folder = save_config("qwen3", tmp_path)
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(replica_process(folder, name, STEP_S))
            for name in ("a", "b")
        ]
        replicas = {replica.address: replica for replica in started}
        address = RunAddress(replicas=tuple(replicas))
        client = await stack.enter_async_context(AsyncClient(address))
        await _a_stream_that_is_left_frees_its_slots(client)
        await _a_deadline_frees_the_slots(client)
        unbroken = (await client.generate("text", OPTIONS)).rollouts
        assert [rollout.num_tokens for rollout in unbroken] == [40, 40, 40]
        await _a_killed_replicas_samples_continue_at_the_other(client, replicas, unbroken)


async def _a_stream_that_is_left_frees_its_slots(client: AsyncClient) -> None:
    async with aclosing(client.stream("text", OPTIONS)) as events:
        async for event in events:
            if isinstance(event, SampleDelta):
                break
        assert sum(await _busy(client)) == OPTIONS.n
    await _until_idle(client)


async def _a_deadline_frees_the_slots(client: AsyncClient) -> None:
    options = GenerateOptions(n=3, sampling=OPTIONS.sampling, deadline_s=0.3)
    try:
        await client.generate("text", options)
    except DeadlineError:
        await _until_idle(client)
    else:
        raise AssertionError("40 tokens take longer than the deadline")


async def _a_killed_replicas_samples_continue_at_the_other(
    client: AsyncClient, replicas: dict[str, ReplicaProcess], unbroken: tuple[Rollout, ...]
) -> None:
    events: list[GenerationEvent] = []
    num_tokens = 0
    async with aclosing(client.stream("text", OPTIONS)) as stream:
        async for event in stream:
            events.append(event)
            before = num_tokens
            num_tokens += event.token_ids.size if isinstance(event, SampleDelta) else 0
            if before < 30 <= num_tokens:
                first = next(e for e in events if isinstance(e, GenerationStarted))
                replicas[first.replica].send(signal.SIGKILL)
    started = [event.replica for event in events if isinstance(event, GenerationStarted)]
    assert len(set(started)) == 2
    ended = {e.rollout.sample_index: e.rollout for e in events if isinstance(e, SampleFinished)}
    for whole in unbroken:
        found = ended[whole.sample_index]
        assert found.token_ids.tolist() == whole.token_ids.tolist()
        np.testing.assert_allclose(found.behavior_logprobs, whole.behavior_logprobs, atol=1e-4)
        deltas = [
            e for e in events if isinstance(e, SampleDelta) and e.sample_index == whole.sample_index
        ]
        assert np.concatenate([d.token_ids for d in deltas]).tolist() == whole.token_ids.tolist()
        assert "".join(delta.text for delta in deltas) == whole.text


async def _busy(client: AsyncClient) -> list[int]:
    # The replicas' own word, asked again.
    return [replica.slots_busy for replica in await client.replicas()]


async def _until_idle(client: AsyncClient) -> None:
    while sum(await _busy(client)):
        await asyncio.sleep(0.05)
