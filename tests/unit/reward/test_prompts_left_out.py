"""Prompts that are too long are left out, and a trainer that waits in vain learns why."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from services.reward.app import PromptSets, RewardApp
from services.reward.generation.request import GroupRequest
from services.reward.prompts.dataset import training_files
from sluice.config.run import RunConfig
from sluice.errors import PromptTooLongError, SluiceError
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_app import InlineScorer, ScriptedClient, replica, settled


async def refuse_all(_name: str, _request: GroupRequest, _index: int) -> None:
    raise PromptTooLongError.of(9, 4)


async def test_when_all_rows_are_too_long_the_error_names_their_limit(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.parquet", prompt_rows(["a", "b", "c"]))
    tree = {
        "data": {"train_files": str(path), "train_batch_size": 2, "filter_overlong_prompts": True},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "trainer": {"total_epochs": 2},
    }
    config = msgspec.convert(tree, RunConfig)
    client = ScriptedClient(before_sample=refuse_all)
    app = RewardApp(config, PromptSets({"": training_files(config.data)}), InlineScorer(), client)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(app.loop.run())
        await app.loop.announce("trainer", 0, [replica("a")], None)
        with pytest.raises(SluiceError, match=r"data\.max_prompt_length") as error:
            await app.loop.batches.take(1, 0, 60)
        running.cancel()
    assert "6 left out as too long" in str(error.value)
    assert "total_epochs" not in str(error.value)


async def test_one_row_that_is_too_long_is_dropped_with_a_warning_and_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse_one(_name: str, request: GroupRequest, _index: int) -> None:
        if request.prompt.position == 1:
            raise PromptTooLongError.of(45016, 64)

    path = write_prompts(tmp_path / "a.parquet", prompt_rows(["answer=1 right=1"] * 3))
    tree = {
        "data": {"train_files": str(path), "train_batch_size": 2, "shuffle": False},
        "actor_rollout_ref": {"rollout": {"n": 2}},
    }
    config = msgspec.convert(tree, RunConfig)
    assert config.data.truncation == "error"
    client = ScriptedClient(before_sample=refuse_one)
    app = RewardApp(config, PromptSets({"": training_files(config.data)}), InlineScorer(), client)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(app.loop.run())
        await app.loop.announce("trainer", 0, [replica("a")], None)
        await settled(lambda: app.counters.totals().get("reward/prompts_overlong") == 1)
        assert app.loop.batches.error is None
        running.cancel()
    (line,) = [line for line in caplog.messages if "45016 tokens" in line]
    assert "a.parquet, row 1: prompt: 45016 tokens exceed data.max_prompt_length=64" in line
