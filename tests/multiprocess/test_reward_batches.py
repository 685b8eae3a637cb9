"""Train batches of the reward service: which groups, in which order, for which trainer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from sluice.api.reward.v1 import reward_pb2
from sluice.types import DataProgress
from tests.support.reward_process import reward_process
from tests.support.reward_scenarios import SAMPLES, WAIT_S, cycling, identity, mixed, train, until
from tests.support.scripted_rollout import Call, ScriptedReplica, scripted_replicas


async def test_a_batch_holds_the_first_mixed_groups_in_the_order_of_issue(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(cycling(40), data__shuffle=False)
    async with scripted_replicas(replica), reward_process(config) as service:
        (batch,) = await train(service, [replica], 1)
        status = await service.status()
    positions = [int(g.prompt_id.removeprefix("data-")) for g in batch.groups]
    assert positions == [p for p in range(40) if p % 5 in (1, 2, 3)][:8]
    assert all(sorted(s.score for s in g.scores) != [1.0] * SAMPLES for g in batch.groups)
    assert dict(status.prompts_by_end)["trained"] == 8
    assert batch.statistics["train/groups_kept"] == 8
    assert batch.statistics["train/groups_all_wrong"] == 3
    assert batch.statistics["train/groups_all_right"] == 2
    assert batch.progress == DataProgress(13)


async def jitter(replica: ScriptedReplica, call: Call, index: int) -> None:
    await asyncio.sleep(random.random() * 0.01)


async def test_synchronous_batches_repeat_whatever_the_timing(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    config = configure(cycling(200))
    runs = []
    for name, before in (("even", None), ("uneven", jitter)):
        replica = ScriptedReplica(before_sample=before)
        folder = f"sluice.run_dir={tmp_path / name}"
        async with scripted_replicas(replica), reward_process(config, folder) as service:
            batches = await train(service, [replica], 4)
            status = await service.status()
        runs.append([identity(batch) for batch in batches])
        assert all(b.statistics["train/surplus_discarded"] == 0 for b in batches)
        assert all(b.statistics["train/staleness_max"] == 0 for b in batches)
        assert dict(status.prompts_by_end)["dropped_stale"] == 0
    assert runs[0] == runs[1]


async def test_surplus_kept_groups_are_carried_over_and_none_is_lost(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica(before_sample=jitter)
    config = configure(cycling(400), sluice__asynchrony__max_staleness=1)
    async with scripted_replicas(replica), reward_process(config) as service:

        async def has_surplus() -> bool:
            return bool((await service.status()).groups_kept > 8)

        batches = []
        await service.announce(0, [replica])
        for step in range(1, 9):
            if step == 1:
                await until(has_surplus)
            batches.append(await service.take(step, step - 1))
            await service.acknowledge(batches[-1], step)
            await service.announce(step, [replica])
        status = await service.status()
    ids = [g.prompt_id for b in batches for g in b.groups]
    assert len(ids) == len(set(ids)) == 8 * 8
    assert batches[0].statistics["train/groups_carried_over"] > 0
    assert batches[1].statistics["train/staleness_max"] == 1
    assert max(b.statistics["train/staleness_max"] for b in batches) == 1
    assert sum(b.statistics["train/surplus_discarded"] for b in batches) == 0
    assert dict(status.prompts_by_end)["trained"] == 64
    assert dict(status.prompts_by_end)["dropped_stale"] == 0


async def test_generation_continues_while_the_trainer_works(configure: Callable[..., Path]) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(100), sluice__asynchrony__max_staleness=1)
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        await service.take(1, 0)

        async def next_batch_is_ready() -> bool:
            return bool((await service.status()).groups_kept == 8)

        await until(next_batch_is_ready)
        # Two batches are all that staleness 1 allows before version 1 is announced.
        assert len(replica.calls) == 16


async def test_a_waiting_trainer_gets_the_batch_the_moment_it_is_full(
    configure: Callable[..., Path],
) -> None:
    gate = asyncio.Event()

    async def wait_for_gate(replica: ScriptedReplica, call: Call, index: int) -> None:
        await gate.wait()

    replica = ScriptedReplica(before_sample=wait_for_gate)
    async with scripted_replicas(replica), reward_process(configure(mixed(8))) as service:
        await service.announce(0, [replica])
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(service.take(1, 0))
            await until(lambda: len(replica.calls) == 8)
            assert not taking.done()
            gate.set()
        assert len(taking.result().groups) == 8


async def test_a_batch_is_the_same_until_it_is_acknowledged(configure: Callable[..., Path]) -> None:
    replica = ScriptedReplica()
    async with scripted_replicas(replica), reward_process(configure(mixed(20))) as service:
        await service.announce(0, [replica])
        batch = await service.take(1, 0)
        again = await service.take(1, 0)
        await service.acknowledge(batch, 1)
        await service.acknowledge(batch, 1)
        status = await service.status()
        assert (again.batch_id, identity(again)) == (batch.batch_id, identity(batch))
        assert dict(status.prompts_by_end)["trained"] == 8
        await service.announce(1, [replica])
        following = await service.take(2, 1)
        assert not {g.prompt_id for g in batch.groups} & {g.prompt_id for g in following.groups}
        with pytest.raises(grpc.aio.AioRpcError, match="is not leased"):
            await service.stub.AcknowledgeBatch(
                reward_pb2.AcknowledgeBatchRequest(batch_id="unknown", step=1), timeout=WAIT_S
            )


async def test_another_trainer_takes_over_what_is_pending_and_resumes_the_data(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(40), data__shuffle=False)
    async with scripted_replicas(replica), reward_process(config) as service:
        first = (await train(service, [replica], 1))[0]
        lost = await service.take(2, 1)
        # Trained, checkpointed after step 1, and then killed with the second batch in hand.
        await service.announce(1, [replica], instance_id="trainer-2", resume_from=first.progress)
        again = await service.take(2, 1)
        status = await service.status()
        assert [g.prompt_id for g in again.groups] == [g.prompt_id for g in lost.groups]
        assert identity(again) == identity(lost)
        assert again.batch_id != lost.batch_id
        assert status.prompts_submitted == 16

    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(1, [replica], resume_from=DataProgress(8, (9, 11)))
        batch = await service.take(2, 1)
    assert [g.prompt_id for g in batch.groups] == [
        f"data-{p}" for p in (8, 10, 12, 13, 14, 15, 16, 17)
    ]
