"""Sampling strategies of the reward service: what is sampled, trained, thrown away, remembered."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from sluice.types import TrainBatch
from tests.support.reward_process import RewardProcess, reward_process
from tests.support.reward_scenarios import SAMPLES, cycling, identity, mixed, train, until
from tests.support.scripted_rollout import Call, ScriptedReplica, scripted_replicas

STRATEGY = "sluice__sampling__strategy"
SLOW_S = 5.0


def rounds(num_waves: int = 0) -> dict[str, Any]:
    """verl's waves of 12 prompts for batches of 8."""
    return {
        STRATEGY: "rounds",
        "data__gen_batch_size": 12,
        "data__shuffle": False,
        "algorithm__filter_groups__max_num_gen_batches": num_waves,
    }


def memory(strategy: str, **more: Any) -> dict[str, Any]:
    """A strategy with memory, two epochs in the order of the file, hardly any exploration."""
    return {
        STRATEGY: strategy,
        "sluice__sampling__probe_samples": 2,
        "sluice__sampling__exploration": 1e-6,
        "sluice__sampling__coverage_guard": False,
        "data__shuffle": False,
        "trainer__total_epochs": 2,
        **more,
    }


def positions(batch: TrainBatch) -> list[int]:
    return [int(group.prompt_id.removeprefix("data-")) for group in batch.groups]


def sampled(replica: ScriptedReplica) -> list[tuple[str, tuple[int, ...]]]:
    return [(call.content, call.sample_indexes) for call in replica.calls]


def verls_batches(kept: Sequence[bool], *, wave: int, size: int) -> list[list[int]]:
    """Positions in each batch by verl's loop: waves until enough are kept, then trimmed."""
    batches, found = [], []
    for start in range(0, len(kept) - wave + 1, wave):
        found += [place for place in range(start, start + wave) if kept[place]]
        if len(found) >= size:
            batches.append(found[:size])
            found = []
    return batches


def check_tokens(statistics: Any) -> dict[str, float]:
    """The accounts of tokens balance; returns them."""
    tokens = {
        name.removeprefix("reward/tokens/"): count
        for name, count in statistics.items()
        if name.startswith("reward/tokens/")
    }
    received = tokens.pop("received")
    assert sum(tokens.values()) == received > 0
    return tokens


async def jitter(replica: ScriptedReplica, call: Call, index: int) -> None:
    await asyncio.sleep(random.random() * 0.01)


async def test_rounds_train_and_throw_away_what_verl_does(configure: Callable[..., Path]) -> None:
    replica = ScriptedReplica(before_sample=jitter)
    prompts = cycling(72)
    kept = [i % 5 in (1, 2, 3) for i in range(72)]
    expected = verls_batches(kept, wave=12, size=8)
    async with (
        scripted_replicas(replica),
        reward_process(configure(prompts, **rounds())) as service,
    ):
        batches = await train(service, [replica], 3)
        status = await service.status()
    assert [positions(batch) for batch in batches] == expected[:3]
    assert [batch.statistics["train/num_gen_batches"] for batch in batches] == [2, 2, 2]
    assert [batch.statistics["train/groups_carried_over"] for batch in batches] == [0, 0, 0]
    surplus = sum(batch.statistics["train/groups_surplus"] for batch in batches)
    assert surplus == sum(batch.statistics["train/surplus_discarded"] for batch in batches)
    ends = dict(status.prompts_by_end)
    assert ends["dropped_surplus"] == surplus == sum(kept) - 24
    assert ends["trained"] == 24
    tokens = check_tokens(status.statistics)
    assert tokens["surplus"] == surplus * SAMPLES * replica.num_tokens
    assert tokens["trained"] == 24 * SAMPLES * replica.num_tokens


async def test_rounds_wait_for_a_whole_wave_before_the_batch_that_is_full(
    configure: Callable[..., Path],
) -> None:
    gate = asyncio.Event()

    async def hold_last(replica: ScriptedReplica, call: Call, index: int) -> None:
        if call.content.startswith("answer=11 "):
            await gate.wait()

    replica = ScriptedReplica(before_sample=hold_last)
    config = configure(mixed(24), **rounds())
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])

        async def waits_for_one() -> bool:
            status = await service.status()
            return (status.groups_kept, status.groups_generating) == (11, 1)

        await until(waits_for_one)
        await service.awaited(1, 0, "generating 1 groups")
        gate.set()
        assert positions(await service.take(1, 0)) == list(range(8))
        assert len(replica.calls) == 12


async def test_rounds_give_up_in_verls_words(configure: Callable[..., Path]) -> None:
    replica = ScriptedReplica()
    config = configure([f"answer={i} right=0" for i in range(60)], **rounds(2))
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        with pytest.raises(grpc.aio.AioRpcError, match="Generated too many") as error:
            await service.take(1, 0)
        words = "num_gen_batches=2 >= max_num_gen_batches=2. Generated too many. Please check"
        assert words in str(error.value.details())
        assert len(replica.calls) == 24


async def test_the_last_incomplete_wave_is_trained_on_where_it_fills_a_batch(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(12 + 9), **rounds())
    async with scripted_replicas(replica), reward_process(config) as service:
        _, last = await train(service, [replica], 2)
        assert positions(last) == list(range(12, 20))
        with pytest.raises(grpc.aio.AioRpcError, match="exhausted"):
            await service.take(3, 2)
        assert dict((await service.status()).prompts_by_end)["dropped_surplus"] == 4 + 1


async def test_staged_groups_draw_a_few_samples_and_the_others_where_they_differ(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    prompts = [f"answer={i} right={2 if i % 2 else 16}" for i in range(16)]
    sections = {
        STRATEGY: "staged",
        "sluice__sampling__exploration": 1e-6,
        "sluice__sampling__coverage_guard": False,
        "actor_rollout_ref__rollout__n": 16,
        "data__shuffle": False,
    }
    async with (
        scripted_replicas(replica),
        reward_process(configure(prompts, **sections)) as service,
    ):
        (batch,) = await train(service, [replica], 1)
        status = await service.status()
        assert await service.stop() == 0  # the last lines of its log are written
    assert positions(batch) == list(range(1, 16, 2))
    for group in batch.groups:
        assert [r.sample_index for r in group.rollouts] == list(range(16))
        assert [s.score for s in group.scores] == [1.0] * 2 + [-1.0] * 14
    first, rest = tuple(range(4)), tuple(range(4, 16))
    calls = sampled(replica)
    assert [indexes for content, indexes in calls if "right=2" in content].count(rest) == 8
    assert [indexes for content, indexes in calls if "right=2" in content].count(first) == 8
    stopped = status.statistics["sampling/stopped_easy"]
    assert stopped > 0
    assert calls.count(("answer=0 right=16", rest)) + stopped >= 1
    tokens = check_tokens(status.statistics)
    assert tokens["trained"] == 8 * 16 * replica.num_tokens
    assert tokens["filtered_all_right"] == (8 * 16 - 12 * stopped) * replica.num_tokens
    lines = read_log(Path(status_folder(configure)))
    easy = [line for line in lines if line["end"] == "filtered_all_right"]
    assert sum(len(line["tokens"]) == 4 for line in easy) == stopped
    assert all(line["probes"] == 4 for line in lines)


def status_folder(configure: Callable[..., Path]) -> str:
    """The run folder of the configuration written last."""
    config = json.loads(configure([]).read_text())
    return str(config["sluice"]["run_dir"])


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of the log of groups."""
    return [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]


def easy_and_mixed(count: int) -> list[str]:
    """Every second prompt is always right."""
    return [f"answer={i} right={1 if i % 2 else SAMPLES}" for i in range(count)]


async def test_memory_passes_known_prompts_by_in_the_second_epoch(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(easy_and_mixed(32), **memory("memory"))
    async with scripted_replicas(replica), reward_process(config) as service:
        batches = await train(service, [replica], 4)
        status = await service.status()
    assert len([1 for content, _ in sampled(replica) if "right=1" in content]) == 32
    assert len([1 for content, _ in sampled(replica) if f"right={SAMPLES}" in content]) == 16
    ends = dict(status.prompts_by_end)
    assert (ends["trained"], ends["filtered_all_right"], ends["skipped"]) == (32, 16, 16)
    assert sum(batch.statistics["train/prompts_skipped"] for batch in batches) == 16
    assert status.statistics["sampling/skipped_easy"] == 16
    assert batches[-1].progress.low_water == 64


async def test_memory_survives_a_killed_service(configure: Callable[..., Path]) -> None:
    replica = ScriptedReplica()
    config = configure(easy_and_mixed(32), **memory("memory"))
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            first = await train(service, [replica], 2)
            service.process.kill()
            await service.wait()
        replica.calls.clear()
        async with reward_process(config) as service:
            await service.announce(2, [replica], resume_from=first[-1].progress)
            batch = await service.take(3, 2)
            status = await service.status()
            assert await service.stop() == 0  # the last lines of its log are written
    assert positions(batch) == list(range(33, 48, 2))
    assert all("right=1" in content for content, _ in sampled(replica))
    assert dict(status.prompts_by_end)["skipped"] >= 7


REPEATED = (
    *("train/prompts_skipped", "train/groups_all_right", "train/groups_all_wrong"),
    *("train/generated_tokens", "sampling/stopped", "sampling/hard_share_ratio", "sampling/price"),
)


async def run_of(
    service: RewardProcess, replicas: list[ScriptedReplica], steps: int
) -> list[tuple[Any, ...]]:
    """What must repeat of each batch: its groups with all tokens, and what was sampled for it."""
    return [
        (identity(batch), *(batch.statistics[name] for name in REPEATED))
        for batch in await train(service, replicas, steps)
    ]


async def test_synchronous_staged_memory_repeats_whatever_the_timing(
    configure: Callable[..., Path], tmp_path: Path
) -> None:
    prompts = [f"answer={i} right={(1, SAMPLES, 0)[i % 3]}" for i in range(96)]
    runs = []
    for number, before in enumerate((None, jitter)):
        sections = memory("staged_memory", sluice__sampling__exploration=0.3)
        sections["sluice__sampling__coverage_guard"] = True
        sections["sluice__run_dir"] = str(tmp_path / f"run-{number}")
        fleet = [ScriptedReplica(f"r{i}", before_sample=before) for i in range(1 + number)]
        config = configure(prompts, **sections)
        async with scripted_replicas(*fleet), reward_process(config) as service:
            runs.append(await run_of(service, fleet, 7))
    assert runs[0] == runs[1]
    assert sum(skipped for _, skipped, *_ in runs[0]) > 0


async def test_waiting_for_slow_groups_discards_no_token(configure: Callable[..., Path]) -> None:
    async def sometimes_slow(replica: ScriptedReplica, call: Call, index: int) -> None:
        slow = int(call.content.split()[0].removeprefix("answer=")) % 7 == 0
        await asyncio.sleep(0.15 if slow else 0.005 * random.random())

    fleet = [ScriptedReplica(f"r{i}", before_sample=sometimes_slow) for i in range(2)]
    config = configure(cycling(400), sluice__asynchrony__max_staleness=1)
    async with scripted_replicas(*fleet), reward_process(config) as service:
        batches = await train(service, fleet, 10)
        status = await service.status()
    tokens = check_tokens(status.statistics)
    assert tokens["stale"] == tokens["aborted"] == tokens["surplus"] == 0
    assert tokens["trained"] == 80 * SAMPLES * fleet[0].num_tokens
    assert max(batch.statistics["train/staleness_max"] for batch in batches) <= 1
    assert sum(batch.statistics["train/groups_restarted"] for batch in batches) == 0


async def test_batches_on_policy_filled_on_average_lose_tokens_of_running_groups_and_nothing_else(
    configure: Callable[..., Path],
) -> None:
    begun: set[str] = set()

    async def uneven(replica: ScriptedReplica, call: Call, index: int) -> None:
        slow = int(call.content.split()[0].removeprefix("answer=")) % 7 == 0
        # So slow at first that no pause of a process lets all of them end before their batch.
        first = slow and call.content not in begun
        begun.add(call.content)
        await asyncio.sleep(SLOW_S if first else 0.005 * random.random())

    fleet = [ScriptedReplica(f"r{i}", before_sample=uneven) for i in range(2)]
    config = configure(cycling(400), sluice__sampling__on_policy_fill="expected")
    async with scripted_replicas(*fleet), reward_process(config) as service:
        batches = await train(service, fleet, 12)
        status = await service.status()
    tokens = check_tokens(status.statistics)
    assert tokens["preempted"] > 0
    assert tokens["stale"] == tokens["surplus"] == tokens["failed"] == 0
    assert tokens["trained"] == 96 * SAMPLES * fleet[0].num_tokens
    assert sum(batch.statistics["train/groups_restarted"] for batch in batches) > 0
    assert max(batch.statistics["train/staleness_max"] for batch in batches) == 0
    trained = [place for batch in batches for place in positions(batch)]
    assert len(set(trained)) == len(trained) == 96
    assert any(place % 7 == 0 for place in trained)  # what is slow is trained as well
