"""Episodes: what is trained is what was read; failures stay with their sample; nothing is left
open."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from transformers import AutoTokenizer

from services.reward.episodes import client, loop
from services.reward.generation.request import (
    GroupProgress,
)
from services.reward.generation.stream import CollectedSamples
from services.reward.grading.grader import Grader
from sluice.algorithm.groups.stragglers import StragglerRules
from sluice.algorithm.overlong import OverlongShaping
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.environment.v1 import environment_pb2 as environment
from sluice.telemetry.samples import transcript
from sluice.types import (
    EpisodeEnd,
    FailureKind,
    FinishReason,
    Scored,
    Tool,
)
from tests.support.reward_app import InlineScorer
from tests.support.scripted_environment import (
    LOOK,
    ScriptedEnvironment,
    call_of,
    eventually,
    failure_of,
    group_request,
    index_of,
    jar_policy,
    jars,
    path_of,
    playing,
    read_by,
    tool_says,
    user_says,
)


@pytest.fixture(autouse=True)
def _first_turns_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, unless a test lets the time pass."""
    monkeypatch.setattr(loop, "PATIENCE_S", 100.0)


async def test_the_tokens_trained_are_the_tokens_read_and_sampled(tmp_path: Path) -> None:
    world = ScriptedEnvironment()
    async with playing(tmp_path, jar_policy("C", "F"), world) as played:
        group = await played.generator.generate(group_request(2))
    # One request for both first turns, then one for each turn of each sample.
    assert len(played.engine.prompts) == 1 + 2 * 2
    assert group.prompt_token_ids.tolist() == played.engine.prompts[0]
    read: Counter[tuple[int, ...]] = Counter()
    for rollout in group.rollouts:
        assert [turn.parent for turn in rollout.turns] == [None, 0, 1]
        assert (rollout.end, rollout.num_roots) == (EpisodeEnd.DONE, 1)
        assert rollout.turns[0].context.size == 0
        assert rollout.text == "Answer: 1"
        for number in range(1, 3):
            read[tuple(read_by(group.prompt_token_ids, rollout, number))] += 1
    assert read == Counter(map(tuple, played.engine.prompts[1:]))
    assert world.closed == dict.fromkeys((one.episode_id for one in world.opened), False)


async def test_the_environment_gets_the_row_one_seed_and_every_answer_by_number(
    tmp_path: Path,
) -> None:
    world = ScriptedEnvironment()
    async with playing(tmp_path, jar_policy("C"), world) as played:
        await played.generator.generate(group_request(2))
    first, second = world.opened
    assert first.seed == second.seed != 0
    assert first.episode_id != second.episode_id
    assert first.messages[0].content == "Add jars."
    assert first.row_json == (
        '{"data_source": "jars", "ground_truth": "1", "extra_info": {"index": 3}}'
    )
    for index in (0, 1):
        called, said = world.of_sample(index)
        assert (called.turn, said.turn) == (0, 1)
        assert called.answer.tool_calls[0].arguments_json == '{"jar": "C"}'
        assert called.finish_reason == common.FINISH_REASON_STOP


async def test_a_failed_environment_costs_its_sample_alone(tmp_path: Path) -> None:
    async def break_one(call: str, episode_id: str, context: Any) -> None:
        if call == "step" and index_of(episode_id) == 1:
            await context.abort(grpc.StatusCode.INTERNAL, "the jar fell")

    world = ScriptedEnvironment(before=break_one)
    async with playing(tmp_path, jar_policy("C"), world) as played:
        group = await played.generator.generate(group_request(3))
    assert [rollout.end for rollout in group.rollouts] == [EpisodeEnd.DONE, None, EpisodeEnd.DONE]
    failed = failure_of(group.rollouts[1])
    assert failed.kind is FailureKind.ENVIRONMENT
    assert "environment at unix:" in failed.detail
    assert "the jar fell" in failed.detail
    assert group.rollouts[1].num_tokens > 0
    assert Counter(world.closed.values()) == {False: 2, True: 1}


async def test_an_environment_that_is_down_is_waited_for(tmp_path: Path) -> None:
    asked: list[str] = []

    async def come_up(call: str, episode_id: str, context: Any) -> None:
        asked.append(episode_id)
        if call == "open" and len(asked) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")

    world = ScriptedEnvironment(before=come_up)
    async with playing(tmp_path, jar_policy("C"), world) as played:
        address, world.address = world.address, ""
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(played.generator.generate(group_request(1)))
            await asyncio.sleep(0.05)
            assert not world.opened
            world.address = address
    assert task.result().rollouts[0].end is EpisodeEnd.DONE
    # Each attempt is another episode: the server may have begun the first one.
    assert len({one.episode_id for one in world.opened}) == len(world.opened) == 2


async def test_a_step_whose_connection_breaks_is_tried_again_with_the_same_turn(
    tmp_path: Path,
) -> None:
    broken: list[str] = []

    async def break_once(call: str, _episode_id: str, context: Any) -> None:
        if call == "step" and not broken:
            broken.append(call)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")

    world = ScriptedEnvironment(before=break_once)
    async with playing(tmp_path, jar_policy("C"), world) as played:
        group = await played.generator.generate(group_request(1))
    assert [step.turn for step in world.steps] == [0, 0, 1]
    assert len(group.rollouts[0].turns) == 2
    assert group.rollouts[0].end is EpisodeEnd.DONE


async def test_an_episode_without_time_left_fails_and_names_what_it_waited_for(
    tmp_path: Path, skip_time: Callable[[float], None]
) -> None:
    async def hang_one(call: str, episode_id: str, _context: Any) -> None:
        if call == "step" and index_of(episode_id) == 0:
            await asyncio.Event().wait()

    world = ScriptedEnvironment(before=hang_one)
    async with (
        playing(tmp_path, jar_policy("C"), world, timeout_s=600.0) as played,
        asyncio.TaskGroup() as tasks,
    ):
        playing_two = tasks.create_task(played.generator.generate(group_request(2)))
        await eventually(lambda: bool(world.of_sample(0)) and len(world.closed) == 1)
        skip_time(600.0)
    group = playing_two.result()
    failed = failure_of(group.rollouts[0])
    assert failed.kind is FailureKind.ENVIRONMENT
    assert "sluice.environment.episode_timeout_s=600" in failed.detail
    assert failed.detail.endswith("while answering turn 0")
    assert group.rollouts[1].end is EpisodeEnd.DONE


async def test_a_call_that_takes_too_long_fails_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = client.unary_call

    async def short_steps(*arguments: Any, phase: str, deadline_s: float, **named: Any) -> Any:
        time_s = deadline_s / 300 if phase == "answering the policy" else deadline_s
        return await call(*arguments, phase=phase, deadline_s=time_s, **named)

    monkeypatch.setattr(client, "unary_call", short_steps)

    async def hang(call: str, _episode_id: str, _context: Any) -> None:
        if call == "step":
            await asyncio.Event().wait()

    world = ScriptedEnvironment(before=hang)
    async with playing(tmp_path, jar_policy("C"), world, call_timeout_s=60.0) as played:
        group = await played.generator.generate(group_request(1))
    failed = failure_of(group.rollouts[0])
    assert "no answer within 0.2 s while answering the policy" in failed.detail
    assert list(world.closed.values()) == [True]


async def test_a_cancelled_group_closes_its_episodes_and_frees_its_slots(tmp_path: Path) -> None:
    async def hang(call: str, _episode_id: str, _context: Any) -> None:
        if call == "step":
            await asyncio.Event().wait()

    world = ScriptedEnvironment(before=hang)
    async with playing(tmp_path, jar_policy("C"), world) as played:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(played.generator.generate(group_request(3)))
            await eventually(lambda: len(world.steps) == 3)
            task.cancel()
        assert list(world.closed.values()) == [True] * 3
        assert played.queue.num_free_sequences(0) == 8


async def test_a_group_that_is_over_aborts_the_episodes_that_wait(
    tmp_path: Path, skip_time: Callable[[float], None]
) -> None:
    async def hang_one(call: str, episode_id: str, _context: Any) -> None:
        if call == "step" and index_of(episode_id) == 0:
            await asyncio.Event().wait()

    world = ScriptedEnvironment(before=hang_one)
    progress = GroupProgress(rules=StragglerRules(group_deadline_s=600.0))
    async with (
        playing(tmp_path, jar_policy("C"), world, timeout_s=6000.0) as played,
        asyncio.TaskGroup() as tasks,
    ):
        request = group_request(2, progress=progress)
        playing_two = tasks.create_task(played.generator.generate(request))
        await eventually(lambda: bool(world.of_sample(0)) and progress.has_finished_samples)
        skip_time(600.0)
    group = playing_two.result()
    assert failure_of(group.rollouts[0]).kind is FailureKind.ABORTED
    assert group.rollouts[1].end is EpisodeEnd.DONE
    assert Counter(world.closed.values()) == {True: 1, False: 1}


@pytest.mark.parametrize(
    ("limits", "end", "turns"),
    [
        ({"max_assistant_turns": 2}, EpisodeEnd.MAX_TURNS, 2),
        ({"max_sequence_tokens": 260}, EpisodeEnd.MAX_TOKENS, None),
        ({"max_response_tokens": 150}, EpisodeEnd.MAX_TOKENS, None),
    ],
)
async def test_limits_end_an_episode_and_it_is_graded(
    tmp_path: Path, limits: dict[str, int], end: EpisodeEnd, turns: int | None
) -> None:
    world = ScriptedEnvironment()
    async with playing(tmp_path, jar_policy(*"CDEFGHIJKLMNOPQRSTUVW"), world, **limits) as played:
        group = await played.generator.generate(group_request(1))
    (rollout,) = group.rollouts
    assert rollout.end is end
    assert isinstance(rollout.outcome, Scored)
    assert turns is None or len(rollout.turns) == turns
    last = read_by(group.prompt_token_ids, rollout, len(rollout.turns) - 1)
    size = len(last) + rollout.turns[-1].token_ids.size
    assert size <= limits.get("max_sequence_tokens", 4000)
    assert size - len(group.prompt_token_ids) <= limits.get("max_response_tokens", 4000)
    assert len(world.steps) == len(rollout.turns)
    assert list(world.closed.values()) == [False]


async def test_calls_that_cannot_be_read_end_an_episode_after_some(tmp_path: Path) -> None:
    world = ScriptedEnvironment(respond=lambda *_: user_says("Write a call."))
    async with playing(
        tmp_path, lambda _: "<tool_call>\nlook C", world, max_invalid_calls=2
    ) as played:
        group = await played.generator.generate(group_request(1))
    assert group.rollouts[0].end is EpisodeEnd.INVALID_CALLS
    assert [bool(step.answer.tool_error) for step in world.steps] == [True, True]


async def test_turns_of_users_are_limited_and_the_last_is_answered(tmp_path: Path) -> None:
    world = ScriptedEnvironment(
        opening=lambda _: environment.Observation(), respond=lambda *_: user_says("And?")
    )
    async with playing(tmp_path, lambda _: "More.", world, max_user_turns=2) as played:
        group = await played.generator.generate(group_request(1))
    assert group.rollouts[0].end is EpisodeEnd.MAX_TURNS
    assert [step.answer.content for step in world.steps] == ["More."] * 3


async def test_a_long_text_of_a_tool_is_cut_and_further_calls_are_left_out(tmp_path: Path) -> None:
    def respond(_episode: str, _turn: int, answer: common.Answer) -> environment.Observation:
        return tool_says("0123456789") if answer.tool_calls else environment.Observation(done=True)

    def policy(prompt: str) -> str:
        return "done" if "tool_response" in prompt else f"{call_of('C')}\n{call_of('D')}"

    world = ScriptedEnvironment(respond=respond)
    async with playing(tmp_path, policy, world, max_tool_response_length=4) as played:
        group = await played.generator.generate(group_request(1))
    assert len(world.steps[0].answer.tool_calls) == 1
    (seen,) = group.rollouts[0].turns[1].observed
    assert seen.content == "01...(truncated)...89"


async def test_all_sequences_of_an_episode_together_fit_a_pass_of_the_trainer(
    tmp_path: Path,
) -> None:
    world = ScriptedEnvironment(
        respond=lambda *_: environment.Observation(
            messages=[common.ChatMessage(role="user", content="Begin again.")], is_whole=True
        )
    )
    letters = "CDEFGHIJKLMNOPQRSTUVW"
    async with playing(
        tmp_path, jar_policy(*letters), world, max_trained_tokens=600, max_assistant_turns=20
    ) as played:
        group = await played.generator.generate(group_request(1))
    (rollout,) = group.rollouts
    assert rollout.num_roots == len(rollout.turns) > 1
    assert rollout.end is EpisodeEnd.MAX_TOKENS
    # The first sequence has the group's prompt.
    read_and_sampled = rollout.num_context_tokens + rollout.num_tokens
    assert len(group.prompt_token_ids) + read_and_sampled <= 600


async def test_a_template_that_rewrites_history_begins_a_new_root_and_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def policy(_prompt: str) -> str:
        return "<think>\nhm\n</think>\n\nMore."

    def respond(_episode: str, turn: int, _answer: common.Answer) -> environment.Observation:
        return user_says("And?") if turn < 2 else environment.Observation(done=True)

    world = ScriptedEnvironment(opening=lambda _: environment.Observation(), respond=respond)
    async with playing(tmp_path, policy, world, family="qwen3") as played:
        group = await played.generator.generate(group_request(2))
        assert played.generator.notes.num_rewritten == 4
    for rollout in group.rollouts:
        assert rollout.num_roots == 3
        assert [turn.is_new_root for turn in rollout.turns] == [False, True, True]
        for number in range(3):
            read = read_by(group.prompt_token_ids, rollout, number)
            assert read in played.engine.prompts
    warnings = [one for one in caplog.records if "new roots" in one.getMessage()]
    assert len(warnings) == 1


async def test_a_whole_conversation_continues_the_turn_that_it_begins_with_or_is_a_root(
    tmp_path: Path,
) -> None:
    def message(role: str, content: str, **further: Any) -> common.ChatMessage:
        return common.ChatMessage(role=role, content=content, **further)

    row = message("user", "Add jars.")
    said = message(
        "assistant",
        "",
        tool_calls=[common.ToolCall(id="other", name="look", arguments_json='{ "jar":"C"}')],
    )
    conversations = [
        [row, said, message("tool", "6", tool_call_id="other")],  # continues turn 0
        [row, said, message("tool", "7", tool_call_id="other")],  # a branch of turn 0
        [message("user", "Summary: C holds 6.")],  # begins again
    ]

    def respond(_episode: str, turn: int, _answer: common.Answer) -> environment.Observation:
        if turn == len(conversations):
            return environment.Observation(done=True)
        return environment.Observation(messages=conversations[turn], is_whole=True)

    def policy(prompt: str) -> str:
        seen = "tool_response>\n" in prompt or "Summary" in prompt
        return "Seen." if seen else call_of("C")

    world = ScriptedEnvironment(respond=respond)
    async with playing(tmp_path, policy, world) as played:
        group = await played.generator.generate(group_request(1))
    (rollout,) = group.rollouts
    assert [turn.parent for turn in rollout.turns] == [None, 0, 0, None]
    assert [turn.is_new_root for turn in rollout.turns] == [False, False, False, True]
    for number, prompt in enumerate(played.engine.prompts):
        assert read_by(group.prompt_token_ids, rollout, number) == prompt


async def test_a_conversation_with_other_tools_is_a_root_since_its_prompt_has_other_tokens(
    tmp_path: Path,
) -> None:
    row = common.ChatMessage(role="user", content="Add jars.")
    said = common.ChatMessage(
        role="assistant", tool_calls=[common.ToolCall(name="look", arguments_json='{"jar":"C"}')]
    )
    six = common.ChatMessage(role="tool", content="6")
    other = common.Tool(name="peek", parameters_json=LOOK.parameters_json)

    def respond(_episode: str, turn: int, _answer: common.Answer) -> environment.Observation:
        if turn == 1:
            return environment.Observation(done=True)
        return environment.Observation(messages=[row, said, six], is_whole=True, tools=[other])

    world = ScriptedEnvironment(respond=respond)
    async with playing(tmp_path, jar_policy("C"), world) as played:
        group = await played.generator.generate(group_request(1))
    (rollout,) = group.rollouts
    assert [turn.parent for turn in rollout.turns] == [None, None]
    for number, prompt in enumerate(played.engine.prompts):
        assert read_by(group.prompt_token_ids, rollout, number) == prompt


async def test_the_turns_of_a_lone_sample_share_what_the_replica_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str] = []
    async with playing(tmp_path, jar_policy("C"), ScriptedEnvironment()) as played:
        collect = played.dispatcher.collect

        async def note(collected: CollectedSamples) -> None:
            assert collected.request.turn is not None
            named.append(collected.request.turn.affinity)
            await collect(collected)

        monkeypatch.setattr(played.dispatcher, "collect", note)
        await played.generator.generate(group_request(1))
    assert len(named) == 2
    assert len(set(named)) == 1


async def test_names_of_tools_that_become_metrics_are_bounded(tmp_path: Path) -> None:
    async with playing(tmp_path, jar_policy("C"), ScriptedEnvironment()) as played:
        for number in range(400):
            played.generator.notes.note_tools([Tool(f"tool{number}", "", "")])
        played.generator.notes.note_tools([Tool("tool3", "", "")])
        assert len(played.generator.notes.tool_names) == 256


async def test_rewards_of_turns_and_the_environments_score_are_used(tmp_path: Path) -> None:
    def respond(_episode: str, turn: int, answer: common.Answer) -> environment.Observation:
        seen = jars("", turn, answer)
        seen.reward = 0.5 + turn
        return seen

    world = ScriptedEnvironment(respond=respond, score=lambda _: 0.75)
    async with playing(tmp_path, jar_policy("C"), world) as played:
        group = await played.generator.generate(group_request(1))
    assert [turn.reward for turn in group.rollouts[0].turns] == [0.5, 1.5]
    (rollout,) = group.rollouts
    # The conversation beyond the prompt, as verl counts it: what was read, too.
    tokens = rollout.num_tokens + rollout.num_context_tokens
    assert rollout.num_context_tokens > 0
    shaping = OverlongShaping(tokens, 10, 1.0, log=False)
    graded = await Grader(InlineScorer(), shaping).grade(group)
    (scored,) = graded.outcomes
    assert isinstance(scored, Scored)
    assert (scored.score, scored.reward) == (0.75, -0.25)
    assert scored.metrics == {"acc": 0.75, "looked": 2.0}
    bounded = OverlongShaping(tokens - 20, 10, 1.0, log=False, longest_tokens=tokens - 20)
    graded = await Grader(InlineScorer(), bounded).grade(group)
    assert [outcome.reward for outcome in graded.scored] == [-0.25]


async def test_without_a_score_the_rows_scorer_grades_the_last_answer(tmp_path: Path) -> None:
    world = ScriptedEnvironment(score=lambda _: None)
    async with playing(tmp_path, jar_policy("C", "D"), world) as played:
        group = await played.generator.generate(group_request(1))
    graded = await Grader(InlineScorer(), None).grade(group)
    assert [outcome.score for outcome in graded.scored] == [1.0]


async def test_verls_reward_functions_get_all_turns_with_the_tools_texts(tmp_path: Path) -> None:
    world = ScriptedEnvironment(score=lambda _: None)
    async with playing(tmp_path, jar_policy("C", "D"), world, grades_whole_text=True) as played:
        group = await played.generator.generate(group_request(1))
    (rollout,) = group.rollouts
    # verl/experimental/reward_loop/reward_manager/naive.py: all tokens after the prompt, decoded.
    responses = path_of(group.prompt_token_ids, rollout, 2)[len(group.prompt_token_ids) :]
    decoded = AutoTokenizer.from_pretrained(tmp_path).decode(responses, skip_special_tokens=True)
    assert rollout.text == transcript(rollout) == decoded
    assert rollout.text.count("<tool_call>") == rollout.text.count("<tool_response>") == 2


async def test_verls_reward_functions_get_thoughts_that_a_template_leaves_out_of_history(
    tmp_path: Path,
) -> None:
    world = ScriptedEnvironment(
        opening=lambda _: environment.Observation(),
        respond=lambda _, turn, __: (
            user_says("And?") if turn < 1 else environment.Observation(done=True)
        ),
        score=lambda _: None,
    )
    said = "<think>\nhm\n</think>\n\nMore."
    async with playing(
        tmp_path, lambda _: said, world, family="qwen3", grades_whole_text=True
    ) as played:
        group = await played.generator.generate(group_request(1))
    assert group.rollouts[0].text == f"{said}\nAnd?\n{said}"


async def test_what_an_environment_sends_wrong_fails_its_sample_with_the_field(
    tmp_path: Path,
) -> None:
    message = common.ChatMessage(role="assistant", content="I cheat.")
    world = ScriptedEnvironment(
        respond=lambda *_: environment.Observation(messages=[message], reward=1.0)
    )
    async with playing(tmp_path, jar_policy("C"), world) as played:
        group = await played.generator.generate(group_request(1))
    failed = failure_of(group.rollouts[0])
    assert "observation.messages[0].role: 'assistant'; send tool, user, or the whole" in (
        failed.detail
    )


async def test_the_seed_of_a_turn_repeats_and_differs_from_the_others(tmp_path: Path) -> None:
    seeds: list[list[int]] = []
    for _ in range(2):
        world = ScriptedEnvironment()
        async with playing(tmp_path, jar_policy("C", "D"), world) as played:
            client: Any = played.dispatcher._client
            message, found = client._message, []

            def noting(
                request: Any, *rest: Any, message: Any = message, found: list[int] = found
            ) -> Any:
                found.append(request.sampling.seed)
                return message(request, *rest)

            client._message = noting
            await played.generator.generate(group_request(1))
            seeds.append(found)
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    assert seeds[0][0] == group_request(1).sampling.seed


async def test_the_oldest_token_of_all_turns_decides_the_age(tmp_path: Path) -> None:
    versions: list[int | None] = []
    progress = GroupProgress(on_oldest_version=versions.append)
    async with playing(tmp_path, jar_policy("C", "D"), ScriptedEnvironment()) as played:
        group = await played.generator.generate(group_request(1, progress=progress))
    # Between turns the group holds tokens: it never counts as one that waits without any.
    assert versions[0] is None
    assert set(versions[1:]) == {3}
    assert progress.num_received == group.rollouts[0].num_tokens
    assert progress.num_requested == 1
    assert group.rollouts[0].finish_reason is FinishReason.STOP


async def test_a_row_that_chooses_one_answer_has_no_environment(tmp_path: Path) -> None:
    world = ScriptedEnvironment()
    request = group_request(2)
    single = replace(request.prompt, extra_info={"agent_name": "single_turn_agent"})
    named = replace(request.prompt, extra_info={"agent_name": "jars"})
    async with playing(tmp_path, jar_policy("C"), world) as played:
        group = await played.generator.generate(replace(request, prompt=single))
        assert not world.opened
        await played.generator.generate(replace(request, prompt=named))
    assert [rollout.end for rollout in group.rollouts] == [None, None]
    assert {one.environment for one in world.opened} == {"jars"}
