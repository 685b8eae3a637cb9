"""The reward service plays episodes with a server of a user's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.types import ReplicaInfo, Rollout
from tests.support.environments import CALCULATOR, author_file
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_process import reward_process
from tests.support.reward_scenarios import SAMPLES, WAIT_S, Announced, mixed
from tests.support.scripted_environment import ScriptedEnvironment, index_of, jar_policy, served
from tests.support.scripted_policy import scripted_policy
from tests.support.source_tree import ROOT
from tests.support.verl_tools import verl_tools


async def test_a_service_with_addresses_trains_episodes_and_closes_each(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    world = ScriptedEnvironment(score=lambda episode: float(index_of(episode) == 0))
    config = configure(mixed(12), sluice__environment__call_timeout_s=20.0)
    folder = tmp_path / "model"
    folder.mkdir()
    async with (
        served(world),
        scripted_policy("qwen2.5", folder, jar_policy("C", "F")) as (address, engine),
        reward_process(config, f"sluice.environment.addresses=[{world.address}]") as service,
    ):
        replica = Announced(ReplicaInfo("rollout-0", "one", address, 8))
        await service.announce(3, [replica])
        batch = await service.take(4, 3, WAIT_S)
        prompts = set(map(tuple, engine.prompts))
        await service.acknowledge(batch, 4)
        assert await service.stop() == 0
    rollouts: list[Rollout] = [one for group in batch.groups for one in group.rollouts]
    assert all(len(group.rollouts) == SAMPLES for group in batch.groups)
    assert [s.score for s in batch.groups[0].scores] == [1.0] + [0.0] * (SAMPLES - 1)
    assert batch.statistics["train/episode_turns_mean"] == 3.0
    assert batch.statistics["train/tool_calls/look"] > 0
    assert all(tuple(group.prompt_token_ids.tolist()) in prompts for group in batch.groups)
    assert min(rollout.num_tokens for rollout in rollouts) > 0
    async with asyncio.timeout(WAIT_S):
        while len(world.closed) < len(world.opened):
            await asyncio.sleep(0.01)


async def test_a_service_with_a_path_trains_the_calculator_in_processes_of_its_own(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    source = author_file(tmp_path, CALCULATOR.replace("self.truth)", "'1786')"))
    folder = tmp_path / "model"
    folder.mkdir()

    def policy(prompt: str) -> str:
        if "<tool_response>" not in prompt:
            arguments = '{"name": "calc", "arguments": {"expression": "47 * 38"}}'
            return f"<tool_call>\n{arguments}\n</tool_call>"
        return "1786" if "<tool_response>\n1786" in prompt else "lost"

    config = configure(mixed(12), algorithm__filter_groups__enable=False)
    async with (
        scripted_policy("qwen2.5", folder, policy) as (address, _),
        reward_process(
            config, f"sluice.environment.path={source.path}", "sluice.environment.workers=2"
        ) as service,
    ):
        await service.announce(3, [Announced(ReplicaInfo("rollout-0", "one", address, 8))])
        batch = await service.take(4, 3, WAIT_S)
        assert await service.stop() == 0
    # The policy says the product only after it has read it.
    assert all(score.score == 1.0 for group in batch.groups for score in group.scores)
    assert batch.statistics["train/tool_calls/calc"] > 0


def called(name: str, **arguments: object) -> str:
    """What a policy writes to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def notes_and_sums(prompt: str) -> str:
    """A policy that keeps two notes with verl's stateful tool, adds, and says what it read."""
    read = [one.partition("\n")[0] for one in prompt.split("<tool_response>\n")[1:]]
    number = prompt.partition("answer=")[2].split()[0]
    if len(read) < 2:
        return called("note", text=f"{number}-{len(read)}")
    if len(read) < 3:
        return called("calculator", expression=f"{number} + 0 * ({len(read[1])})")
    return read[2] if read[1].startswith(f"['{number}', '{number}-0', '{number}-1']") else "lost"


async def test_verls_function_tools_and_classes_play_unchanged_in_processes_of_their_own(
    tmp_path: Path, configure: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both are verl's words: a file of functions, and a YAML of classes found by their module.
    source = verl_tools(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    folder = tmp_path / "model"
    folder.mkdir()
    rows = prompt_rows(mixed(12))
    for number, row in enumerate(rows):
        first = {"create_kwargs": {"first": str(number)}}
        row["extra_info"] = {"index": number, "tools_kwargs": {"note": first}}
    config = configure(mixed(12), algorithm__filter_groups__enable=False)
    write_prompts(tmp_path / "train.parquet", rows, row_group_size=16)
    turns = "actor_rollout_ref.rollout.multi_turn"
    settings = [
        "data.max_response_length=2048",
        f"{turns}.enable=true",
        f"{turns}.function_tool_path={source.function_tool_path}",
        f"{turns}.tool_config_path={source.tool_config_path}",
        f"reward.custom_reward_function.path={exact_scorer(tmp_path)}",
    ]
    async with (
        scripted_policy("qwen2.5", folder, notes_and_sums) as (address, _),
        reward_process(config, *settings) as service,
    ):
        await service.announce(3, [Announced(ReplicaInfo("rollout-0", "one", address, 8))])
        batch = await service.take(4, 3, WAIT_S)
        assert await service.stop() == 0
    assert all(score.score == 1.0 for group in batch.groups for score in group.scores)
    num_notes = batch.statistics["train/tool_calls/note"]
    assert num_notes == 2 * batch.statistics["train/tool_calls/calculator"] > 0
    assert batch.statistics["train/environments/tool_agent/tool_errors"] == 0.0


def exact_scorer(folder: Path) -> Path:
    """A reward function that compares the last answer with the row's."""
    path = folder / "exact.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str.strip() == ground_truth)\n"
    )
    return path
