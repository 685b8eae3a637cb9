"""Which prompts start: the fleet's capacity, and prompts that are passed by."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.reward.app import RunFiles, open_prompt_sets
from services.reward.generation.request import GroupRequest
from services.reward.groups.loop import why_skipped
from services.reward.prompts.history import PromptMemoryStore
from services.reward.prompts.source import prompt_key
from sluice.algorithm.sampling.admission import FinishForecast
from sluice.algorithm.sampling.attempt import Attempt, PromptHistory, RememberedAttempt
from sluice.algorithm.sampling.coverage_guard import Side
from sluice.config.run import RunConfig
from sluice.errors import BatchUnfillableError, DataError, DataExhaustedError
from sluice.types import ChatMessage, Prompt, PromptEnd, PromptOrigin
from tests.support.client_prompt import client_prompt
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_app import ScriptedClient, replica, running_app, settled, submit

MIXED = "answer=1 right=1"
RIGHT = "answer=1 right=2"
ALWAYS_RIGHT = RememberedAttempt(1000, 1000, 8.0, 0)


def config(strategy: str = "stream", **sections: Any) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 4, "shuffle": False, **sections.pop("data", {})},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "algorithm": {"filter_groups": {"enable": True}},
        "trainer": {"total_epochs": sections.pop("epochs", 1)},
        "sluice": {
            "asynchrony": {"max_staleness": 7},
            "sampling": {"strategy": strategy, "exploration": 1e-9, "coverage_guard": False},
            **sections,
        },
    }
    return msgspec.convert(tree, RunConfig)


async def hold(_name: str, _request: GroupRequest, _index: int) -> None:
    await asyncio.Event().wait()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_greedy", [0, 1])
async def test_groups_that_start_together_take_no_more_capacity_than_there_is(
    num_greedy: int,
) -> None:
    settings = config()
    if num_greedy:
        algorithm = msgspec.structs.replace(settings.algorithm, adv_estimator="remax")
        settings = msgspec.structs.replace(settings, algorithm=algorithm)
    client = ScriptedClient(before_sample=hold)
    async with running_app(settings, client) as app:
        submit(app, [MIXED] * 20)
        await app.loop.announce("trainer", 0, [replica("a", slots=8)], None)
        await settled(lambda: len(client.calls) >= 4)
        await turns(50)
        assert app.queue.num_waiting == 0
        assert app.groups.counts["generating"] == 12 // (2 + num_greedy)  # 8 slots, slack 1.5


async def test_a_group_larger_than_the_fleet_starts_all_the_same() -> None:
    client = ScriptedClient(before_sample=hold)
    async with running_app(config(), client) as app:
        submit(app, [MIXED] * 20)
        await app.loop.announce("trainer", 0, [replica("a", slots=1)], None)
        await settled(lambda: len(client.calls) == 1)
        await turns(50)
        assert app.groups.counts["generating"] == 1


def test_a_prompts_key_depends_on_its_words_and_not_on_its_place() -> None:
    one, other = client_prompt("a"), client_prompt("b")
    again = Prompt("q", 7, one.messages, "gsm8k", "1", PromptOrigin.DATASET, 3)
    assert prompt_key(one) == prompt_key(again) != prompt_key(other)
    assert len(bytes.fromhex(prompt_key(one))) == 16
    moved = Prompt("q", 7, (ChatMessage("user", "a1"),), "", "", PromptOrigin.CLIENT, None)
    assert prompt_key(moved) != prompt_key(one)


async def test_a_clients_prompt_is_never_passed_by(tmp_path: Path) -> None:
    with PromptMemoryStore(tmp_path / "memory.sqlite") as memory:
        memory.add([(prompt_key(client_prompt(RIGHT)), ALWAYS_RIGHT)])
        files = RunFiles(memory)
        rows = write_prompts(tmp_path / "train.parquet", prompt_rows([MIXED] * 8))
        settings = config("memory", data={"train_files": str(rows)})
        client, sets = ScriptedClient(), open_prompt_sets(settings)
        async with running_app(settings, client, sets, files) as app:
            session = submit(app, [RIGHT])
            await app.loop.announce("trainer", 0, [replica("a")], None)
            await settled(lambda: session.num_open == 0)
            assert app.ledger.by_end[PromptEnd.FILTERED_ALL_RIGHT] == 1


async def test_a_whole_epoch_is_never_passed_by(tmp_path: Path) -> None:
    contents = [f"answer={i} right=2" for i in range(4)]
    rows = write_prompts(tmp_path / "train.parquet", prompt_rows(contents))
    settings = config("memory", data={"train_files": str(rows)}, epochs=3)
    sets, client = open_prompt_sets(settings), ScriptedClient()
    with PromptMemoryStore(tmp_path / "memory.sqlite") as memory:
        files = RunFiles(memory)
        async with running_app(settings, client, sets, files) as app:
            await app.loop.announce("trainer", 0, [replica("a")], None)
            with pytest.raises(DataExhaustedError):
                await app.loop.batches.take(1, 0, 60)
            assert app.ledger.by_end[PromptEnd.FILTERED_ALL_RIGHT] == 12
        memory.add([(key, ALWAYS_RIGHT) for key in _keys(contents)])
        client.calls.clear()
        files = RunFiles(memory)
        async with running_app(settings, client, sets, files) as app:
            await app.loop.announce("trainer", 0, [replica("a")], None)
            with pytest.raises((DataExhaustedError, BatchUnfillableError)):
                await app.loop.batches.take(1, 0, 60)
            ends = app.ledger.by_end
    # Four are passed by, the fifth is taken, four are passed by, the tenth is taken, two more.
    assert [prompt_id for _, prompt_id, _ in client.calls] == ["data-4", "data-9"]
    assert (ends[PromptEnd.SKIPPED], ends[PromptEnd.FILTERED_ALL_RIGHT]) == (10, 2)


async def test_attempts_are_remembered_though_the_announcement_is_given_up(
    tmp_path: Path,
) -> None:
    released, loop = threading.Event(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    with PromptMemoryStore(tmp_path / "memory.sqlite") as memory:
        files = RunFiles(memory)
        async with running_app(config("memory"), ScriptedClient(), files=files) as app:
            await app.loop.announce("trainer", 0, [replica("a")], None)
            session = submit(app, [RIGHT])
            await settled(lambda: session.num_open == 0)
            busy = loop.run_in_executor(None, released.wait, 30)
            async with asyncio.TaskGroup() as tasks:
                given_up = tasks.create_task(app.loop.announce("trainer", 1, [replica("a")], None))
                await turns(20)
                given_up.cancel()
            released.set()
            await busy
            await app.loop.announce("trainer", 1, [replica("a")], None)
            key = prompt_key(client_prompt(RIGHT))
            assert await asyncio.to_thread(memory.read, key) is not None


@pytest.mark.parametrize("fails", [False, True])
async def test_an_announcement_waits_until_the_attempts_of_one_that_was_given_up_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    released, has_begun, written = threading.Event(), asyncio.Event(), list[object]()
    loop = asyncio.get_running_loop()

    def add(attempts: object) -> None:
        loop.call_soon_threadsafe(has_begun.set)
        released.wait(30)
        if fails:
            raise DataError("the disk is full")
        written.append(attempts)

    with PromptMemoryStore(tmp_path / "memory.sqlite") as memory:
        monkeypatch.setattr(memory, "add", add)
        files = RunFiles(memory)
        async with running_app(config("memory"), ScriptedClient(), files=files) as app:
            await app.loop.announce("trainer", 0, [replica("a")], None)
            session = submit(app, [RIGHT])
            await settled(lambda: session.num_open == 0)
            async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
                given_up = tasks.create_task(app.loop.announce("trainer", 1, [replica("a")], None))
                await has_begun.wait()
                given_up.cancel()
                again = tasks.create_task(app.loop.announce("trainer", 1, [replica("a")], None))
                await turns(20)
                assert not again.done()
                released.set()
            assert len(written) == (not fails)
    assert ("attempts are no longer remembered: the disk is full" in caplog.text) == fails


async def test_a_version_whose_announcement_is_repeated_counts_once_for_the_pace_of_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, noted = threading.Event(), list[float]()
    monkeypatch.setattr(FinishForecast, "note_announced", lambda _self, now_s: noted.append(now_s))
    with PromptMemoryStore(tmp_path / "memory.sqlite") as memory:
        monkeypatch.setattr(memory, "add", lambda _attempts: released.wait(30))
        files = RunFiles(memory)
        async with running_app(config("memory"), ScriptedClient(), files=files) as app:
            await app.loop.announce("trainer", 0, [replica("a")], None)
            session = submit(app, [RIGHT])
            await settled(lambda: session.num_open == 0)
            async with asyncio.TaskGroup() as tasks:
                given_up = tasks.create_task(app.loop.announce("trainer", 1, [replica("a")], None))
                await turns(20)
                given_up.cancel()
            released.set()
            await app.loop.announce("trainer", 1, [replica("a")], None)
    assert len(noted) == 2


async def test_a_memory_that_cannot_be_read_is_reported_and_loses_no_prompt(tmp_path: Path) -> None:
    rows = write_prompts(tmp_path / "train.parquet", prompt_rows([MIXED] * 8))
    settings = config("memory", data={"train_files": str(rows)})
    memory = PromptMemoryStore(tmp_path / "memory.sqlite")
    files, sets = RunFiles(memory), open_prompt_sets(settings)
    async with running_app(settings, ScriptedClient(), sets, files) as app:
        memory.close()
        await app.loop.announce("trainer", 0, [replica("a")], None)
        with pytest.raises(DataError, match="memory of prompts cannot be used"):
            await app.loop.batches.take(1, 0, 60)
        assert app.statistics()["reward/prompts_lost"] == 0
        accounts = app.ledger
        assert accounts.num_pending == accounts.num_submitted > 0


def _keys(contents: list[str]) -> list[str]:
    """The keys of the rows that `prompt_rows` makes."""
    prompts = [client_prompt(content) for content in contents]
    return [prompt_key(replace(one, ground_truth=str(i))) for i, one in enumerate(prompts)]


def test_a_prompt_that_is_passed_by_says_whether_it_was_dear_or_left_out_for_the_hard_ones() -> (
    None
):
    attempt = Attempt("key", 0, PromptHistory(8.0, 8.0, 100.0, 3, 1), first_samples=0)
    assert why_skipped(attempt).startswith("not worth its tokens: 8.0 of 16.0")
    assert why_skipped(replace(attempt, side=Side.PLAIN)).startswith("left out to keep the share")


async def test_a_service_that_ends_while_the_memory_is_read_loses_no_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_prompts(tmp_path / "train.parquet", prompt_rows([MIXED] * 8))
    settings = config("memory", data={"train_files": str(rows)})
    begun, released = threading.Event(), threading.Event()

    def read(_key: str) -> None:
        begun.set()
        released.wait(60)

    with PromptMemoryStore(tmp_path / "memory.sqlite") as memory:
        monkeypatch.setattr(memory, "read", read)
        files, sets = RunFiles(memory), open_prompt_sets(settings)
        try:
            async with running_app(settings, ScriptedClient(), sets, files) as app:
                await app.loop.announce("trainer", 0, [replica("a")], None)
                await settled(begun.is_set)
            assert app.statistics()["reward/prompts_lost"] == 0
            assert app.ledger.num_pending == app.sources.num_waiting > 0
        finally:  # else nothing ends the thread
            released.set()
