"""The first turns of a group's episodes are one request, which late environments do not hold up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.reward.episodes import loop
from services.reward.episodes.drivers import EpisodeTask
from services.reward.episodes.loop import EpisodeGenerator
from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.replica_queue import ReplicaQueue
from services.reward.generation.request import (
    GroupFailedError,
    GroupRequest,
    OverlongPromptError,
)
from services.reward.generation.stream import CollectedSamples
from sluice.algorithm.episode_rules import EpisodeRules, Observation
from sluice.api.environment.v1 import environment_pb2 as environment
from sluice.types import (
    Answer,
    ChatMessage,
    EpisodeEnd,
    FailureKind,
    FinishReason,
    Rollout,
    Scored,
)
from tests.support.reward_app import ScriptedClient, replica
from tests.support.scripted_environment import (
    LOOK,
    ScriptedEnvironment,
    eventually,
    failure_of,
    group_request,
    index_of,
    jar_policy,
    playing,
    read_by,
    user_says,
)
from tests.support.scripted_rollout import rollout_of


@pytest.fixture(autouse=True)
def _first_turns_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, unless a test lets the time pass."""
    monkeypatch.setattr(loop, "PATIENCE_S", 100.0)


ASKED = (ChatMessage("user", "Add jars."),)


def short_answer(_name: str, _request: GroupRequest, index: int) -> Rollout:
    return rollout_of("Answer: 1", index, 0, 1, 8)


class ReadyEnvironments:
    """Environments that answer at once, and are done at the first answer."""

    def begin(self, _task: EpisodeTask) -> ReadyEnvironments:
        return self

    async def open(self) -> Observation:
        return Observation()

    async def step(self, _turn: int, _answer: Answer, _finish: FinishReason) -> Observation:
        return Observation(done=True)

    async def close(self) -> Scored | None:
        return Scored(1.0, 1.0, {"acc": 1.0})

    async def abandon(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("num_answered", [0, 1])
@pytest.mark.usefixtures("waits_take_no_time")
async def test_no_replica_samples_a_first_turn_whose_episodes_have_no_time_left(
    num_answered: int,
) -> None:
    async def hold(_name: str, _request: GroupRequest, index: int) -> None:
        if index >= num_answered:
            await asyncio.Event().wait()

    queue, replicas = ReplicaQueue(1.0), ScriptedClient(before_sample=hold, make=short_answer)
    dispatcher = GroupDispatcher(replicas, queue, max_attempts=2)
    await dispatcher.announce([replica("a")])
    rules = EpisodeRules(max_sequence_tokens=4000, timeout_s=1.0)
    generator = EpisodeGenerator(dispatcher, ReadyEnvironments(), rules, by_default=True, seed=7)
    async with asyncio.timeout(30):
        group = await generator.generate(group_request(2))
    for answered in group.rollouts[:num_answered]:
        assert answered.end is EpisodeEnd.DONE
    for late in group.rollouts[num_answered:]:
        assert "sampling turn 0" in failure_of(late).detail
    assert replicas.cancelled == ["p0"]
    assert not queue.is_busy


async def test_a_first_turn_is_sampled_while_one_of_its_samples_waits_for_it() -> None:
    gate = asyncio.Event()

    async def hold(_name: str, _request: GroupRequest, _index: int) -> None:
        await gate.wait()

    client = ScriptedClient(before_sample=hold, make=short_answer)
    dispatcher = GroupDispatcher(client, ReplicaQueue(1.0), max_attempts=2)
    await dispatcher.announce([replica("a")])
    async with asyncio.TaskGroup() as tasks:
        first = loop.FirstTurns(tasks, dispatcher, group_request(2), "batch")
        turns = [tasks.create_task(first.turn(index, ASKED, ())) for index in range(2)]
        await eventually(lambda: bool(client.calls))
        turns[0].cancel()
        await eventually(turns[0].done)
        gate.set()
    assert turns[1].result().replica == "a"
    assert not client.cancelled


async def test_a_sample_whose_environment_never_opens_fails_and_the_others_begin(
    tmp_path: Path,
) -> None:
    async def refuse_first(call: str, episode_id: str, context: Any) -> None:
        if call == "open" and index_of(episode_id) == 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    world = ScriptedEnvironment(before=refuse_first)
    async with playing(tmp_path, jar_policy("C"), world) as played:
        group = await played.generator.generate(group_request(2))
    assert failure_of(group.rollouts[0]).kind is FailureKind.ENVIRONMENT
    assert group.rollouts[0].num_tokens == 0
    assert group.rollouts[1].end is EpisodeEnd.DONE


async def test_a_group_none_of_whose_episodes_begins_fails_by_its_environment(
    tmp_path: Path,
) -> None:
    world = ScriptedEnvironment()
    async with playing(tmp_path, jar_policy("C"), world, call_timeout_s=0.3) as played:
        world.address = ""
        with pytest.raises(GroupFailedError, match=r"none of 2 episodes.*none is up") as found:
            await played.generator.generate(group_request(2))
    assert found.value.kind is FailureKind.ENVIRONMENT


async def test_samples_with_another_first_prompt_are_roots_of_their_own(tmp_path: Path) -> None:
    def opening(request: environment.OpenRequest) -> environment.Observation:
        extra = user_says("Hurry.").messages if index_of(request.episode_id) == 1 else ()
        return environment.Observation(messages=extra, tools=[LOOK])

    async with playing(tmp_path, jar_policy("C"), ScriptedEnvironment(opening=opening)) as played:
        group = await played.generator.generate(group_request(3))
    roots = [rollout.turns[0].is_new_root for rollout in group.rollouts]
    assert sorted([roots[0], roots[1]]) == [False, True]
    assert roots[0] == roots[2]
    for rollout in group.rollouts:
        assert read_by(group.prompt_token_ids, rollout, 0) in played.engine.prompts
    seen = group.rollouts[1].turns[0].observed
    assert seen[-1].content == "Hurry."


async def test_waiting_for_siblings_is_no_time_of_the_model(tmp_path: Path) -> None:
    async def open_late(call: str, episode_id: str, _context: Any) -> None:
        if call == "open" and index_of(episode_id) == 1:
            await asyncio.sleep(0.2)

    world = ScriptedEnvironment(before=open_late)
    async with playing(tmp_path, jar_policy("C"), world) as played:
        group = await played.generator.generate(group_request(2))
    early, late = (rollout.turns[0].seconds for rollout in group.rollouts)
    assert early["queue"] > late["queue"]


async def test_an_environment_that_opens_late_does_not_hold_up_its_siblings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skip_time: Callable[[float], None]
) -> None:
    waiting, turn = set[int](), loop.FirstTurns.turn

    async def noted(first: Any, index: int, *arguments: Any) -> Any:
        waiting.add(index)
        return await turn(first, index, *arguments)

    async def open_last(call: str, episode_id: str, _context: Any) -> None:
        while call == "open" and index_of(episode_id) == 1 and len(world.closed) < 2:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(loop.FirstTurns, "turn", noted)
    world = ScriptedEnvironment(before=open_last)
    async with (
        playing(tmp_path, jar_policy("C"), world, call_timeout_s=240.0) as played,
        asyncio.TaskGroup() as tasks,
    ):
        playing_three = tasks.create_task(played.generator.generate(group_request(3)))
        await eventually(lambda: waiting == {0, 2})
        skip_time(loop.PATIENCE_S)
    group = playing_three.result()
    assert [rollout.end for rollout in group.rollouts] == [EpisodeEnd.DONE] * 3
    # One request for the first turns of the two, one for the late one, and one for each second.
    assert len(played.engine.prompts) == 5


async def test_a_row_that_is_too_long_is_left_out_though_an_environment_opens_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PATIENCE_S", 0.01)

    async def open_last(call: str, episode_id: str, _context: Any) -> None:
        if call == "open" and index_of(episode_id) == 1:
            await asyncio.Event().wait()

    async def refuse(_collected: CollectedSamples) -> None:
        raise OverlongPromptError("a.parquet, row 7: prompt: 9 tokens exceed 4")

    async with playing(tmp_path, jar_policy("C"), ScriptedEnvironment(before=open_last)) as played:
        monkeypatch.setattr(played.dispatcher, "collect", refuse)
        with pytest.raises(OverlongPromptError):
            await played.generator.generate(group_request(3))


async def test_a_first_prompt_that_cannot_be_read_fails_its_sample_alone(tmp_path: Path) -> None:
    def opening(request: environment.OpenRequest) -> environment.Observation:
        is_long = index_of(request.episode_id) == 1
        extra = user_says("Hurry. " * 4000).messages if is_long else ()
        return environment.Observation(messages=extra, tools=[LOOK])

    world = ScriptedEnvironment(opening=opening)
    async with playing(tmp_path, jar_policy("C"), world) as played:
        group = await played.generator.generate(group_request(3))
    failed = failure_of(group.rollouts[1])
    assert failed.kind is FailureKind.ENVIRONMENT
    assert "cannot be read by the policy" in failed.detail
    assert [group.rollouts[index].end for index in (0, 2)] == [EpisodeEnd.DONE] * 2
