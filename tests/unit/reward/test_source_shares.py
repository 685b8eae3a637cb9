"""Several sources in one run: shares whatever their speed, settings and accounts of each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.app import RewardApp, RunFiles, open_prompt_sets
from services.reward.generation.request import GroupRequest
from services.reward.groups.sources import SourceLoad, interleave
from services.reward.ledger.ledger import PromptLedger
from services.reward.prompts.dataset import training_stream
from services.reward.prompts.source import prompt_key
from services.reward.prompts.submissions import Receipt
from sluice.algorithm.sampling.strategy import LoopLoad
from sluice.config.run import RunConfig
from sluice.errors import DataError, DataExhaustedError, PromptTooLongError
from sluice.types import DataProgress, TrainBatch
from tests.support.metric_rows import without_row
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_app import ScriptedClient, publish, running_app, settled, submit, train

SHARES = {"fast": 0.75, "slow": 0.25}


def config(folder: Path, *, batch_size: int = 8, staleness: int = 1, **of_slow: Any) -> RunConfig:
    """Two sources at 3:1 whose prompts ``slow`` answers ten times slower."""
    sources = {}
    for name, share in SHARES.items():
        contents = [f"{name} answer={index} right=1" for index in range(20)]
        path = write_prompts(folder / f"{name}.parquet", prompt_rows(contents))
        sources[name] = {"files": str(path), "share": share, "n": 2}
    sources["slow"] |= of_slow
    tree = {
        "data": {"train_batch_size": batch_size},
        "algorithm": {"filter_groups": {"enable": True}},
        "trainer": {"total_training_steps": 10},
        "sluice": {"asynchrony": {"max_staleness": staleness}, "sources": sources},
    }
    return msgspec.convert(tree, RunConfig)


async def at_own_speed(_name: str, request: GroupRequest, _index: int) -> None:
    await asyncio.sleep(0.01 if request.prompt.source == "slow" else 0.001)


async def batches(
    run: RunConfig, steps: int, client: ScriptedClient, files: RunFiles | None = None
) -> list[TrainBatch]:
    async with running_app(run, client, open_prompt_sets(run), files) as app:
        await publish(app, client, 0)
        return [await train(app, client, step) for step in range(1, steps + 1)]


def parts(found: Sequence[TrainBatch]) -> Counter[str]:
    return Counter(group.source for batch in found for group in batch.groups)


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_a_source_ten_times_slower_keeps_its_share(tmp_path: Path, staleness: int) -> None:
    run = config(tmp_path, staleness=staleness)
    found = await batches(run, 6, ScriptedClient(before_sample=at_own_speed))
    for batch in found:
        assert parts([batch]) == {"fast": 6, "slow": 2}


async def test_a_batch_that_is_filled_on_average_has_the_shares(tmp_path: Path) -> None:
    """At staleness 0 each source preempts its own groups that a full part leaves over."""
    run = config(tmp_path, staleness=0)
    sampling = msgspec.structs.replace(run.sluice.sampling, on_policy_fill="expected")
    run = msgspec.structs.replace(
        run, sluice=msgspec.structs.replace(run.sluice, sampling=sampling)
    )
    for name in SHARES:  # every second group is all right
        contents = [f"{name} answer={i} right={1 + i % 2}" for i in range(20)]
        write_prompts(tmp_path / f"{name}.parquet", prompt_rows(contents))
    found = await batches(run, 5, ScriptedClient(before_sample=at_own_speed))
    assert parts(found) == {"fast": 30, "slow": 10}


async def test_each_mini_batch_has_the_sources_in_their_shares(tmp_path: Path) -> None:
    (batch,) = await batches(config(tmp_path), 1, ScriptedClient())
    sources = [group.source for group in batch.groups]
    assert Counter(sources[:4]) == Counter(sources[4:]) == {"fast": 3, "slow": 1}


async def test_groups_have_the_size_of_their_source(tmp_path: Path) -> None:
    (batch,) = await batches(config(tmp_path, n=4), 1, ScriptedClient())
    sizes = {(group.source, len(group.rollouts)) for group in batch.groups}
    assert sizes == {("fast", 2), ("slow", 4)}


async def test_a_source_that_ends_begins_again(tmp_path: Path) -> None:
    found = await batches(config(tmp_path), 5, ScriptedClient())  # 30 of 20 rows
    assert found[-1].progress.of("fast").low_water >= 20


async def test_tokens_and_groups_are_counted_by_source(tmp_path: Path) -> None:
    run, client = config(tmp_path), ScriptedClient()
    async with running_app(run, client, open_prompt_sets(run)) as app:
        await publish(app, client, 0)
        batch = [await train(app, client, step) for step in (1, 2, 3)][-1]
        totals = app.statistics()
    statistics = batch.statistics
    assert statistics["sources/slow/share"] == 0.25
    assert statistics["sources/fast/groups"] == 6
    assert statistics["sources/fast/trained_tokens"] == 6 * 2 * 8
    for use in ("trained", "filtered_all_right", "stale"):
        of_sources = sum(totals.get(f"reward/sources/{name}/tokens/{use}", 0.0) for name in SHARES)
        assert of_sources == totals[f"reward/tokens/{use}"]
    assert totals["reward/sources/slow/tokens/trained"] == 3 * 2 * 2 * 8
    assert without_row({*statistics, *totals}) == []


async def test_a_restart_continues_each_source_at_its_position(tmp_path: Path) -> None:
    run, client = config(tmp_path, staleness=0), ScriptedClient()
    with PromptLedger(tmp_path / "ledger.sqlite") as ledger:
        before = await batches(run, 2, client, RunFiles(ledger=ledger))
    with PromptLedger(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.progress() == before[-1].progress
        assert ledger.progress().of("fast").low_water == 12
        assert ledger.progress().of("slow").low_water == 4
        async with running_app(run, client, open_prompt_sets(run), RunFiles(ledger=ledger)) as app:
            await publish(app, client, 2)
            batch = await app.loop.batches.take(3, 2, 60)
    trained = {group.prompt_id for one in before for group in one.groups}
    assert trained.isdisjoint(group.prompt_id for group in batch.groups)
    assert batch.progress.of("fast").low_water == 18


async def test_a_resumed_trainer_continues_each_source_at_the_position_of_its_checkpoint(
    tmp_path: Path,
) -> None:
    run, client = config(tmp_path, staleness=0), ScriptedClient()
    before = await batches(run, 2, client)
    async with running_app(run, client, open_prompt_sets(run)) as app:
        await app.loop.announce("resumed", 2, [], before[-1].progress)
        client.versions["a"] = 2
        await publish(app, client, 2)
        batch = await app.loop.batches.take(3, 2, 60)
    trained = {group.prompt_id for one in before for group in one.groups}
    assert trained.isdisjoint(group.prompt_id for group in batch.groups)


async def test_a_ledger_with_prompts_of_a_source_that_is_gone_is_refused(tmp_path: Path) -> None:
    run, client = config(tmp_path), ScriptedClient()
    with PromptLedger(tmp_path / "ledger.sqlite") as ledger:
        await batches(run, 1, client, RunFiles(ledger=ledger))
    renamed = config(tmp_path)
    renamed.sluice.sources["quick"] = renamed.sluice.sources.pop("fast")
    with (
        PromptLedger(tmp_path / "ledger.sqlite") as ledger,
        pytest.raises(DataError, match=r"source 'fast', and sluice\.sources has 'slow', 'quick'"),
    ):
        RewardApp(renamed, open_prompt_sets(renamed), None, client, RunFiles(ledger=ledger))  # type: ignore[arg-type]


async def test_a_client_cannot_submit_to_a_run_with_sources(tmp_path: Path) -> None:
    run, client = config(tmp_path), ScriptedClient()
    async with running_app(run, client, open_prompt_sets(run)) as app:
        session = submit(app, ["answer=1 right=1"])
        receipt = await session.next_event()
    assert isinstance(receipt, Receipt)
    assert "sluice.sources" in receipt.refused_because


async def test_with_shares_by_yield_the_groups_go_to_the_source_that_is_mixed(
    tmp_path: Path,
) -> None:
    run = config(tmp_path)
    for name in SHARES:
        right = 2 if name == "fast" else 1  # all right, but for every fourth group
        contents = [f"{name} answer={i} right={right if i % 4 else 1}" for i in range(20)]
        write_prompts(tmp_path / f"{name}.parquet", prompt_rows(contents))
        source = run.sluice.sources[name]
        run.sluice.sources[name] = msgspec.structs.replace(source, curriculum="yield")
    found = await batches(run, 12, ScriptedClient())
    assert parts(found[:1]) == {"fast": 6, "slow": 2}
    assert parts(found[-1:])["slow"] > 2
    assert parts(found[-1:])["fast"] >= 1


async def test_a_source_names_the_environment_of_rows_that_name_none(tmp_path: Path) -> None:
    run, client = config(tmp_path, environment="single_turn_agent"), ScriptedClient()
    seen: dict[str, object] = {}

    async def note(_name: str, request: GroupRequest, _index: int) -> None:
        seen[request.prompt.source] = request.prompt.extra_info.get("agent_name")

    client.before_sample = note
    await batches(run, 1, client)
    assert seen == {"fast": None, "slow": "single_turn_agent"}


async def said_at_the_end(
    run: RunConfig, client: ScriptedClient, files: RunFiles | None = None
) -> str:
    async with running_app(run, client, open_prompt_sets(run), files) as app:
        await publish(app, client, 0)
        with pytest.raises(DataExhaustedError) as error:
            await train(app, client, 1)
    return str(error.value)


async def too_long(_name: str, request: GroupRequest, _index: int) -> None:
    await at_own_speed(_name, request, _index)
    if request.prompt.source == "slow":
        raise PromptTooLongError("70 tokens")


async def test_a_source_whose_rows_are_all_too_long_ends_the_run(tmp_path: Path) -> None:
    said = await said_at_the_end(config(tmp_path), ScriptedClient(before_sample=too_long))
    assert "0 of 2 groups" in said
    assert "source 'slow'" in said
    assert "raise data.max_prompt_length" in said


async def test_a_row_that_is_still_sampled_keeps_a_source_of_long_rows(tmp_path: Path) -> None:
    many_ended, seen = asyncio.Event(), Counter[str]()

    async def mostly_too_long(_name: str, request: GroupRequest, _index: int) -> None:
        if request.prompt.source != "slow":
            return
        seen[request.prompt.ground_truth] += 1
        if request.prompt.ground_truth == "0":
            await many_ended.wait()
            return
        if seen.total() - seen["0"] >= 40:
            many_ended.set()
        raise PromptTooLongError("70 tokens")

    found = await batches(config(tmp_path), 3, ScriptedClient(before_sample=mostly_too_long))
    assert parts(found) == {"fast": 18, "slow": 6}


async def test_a_source_whose_rows_are_all_in_quarantine_ends_the_run(tmp_path: Path) -> None:
    run, path = config(tmp_path), tmp_path / "quarantine.jsonl"
    files = open_prompt_sets(run).training["slow"]
    assert files is not None
    rows = training_stream(
        files, run.data, DataProgress(0), total_epochs=1, check_data_source=None
    ).take(20)
    keys = [prompt_key(row.prompt("", number)) for number, row in enumerate(rows)]
    path.write_bytes(b"".join(msgspec.json.encode({"key": key}) + b"\n" for key in keys))
    said = await said_at_the_end(run, ScriptedClient(), RunFiles(quarantine=path))
    assert "40 in quarantine" in said
    assert "delete their lines" in said


async def test_a_wait_names_the_source_that_lacks_groups(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hold_slow(_name: str, request: GroupRequest, _index: int) -> None:
        if request.prompt.source == "slow":
            await gate.wait()

    run, client = config(tmp_path), ScriptedClient(before_sample=hold_slow)
    async with running_app(run, client, open_prompt_sets(run)) as app:
        await publish(app, client, 0)
        await settled(lambda: app.sources["fast"].groups.num_kept > 8)
        wait, *_ = app.loop.waits().values()
        gate.set()
    assert "(6 of 8 groups kept: slow 0 of 2)" in wait.phase


def fill(num_groups: int, *, kept: int = 0, running: int = 0) -> float:
    return SourceLoad(LoopLoad(running, kept, 0, 8), num_groups, 0.5, 1).fill


def test_a_source_is_as_far_as_the_parts_of_batches_that_its_groups_will_fill() -> None:
    assert fill(3, kept=3) == 1.0 > fill(1, running=1) == 0.5
    assert fill(3, kept=1) < fill(1, kept=1)


async def test_groups_start_in_the_shares_of_their_sources(tmp_path: Path) -> None:
    run, client = config(tmp_path), ScriptedClient()
    async with running_app(run, client, open_prompt_sets(run)) as app:
        await publish(app, client, 0)
        await settled(lambda: len(client.calls) >= 8)
    sources = Counter(prompt_id.split("-")[1] for _, prompt_id, _ in client.calls[:8])
    assert sources == {"fast": 6, "slow": 2}


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 4))
def test_every_part_of_the_order_has_the_sources_in_their_shares(
    counts: list[int], num_parts: int
) -> None:
    groups = [[f"{number}-{index:02}" for index in range(n)] for number, n in enumerate(counts)]
    found = interleave(groups)
    assert Counter(found) == Counter(group for own in groups for group in own)
    for number, own in enumerate(groups):
        assert [one for one in found if one.startswith(f"{number}-")] == own
    size = len(found) // num_parts
    for start in range(0, size * num_parts, max(size, 1)):
        part = found[start : start + size]
        for number, count in enumerate(counts):
            share = count * size / max(len(found), 1)
            assert abs(sum(one.startswith(f"{number}-") for one in part) - share) <= len(counts)
