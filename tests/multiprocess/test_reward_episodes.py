"""The reward service plays episodes with a server of a user's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from sluice.types import ReplicaInfo, Rollout
from tests.support.environments import CALCULATOR, author_file
from tests.support.reward_process import reward_process
from tests.support.reward_scenarios import SAMPLES, WAIT_S, Announced, mixed
from tests.support.scripted_environment import ScriptedEnvironment, index_of, jar_policy, served
from tests.support.scripted_policy import scripted_policy


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
