"""Prompts that are too long are left out, and whoever waits for a batch in vain is told so."""

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
from tests.support.reward_app import InlineScorer, ScriptedClient, replica


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
    app = RewardApp(config, PromptSets(training_files(config.data), None), InlineScorer(), client)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(app.loop.run())
        await app.loop.announce("trainer", 0, [replica("a")], None)
        with pytest.raises(SluiceError, match=r"data\.max_prompt_length") as error:
            await app.loop.batches.take(1, 0, 5)
        running.cancel()
    assert "6 left out as too long" in str(error.value)
    assert "total_epochs" not in str(error.value)
