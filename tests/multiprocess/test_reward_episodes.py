"""The reward service plays episodes with a server of a user's own, and with programs that lease
samples, also when it is killed between their turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.client import AsyncClient, RetryPolicy, RunAddress
from sluice.client.leases import LeasedAnswer, LeasedSample
from sluice.errors import NotFoundError
from sluice.launch.service_spec import free_ports
from sluice.types import ChatMessage, ReplicaInfo, Rollout, Tool, ToolCall, TrainBatch
from tests.support.environments import CALCULATOR, author_file
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_process import reward_process
from tests.support.reward_scenarios import SAMPLES, WAIT_S, Announced, mixed
from tests.support.scripted_environment import (
    LOOK,
    ScriptedEnvironment,
    index_of,
    jar_policy,
    read_by,
    served,
)
from tests.support.scripted_policy import scripted_policy
from tests.support.source_tree import ROOT
from tests.support.verl_tools import verl_tools

PATIENT = RetryPolicy(patience_s=WAIT_S)


async def test_a_service_with_addresses_trains_episodes_and_closes_each(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    world = ScriptedEnvironment(score=lambda episode: float(index_of(episode) == 0))
    config = configure(mixed(12), sluice__environment__call_timeout_s=WAIT_S)
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
    """A reward function that compares the last of all lines, tools' too, with the row's answer."""
    path = folder / "exact.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert solution_str.count('<tool_response>') == 3\n"
        "    return float(solution_str.splitlines()[-1] == ground_truth)\n"
    )
    return path


class Program:
    """Works on one leased sample: it looks once, and posts a reward."""

    def __init__(self, client: AsyncClient, lease: LeasedSample) -> None:
        self._leases, self.lease = client.leases(), lease
        self._messages = list(lease.messages)

    async def ask(self) -> LeasedAnswer:
        """The answer to the conversation so far; a second time it is the same request."""
        tools = (Tool(LOOK.name, LOOK.description, LOOK.parameters_json),)
        digest = str(len(self._messages))
        return await self._leases.chat(self.lease.lease_id, digest, self._messages, tools)

    def look(self, said: LeasedAnswer) -> None:
        """Add an answer, which makes a call, and its result."""
        (call,) = said.answer.tool_calls
        calls = (ToolCall(call.name, call.arguments, "call"),)
        self._messages += [
            ChatMessage("assistant", said.answer.content, calls),
            ChatMessage("tool", "12", tool_call_id="call"),
        ]

    async def end(self, reward: float) -> None:
        """Post it."""
        await self._leases.end(self.lease.lease_id, reward_value=reward)

    async def play(self, reward: float) -> None:
        """Both turns, and the reward."""
        self.look(await self.ask())
        assert (await self.ask()).answer.content == "Answer: 12"
        await self.end(reward)


async def programs(client: AsyncClient, count: int) -> list[Program]:
    """So many, as soon as there are samples for them."""
    found: list[Program] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < count:
            leases = await client.leases().take(count - len(found))
            found += [Program(client, lease) for lease in leases]
    return found


def agents_run(configure: Callable[..., Path], port: int) -> Path:
    """One prompt with two samples, on a port that the restarted service has, too."""
    return configure(
        mixed(1),
        data__train_batch_size=1,
        actor_rollout_ref__rollout__n=2,
        sluice__environment__agents=True,
        sluice__reward__endpoint__port=port,
    )


def check_trained(batch: TrainBatch, rewards: dict[int, float], prompts: list[list[int]]) -> None:
    """Each sample has both turns, as the policy read them, and its program's reward."""
    (group,) = batch.groups
    found = zip(group.rollouts, group.scores, strict=True)
    assert {one.sample_index: score.reward for one, score in found} == rewards
    for rollout in group.rollouts:
        assert [turn.parent for turn in rollout.turns] == [None, 0]
        for number in range(2):
            assert read_by(group.prompt_token_ids, rollout, number) in prompts


async def test_a_lease_outlives_a_kill_of_the_service_between_its_turns(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    (port,) = free_ports(["127.0.0.1"])
    config, folder = agents_run(configure, port), tmp_path / "model"
    folder.mkdir()
    async with (
        scripted_policy("qwen2.5", folder, jar_policy("C")) as (address, engine),
        AsyncClient(RunAddress(reward=f"127.0.0.1:{port}"), policy=PATIENT) as client,
        asyncio.TaskGroup() as tasks,
    ):
        replica = Announced(ReplicaInfo("rollout-0", "one", address, 8))
        async with reward_process(config) as service:
            await service.announce(3, [replica])
            (first,) = await programs(client, 1)
            said = await first.ask()
            service.process.kill()
            await service.wait()
        again = tasks.create_task(first.ask())  # nobody listens
        async with reward_process(config) as service:
            assert await again == said
            first.look(said)
            following = tasks.create_task(first.ask())  # its prompt has not started again
            await service.announce(3, [replica])
            assert (await following).turn == 1
            await first.end(1.0)
            (other,) = await programs(client, 1)
            await other.play(0.0)
            batch = await service.take(4, 3, WAIT_S)
            await service.acknowledge(batch, 4)
            status = await service.status()
            assert await service.stop() == 0
    rewards = {first.lease.sample_index: 1.0, other.lease.sample_index: 0.0}
    check_trained(batch, rewards, engine.prompts)
    assert len(engine.prompts) == 4  # nothing is sampled twice
    assert status.prompts_by_end["trained"] == 1
    assert status.prompts_submitted == 1
    uses = [v for name, v in status.statistics.items() if name.startswith("reward/tokens/")]
    assert sum(uses) == 2 * status.statistics["reward/tokens/received"]


async def test_a_sample_whose_end_was_posted_before_a_kill_needs_no_program_after_it(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    (port,) = free_ports(["127.0.0.1"])
    config, folder = agents_run(configure, port), tmp_path / "model"
    folder.mkdir()
    async with (
        scripted_policy("qwen2.5", folder, jar_policy("C")) as (address, engine),
        AsyncClient(RunAddress(reward=f"127.0.0.1:{port}"), policy=PATIENT) as client,
    ):
        replica = Announced(ReplicaInfo("rollout-0", "one", address, 8))
        async with reward_process(config) as service:
            await service.announce(3, [replica])
            ended, other = await programs(client, 2)
            await ended.play(1.0)
            said = await other.ask()
            # In order, too, a service that ends leaves its leases to the next one.
            assert await service.stop() == 0
        async with reward_process(config) as service:
            service.process.kill()
            await service.wait()
        async with reward_process(config) as service:
            await service.announce(3, [replica])
            other.look(said)
            await other.ask()
            await other.end(0.0)
            batch = await service.take(4, 3, WAIT_S)
            await service.acknowledge(batch, 4)
            await ended.end(1.0)  # repeated like one whose answer was lost
            assert await service.stop() == 0
    rewards = {ended.lease.sample_index: 1.0, other.lease.sample_index: 0.0}
    check_trained(batch, rewards, engine.prompts)
    assert len(engine.prompts) == 4


async def test_a_lease_whose_turns_are_too_old_after_a_restart_is_given_up_as_any_group(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    (port,) = free_ports(["127.0.0.1"])
    config, folder = agents_run(configure, port), tmp_path / "model"
    folder.mkdir()
    async with (
        scripted_policy("qwen2.5", folder, jar_policy("C")) as (address, _),
        AsyncClient(RunAddress(reward=f"127.0.0.1:{port}"), policy=PATIENT) as client,
    ):
        replica = Announced(ReplicaInfo("rollout-0", "one", address, 8))
        async with reward_process(config) as service:
            await service.announce(3, [replica])
            (old,) = await programs(client, 1)
            old.look(await old.ask())
            service.process.kill()
            await service.wait()
        async with reward_process(config) as service:
            await service.announce(4, [replica])
            with pytest.raises(NotFoundError):
                await old.ask()
            # Both samples are offered: the group starts again.
            assert len(await programs(client, 2)) == 2
            await service.status()
