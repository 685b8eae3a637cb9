"""What the reward service makes of replicas and prompts that fail, and of data that runs out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from sluice.errors import EngineError, InvalidRequestError, PeerError
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_process import reward_process
from tests.support.reward_scenarios import SAMPLES, cycling, mixed, train, until
from tests.support.scripted_rollout import Call, ScriptedReplica, scripted_replicas


async def test_only_the_missing_samples_of_a_dead_replica_are_generated_elsewhere(
    configure: Callable[..., Path],
) -> None:
    async def die_after_two(replica: ScriptedReplica, call: Call, index: int) -> None:
        if index == 2:
            raise PeerError(replica.name, "generating", "killed")

    dying = ScriptedReplica(name="dying", before_sample=die_after_two)
    sound = ScriptedReplica(name="sound")
    config = configure(mixed(8))
    async with scripted_replicas(dying, sound), reward_process(config) as service:
        await service.announce(0, [dying, sound])
        batch = await service.take(1, 0)
        status = await service.status()
    assert all(len(g.rollouts) == SAMPLES for g in batch.groups)
    assert dying.calls
    # One that failed is tried again after a pause, however short that is to a busy service.
    failed = {c.content for c in dying.calls}
    again = [c for c in sound.calls if c.content in failed]
    assert {c.content for c in again} == failed
    assert {c.sample_indexes for c in again} == {(2, 3)}
    assert status.prompts_submitted == 8


async def test_streams_of_a_replica_that_left_the_fleet_end_and_their_samples_come_elsewhere(
    configure: Callable[..., Path],
) -> None:
    never = asyncio.Event()

    async def hang(replica: ScriptedReplica, call: Call, index: int) -> None:
        await never.wait()

    frozen, sound = ScriptedReplica(name="frozen", before_sample=hang), ScriptedReplica(name="ok")
    config = configure(mixed(8))
    async with scripted_replicas(frozen, sound), reward_process(config) as service:
        await service.announce(0, [frozen])
        await until(lambda: len(frozen.calls) == 8)
        await service.announce(0, [sound])
        batch = await service.take(1, 0)
        await until(lambda: all(call.was_cancelled for call in frozen.calls))
    assert len(batch.groups) == 8
    assert len(sound.calls) == 8


async def test_a_dead_fleet_loses_no_prompt_and_the_run_continues_with_a_new_one(
    configure: Callable[..., Path],
) -> None:
    first, second = ScriptedReplica(name="one"), ScriptedReplica(name="two")
    config = configure(mixed(8))
    async with scripted_replicas(first, second), reward_process(config) as service:
        await first.die()
        await service.announce(0, [first])
        await until(lambda: any("one: failed" in line for line in service.log))
        await service.announce(0, [second])
        batch = await service.take(1, 0)
        status = await service.status()
    assert len(batch.groups) == 8
    assert status.prompts_submitted == 8


async def test_a_group_that_fails_too_often_ends_as_failed(configure: Callable[..., Path]) -> None:
    async def break_one(replica: ScriptedReplica, call: Call, index: int) -> None:
        if "answer=3 " in call.content:
            raise EngineError("out of memory")

    replica = ScriptedReplica(before_sample=break_one)
    config = configure(mixed(9), sluice__reward__max_attempts=2, data__shuffle=False)
    async with scripted_replicas(replica), reward_process(config) as service:
        (batch,) = await train(service, [replica], 1)
        status = await service.status()
    assert "data-3" not in {g.prompt_id for g in batch.groups}
    assert dict(status.prompts_by_end)["dropped_failed"] == 1


async def test_a_prompt_that_the_engine_refuses_ends_at_once(
    configure: Callable[..., Path],
) -> None:
    async def refuse_one(replica: ScriptedReplica, call: Call, index: int) -> None:
        if "answer=3 " in call.content:
            raise InvalidRequestError("prompt of 900 tokens is over data.max_prompt_length = 512")

    replica = ScriptedReplica(before_sample=refuse_one)
    config = configure(mixed(9), data__shuffle=False)
    async with scripted_replicas(replica), reward_process(config) as service:
        await train(service, [replica], 1)
        status = await service.status()
    assert dict(status.prompts_by_end)["dropped_failed"] == 1
    assert sum("answer=3 " in call.content for call in replica.calls) == 1


async def test_taking_a_batch_without_a_replica_ends_by_its_deadline_and_says_so(
    configure: Callable[..., Path],
) -> None:
    async with reward_process(configure(mixed(8))) as service:
        code = await service.awaited(1, 0, "trainer: announcing a policy")
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await service.announce(0, [])
        await service.awaited(1, 0, "none is announced")
        status = await service.status()
        assert [wait.peer for wait in status.awaited] == ["rollout fleet"]


async def test_an_exhausted_data_set_is_reported_with_numbers_and_remedy(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    async with scripted_replicas(replica), reward_process(configure(cycling(20))) as service:
        await train(service, [replica], 1)
        with pytest.raises(grpc.aio.AioRpcError, match=r"exhausted with 4 of 8 .*total_epochs"):
            await service.take(2, 1)
        status = await service.status()
    assert (status.prompts_submitted, status.groups_kept) == (20, 4)


async def test_a_hopeless_yield_ends_the_wait(configure: Callable[..., Path]) -> None:
    replica = ScriptedReplica()
    config = configure(
        [f"answer={i} right=0" for i in range(60)], algorithm__filter_groups__min_yield_groups=30
    )
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        with pytest.raises(grpc.aio.AioRpcError, match=r"0.00% of the last 30 groups"):
            await service.take(1, 0)


async def test_a_row_of_an_unknown_data_source_stops_the_run_and_names_it(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    rows = write_prompts(tmp_path / "odd.parquet", prompt_rows(mixed(8), "poetry"))
    replica = ScriptedReplica()
    config = configure(mixed(8), data__train_files=str(rows))
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        with pytest.raises(grpc.aio.AioRpcError, match=r"'poetry'.*custom_reward_function"):
            await service.take(1, 0)


async def test_a_metric_that_the_scorer_does_not_return_is_reported_to_the_trainer(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(8), algorithm__filter_groups__metric="elegance")
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        with pytest.raises(grpc.aio.AioRpcError, match="no 'elegance'"):
            await service.take(1, 0)
