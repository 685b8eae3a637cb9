"""Calls of an episode: which are made, and by which ids results answer them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.environment.v1 import environment_pb2 as environment
from sluice.types import EpisodeEnd
from tests.support.scripted_environment import (
    ScriptedEnvironment,
    call_of,
    group_request,
    playing,
    tool_says,
)

KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
    '<|tool_call_argument_begin|>{"jar": "C"}<|tool_call_end|><|tool_calls_section_end|>'
)


def looks_into_two_jars(_episode: str, turn: int, answer: common.Answer) -> Any:
    if turn == 2:
        return environment.Observation(done=True)
    return tool_says(str(turn), answer.tool_calls[0].id)


async def test_results_have_the_ids_that_the_policy_wrote(tmp_path: Path) -> None:
    world = ScriptedEnvironment(respond=looks_into_two_jars)
    async with playing(tmp_path, lambda _: KIMI_CALL, world, family="kimi") as played:
        (rollout,) = (await played.generator.generate(group_request(1))).rollouts
    results = [turn.observed[0] for turn in rollout.turns[1:]]
    assert [one.tool_call_id for one in results] == ["functions.look:0", "functions.look:1"]
    assert [turn.parent for turn in rollout.turns] == [None, 0, 1]


async def test_the_calls_of_another_conversation_of_an_episode_do_not_count(tmp_path: Path) -> None:
    ids: list[str] = []

    def respond(_episode: str, turn: int, answer: common.Answer) -> environment.Observation:
        ids.append(answer.tool_calls[0].id)
        if turn == 1:
            return environment.Observation(done=True)
        other = common.ChatMessage(role="user", content="Another agent's question.")
        return environment.Observation(messages=[other], is_whole=True)

    world = ScriptedEnvironment(respond=respond)
    async with playing(tmp_path, lambda _: KIMI_CALL, world, family="kimi") as played:
        (rollout,) = (await played.generator.generate(group_request(1))).rollouts
    assert [turn.parent for turn in rollout.turns] == [None, None]
    assert ids == ["functions.look:0"] * 2


async def test_calls_and_results_have_the_same_ids_in_a_new_root(tmp_path: Path) -> None:
    written = (
        '<|channel>thought\nhm<channel|><|tool_call>call:look{jar:<|"|>C<|"|>}<tool_call|>'
        '<|tool_call>call:peek{jar:<|"|>C<|"|>}<tool_call|>'
    )
    world = ScriptedEnvironment(respond=looks_into_two_jars)
    async with playing(tmp_path, lambda _: written, world, family="gemma4") as played:
        (rollout,) = (await played.generator.generate(group_request(1))).rollouts
        encoder: Any = played.engine._encoder
        read = encoder._decode_with_control(played.engine.prompts[2])
    assert rollout.end is EpisodeEnd.DONE, rollout.outcome
    assert rollout.num_roots == 3  # the template leaves out thoughts
    assert re.findall("response:[a-z]+", read) == ["response:look"] * 2


async def test_a_whole_conversation_has_the_calls_that_were_made(tmp_path: Path) -> None:
    def respond(_episode: str, turn: int, answer: common.Answer) -> environment.Observation:
        if turn == 1:
            return environment.Observation(done=True)
        row = common.ChatMessage(role="user", content="Add jars.")
        said = common.ChatMessage(role="assistant", tool_calls=answer.tool_calls)
        (call,) = answer.tool_calls
        result = common.ChatMessage(role="tool", content="6", tool_call_id=call.id)
        return environment.Observation(messages=[row, said, result], is_whole=True)

    def policy(prompt: str) -> str:
        return "Seen." if "tool_response>\n" in prompt else f"{call_of('C')}\n{call_of('D')}"

    async with playing(tmp_path, policy, ScriptedEnvironment(respond=respond)) as played:
        (rollout,) = (await played.generator.generate(group_request(1))).rollouts
    assert [turn.parent for turn in rollout.turns] == [None, 0]
