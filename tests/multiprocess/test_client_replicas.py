"""The client against real engines: replicas that are killed, calls that are left, queues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import numpy as np
import pytest

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
from tests.support.replica_process import ReplicaProcess, hold, replica_process

STEP_S = 0.02
OPTIONS = GenerateOptions(n=3, sampling=Sampling(seed=5, max_tokens=40, ignore_eos=True))
WAIT_S = 800
# A sample has 40 tokens.
STEPS_BEFORE_KILL = 20


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
        with hold(folder, steps=1):
            await _a_stream_that_is_left_frees_its_slots(client, started)
        with hold(folder):
            await _a_deadline_frees_the_slots(client, started)
        unbroken = (await client.generate("text", OPTIONS)).rollouts
        assert [rollout.num_tokens for rollout in unbroken] == [40, 40, 40]
        with hold(folder, STEPS_BEFORE_KILL) as release:
            await _a_killed_replicas_samples_continue_at_the_other(
                client, replicas, unbroken, release
            )


async def _a_stream_that_is_left_frees_its_slots(
    client: AsyncClient, replicas: Sequence[ReplicaProcess]
) -> None:
    async with aclosing(client.stream("text", OPTIONS)) as events:
        async for event in events:
            if isinstance(event, SampleDelta):
                break
        assert await _busy(replicas) == OPTIONS.n
    await _until_idle(replicas)


async def _a_deadline_frees_the_slots(
    client: AsyncClient, replicas: Sequence[ReplicaProcess]
) -> None:
    options = GenerateOptions(n=3, sampling=OPTIONS.sampling, deadline_s=0.3)
    with pytest.raises(DeadlineError):
        await client.generate("text", options)
    await _until_idle(replicas)


async def _a_killed_replicas_samples_continue_at_the_other(
    client: AsyncClient,
    replicas: dict[str, ReplicaProcess],
    unbroken: tuple[Rollout, ...],
    release: Callable[[], None],
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
                await replicas[first.replica].kill()
                release()  # the other one may end them
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


async def _busy(replicas: Sequence[ReplicaProcess]) -> int:
    # Their own word, asked again.
    return sum([await replica.samples() for replica in replicas])


async def _until_idle(replicas: Sequence[ReplicaProcess]) -> None:
    while await _busy(replicas):
        await asyncio.sleep(0.05)
