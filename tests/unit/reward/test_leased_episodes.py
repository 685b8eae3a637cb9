"""Leased samples: programs get answers of their own sample alone, each once; what they post counts
once; a program that fails costs its sample alone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.reward.episodes.drivers import EpisodeTask
from services.reward.episodes.leases import MAX_WAITING, MAX_WAITING_BYTES
from services.reward.ledger.leases import PostedEnd
from sluice.client.leases import LeasedSample
from sluice.errors import (
    ExhaustedError,
    InvalidRequestError,
    LeaseEndedError,
    NotFoundError,
    NotReadyError,
)
from sluice.types import (
    ChatMessage,
    EpisodeEnd,
    FailureKind,
    RolloutGroup,
    Scored,
    Tool,
)
from tests.support.leased import Leased, leased
from tests.support.scripted_environment import (
    LOOK,
    eventually,
    failure_of,
    group_request,
    jar_policy,
    read_by,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": LOOK.description,
            "parameters": json.loads(LOOK.parameters_json),
        },
    }
]
ASKED = [{"role": "user", "content": "Add jars."}]


async def post(run: Leased, path: str, **body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{run.base_url}{path}", json=body) as answer,
    ):
        return answer.status, await answer.json()


async def chat(run: Leased, lease: str, messages: Sequence[Any], **fields: Any) -> Any:
    body = {"model": "any", "messages": messages, "tools": TOOLS} | fields
    status, answer = await post(run, f"/s/{lease}/v1/chat/completions", **body)
    assert status == 200, answer
    return answer


async def play(run: Leased, lease: str, reward: float, marker: str = "7") -> str:
    """Two turns and a reward; returns what the policy said last."""
    first = await chat(run, lease, ASKED)
    said = first["choices"][0]["message"]
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    call = said["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": marker}
    last = await chat(run, lease, [*ASKED, said, result])
    assert last["usage"]["completion_tokens"] > 0
    assert await post(run, f"/s/{lease}/end", reward=reward) == (200, {"status": "ended"})
    text = last["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


async def generated(run: Leased, n: int = 2) -> RolloutGroup:
    return await run.generator.generate(group_request(n))


async def take(run: Leased, count: int) -> list[LeasedSample]:
    found: list[LeasedSample] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await run.client.leases().take(count - len(found), 5.0)
    return found


async def test_a_dialogue_is_one_sample_with_the_posted_reward_and_no_sibling_is_awaited(
    tmp_path: Path,
) -> None:
    async with leased(tmp_path, jar_policy("C")) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run))
        (first,) = await take(run, 1)
        assert json.loads(first.row_json)["ground_truth"] == "1"
        assert first.messages == (ChatMessage("user", "Add jars."),)
        # Its sibling has not been leased yet.
        assert await play(run, first.lease_id, 1.0) == "Answer: 7"
        (second,) = await take(run, 1)
        assert {first.sample_index, second.sample_index} == {0, 1}
        await play(run, second.lease_id, 0.25)
        found = await group
    rewards = {first.sample_index: 1.0, second.sample_index: 0.25}
    for rollout in found.rollouts:
        reward = rewards[rollout.sample_index]
        assert rollout.outcome == Scored(reward, reward, {"acc": reward})
        assert (rollout.end, rollout.num_roots) == (EpisodeEnd.DONE, 1)
        assert [turn.parent for turn in rollout.turns] == [None, 0]
        for number in range(2):
            assert read_by(found.prompt_token_ids, rollout, number) in run.engine.prompts
    assert (run.desk.num_offered, run.desk.num_leased) == (0, 0)


async def test_interleaved_groups_never_mix(tmp_path: Path) -> None:
    async with leased(tmp_path, jar_policy("C")) as run, asyncio.TaskGroup() as tasks:
        groups = [tasks.create_task(generated(run, 4)) for _ in range(4)]
        leases = await take(run, 16)
        plays = [
            tasks.create_task(play(run, lease.lease_id, float(number), f"mark {number}."))
            for number, lease in enumerate(leases)
        ]
        for number, one in enumerate(plays):
            assert await one == f"Answer: mark {number}."
        found = [await group for group in groups]
    turns = [turn for group in found for rollout in group.rollouts for turn in rollout.turns]
    ids = [call.call_id for turn in turns if turn.answer for call in turn.answer.tool_calls]
    assert len(set(ids)) == len(ids) == 16  # an agent may look up calls by them
    rewards = set()
    for group in found:
        assert [rollout.sample_index for rollout in group.rollouts] == list(range(4))
        for rollout in group.rollouts:
            assert isinstance(rollout.outcome, Scored)
            number = int(rollout.outcome.reward)
            rewards.add(number)
            assert leases[number].sample_index == rollout.sample_index
            assert rollout.text == f"Answer: mark {number}."
    assert rewards == set(range(16))


async def test_a_repeated_request_is_answered_from_its_turn(tmp_path: Path) -> None:
    async with leased(tmp_path, jar_policy("C")) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run, 1))
        (lease,) = await take(run, 1)
        both = [tasks.create_task(chat(run, lease.lease_id, ASKED)) for _ in range(2)]
        answers = [await one for one in both]
        answers.append(await chat(run, lease.lease_id, ASKED))
        assert len({json.dumps(answer["choices"]) for answer in answers}) == 1
        await post(run, f"/s/{lease.lease_id}/end", reward=1)
        found = await group
    assert len(run.engine.prompts) == 1
    assert len(found.rollouts[0].turns) == 1


async def test_the_first_end_counts(tmp_path: Path) -> None:
    async with leased(tmp_path, jar_policy("C")) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run, 1))
        (lease,) = await take(run, 1)
        await play(run, lease.lease_id, 1.0)
        found = await group
        assert (await post(run, f"/s/{lease.lease_id}/end", reward=1.0))[0] == 200
        status, body = await post(run, f"/s/{lease.lease_id}/end", reward=0.5)
        assert (status, body["error"]["code"]) == (409, "lease_ended")
        status, body = await post(
            run, f"/s/{lease.lease_id}/v1/chat/completions", model="any", messages=ASKED
        )
        assert (status, body["error"]["code"]) == (400, "lease_ended")
    assert found.rollouts[0].outcome == Scored(1.0, 1.0, {"acc": 1.0})


@pytest.mark.parametrize(("size", "most"), [(1, MAX_WAITING), (MAX_WAITING_BYTES // 3, 3)])
async def test_few_requests_of_a_lease_wait_and_another_is_refused_until_one_is_answered(
    tmp_path: Path, size: int, most: int
) -> None:
    async with leased(tmp_path, jar_policy("C")) as run, asyncio.TaskGroup() as tasks:
        request = group_request(1)
        driver = run.desk.begin(EpisodeTask("e", "", request.prompt, 0, 60.0))
        tasks.create_task(driver.wait_until_taken())
        await asyncio.sleep(0)
        async with run.desk.leasing(1, 1.0):
            pass

        async def ask(digest: str) -> None:
            said = (ChatMessage("user", digest),)
            with pytest.raises(NotReadyError):
                await run.desk.chat(driver.lease_id, digest, said, (), size)

        for number in range(most):
            tasks.create_task(ask(str(number)))
        await asyncio.sleep(0)
        with pytest.raises(ExhaustedError, match=rf"lease: {most} requests wait, .* bytes; at"):
            await run.desk.chat(driver.lease_id, "more", (), (), size)
        assert (await driver.open()).messages == (ChatMessage("user", "0"),)
        tasks.create_task(ask("more"))
        await asyncio.sleep(0)
        run.desk.close()


async def test_a_session_without_an_end_fails_as_the_agent_s_and_its_late_reward_is_refused(
    tmp_path: Path, skip_time: Callable[[float], None]
) -> None:
    async with (
        leased(tmp_path, jar_policy("C"), timeout_s=600.0) as run,
        asyncio.TaskGroup() as tasks,
    ):
        group = tasks.create_task(generated(run, 1))
        (lease,) = await take(run, 1)
        await chat(run, lease.lease_id, ASKED)
        skip_time(600.0)
        found = await group
        status, body = await post(run, f"/s/{lease.lease_id}/end", reward=1.0)
        assert (status, body["error"]["code"]) == (410, "lease_expired")
        path = f"/s/{lease.lease_id}/v1/chat/completions"
        assert (await post(run, path, model="any", messages=ASKED))[0] == 410
    failed = failure_of(found.rollouts[0])
    assert failed.kind is FailureKind.AGENT
    assert "episode_timeout_s=600 seconds had passed" in failed.detail
    assert run.desk.num_leased == 0


async def test_the_wait_for_a_program_is_no_time_of_the_episode(
    tmp_path: Path, skip_time: Callable[[float], None]
) -> None:
    async with (
        leased(tmp_path, jar_policy("C"), timeout_s=600.0) as run,
        asyncio.TaskGroup() as tasks,
    ):
        group = tasks.create_task(generated(run, 1))
        await eventually(lambda: run.desk.num_offered == 1)
        skip_time(601.0)
        (lease,) = await take(run, 1)
        await play(run, lease.lease_id, 1.0)
        assert (await group).rollouts[0].outcome == Scored(1.0, 1.0, {"acc": 1.0})


async def test_a_program_s_failure_costs_its_sample_alone(tmp_path: Path) -> None:
    async with leased(tmp_path, jar_policy("C")) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run))
        first, second = await take(run, 2)
        await chat(run, first.lease_id, ASKED)
        assert (await post(run, f"/s/{first.lease_id}/end", failure="exit code 3"))[0] == 200
        await play(run, second.lease_id, 1.0)
        found = await group
    failed = failure_of(found.rollouts[first.sample_index])
    assert (failed.kind, failed.detail) == (FailureKind.AGENT, "exit code 3")
    assert found.rollouts[second.sample_index].outcome == Scored(1.0, 1.0, {"acc": 1.0})


async def test_a_sample_at_its_limit_refuses_requests_and_takes_the_reward(tmp_path: Path) -> None:
    async with (
        leased(tmp_path, jar_policy("C", "F"), max_assistant_turns=1) as run,
        asyncio.TaskGroup() as tasks,
    ):
        group = tasks.create_task(generated(run, 1))
        (lease,) = await take(run, 1)
        said = (await chat(run, lease.lease_id, ASKED))["choices"][0]["message"]
        more = [*ASKED, said, {"role": "user", "content": "And?"}]
        path = f"/s/{lease.lease_id}/v1/chat/completions"
        status, body = await post(run, path, model="any", messages=more)
        assert status == 400
        assert "used its tokens or turns" in body["error"]["message"]
        await post(run, f"/s/{lease.lease_id}/end", reward=0.5)
        found = await group
    assert found.rollouts[0].outcome == Scored(0.5, 0.5, {"acc": 0.5})
    assert found.rollouts[0].end is EpisodeEnd.MAX_TURNS


async def test_an_agent_s_sampling_is_ignored_and_noted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with leased(tmp_path, jar_policy("C")) as run, asyncio.TaskGroup() as tasks:
        tasks.create_task(generated(run, 1))
        (lease,) = await take(run, 1)
        for _ in range(2):
            answer = await chat(run, lease.lease_id, ASKED, temperature=0.0, max_tokens=1)
        assert answer["usage"]["completion_tokens"] > 1
        await post(run, f"/s/{lease.lease_id}/end", reward=1)
    noted = [one.message for one in caplog.records if "leased samples ignore" in one.message]
    assert len(noted) == 1
    assert "max_tokens, temperature" in noted[0]


async def test_a_group_that_is_given_up_revokes_its_leases(tmp_path: Path) -> None:
    async with leased(tmp_path, jar_policy("C")) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run))
        (lease,) = await take(run, 1)
        await chat(run, lease.lease_id, ASKED)
        group.cancel()
        await asyncio.wait([group])
        assert (run.desk.num_offered, run.desk.num_leased) == (0, 0)
        with pytest.raises(NotFoundError):
            run.desk.end(lease.lease_id, PostedEnd(1.0))


@pytest.mark.parametrize("role", ["tester", ""])
async def test_messages_that_no_template_knows_are_refused(tmp_path: Path, role: str) -> None:
    async with leased(tmp_path, jar_policy("C")) as run:
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.role"):
            await run.client.leases().chat("x", "d", (ChatMessage(role, "hi"),), ())
        tools = (Tool("a", "", "{}"), Tool("a", "", "{}"))
        with pytest.raises(InvalidRequestError, match="tools"):
            await run.client.leases().chat("x", "d", (ChatMessage("user", "hi"),), tools)
        for unusable in (float("nan"), 1e39, -1.7e308):
            with pytest.raises(InvalidRequestError, match="finite"):
                await run.client.leases().end("x", reward_value=unusable)
        with pytest.raises(NotFoundError):
            await run.client.leases().end("x", reward_value=1.0)


async def test_an_unmodified_openai_client_plays_a_lease(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    async with leased(tmp_path, jar_policy("C")) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run, 1))
        (lease,) = await take(run, 1)
        url = f"{run.base_url}/s/{lease.lease_id}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=lease.lease_id) as client:
            messages: list[Any] = list(ASKED)
            first = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, tool_choice="required"
            )
            said = first.choices[0].message
            result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "9"}
            messages += [said, result]
            last = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS
            )
            assert last.choices[0].message.content == "Answer: 9"
        await post(run, f"/s/{lease.lease_id}/end", reward=1)
        found = await group
    assert found.rollouts[0].num_roots == 1
    assert len(found.rollouts[0].turns) == 2


async def test_an_ended_lease_is_never_ended_otherwise(tmp_path: Path) -> None:
    async with leased(tmp_path, jar_policy("C")) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run, 1))
        (lease,) = await take(run, 1)
        await chat(run, lease.lease_id, ASKED)
        run.desk.end(lease.lease_id, PostedEnd(1.0))
        with pytest.raises(LeaseEndedError, match="first end counts"):
            run.desk.end(lease.lease_id, PostedEnd(None, "late"))
        await group
        await eventually(lambda: run.desk.num_leased == 0)


async def test_samples_of_a_runner_that_left_fail_and_those_of_others_do_not(
    tmp_path: Path, skip_time: Callable[[float], None]
) -> None:
    async with leased(tmp_path, jar_policy("C")) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run, 3))
        (other,) = await take(run, 1)
        silent, asked = await run.client.leases().take(2, 60.0, keep_alive_s=120.0)
        await chat(run, asked.lease_id, ASKED)
        skip_time(120.0)
        await eventually(lambda: run.desk.num_leased == 1)
        with pytest.raises(NotFoundError):
            await run.client.leases().end(silent.lease_id, reward_value=1.0)
        await play(run, other.lease_id, 1.0)
        found = await group
    for lease in (silent, asked):
        failed = failure_of(found.rollouts[lease.sample_index])
        assert failed.kind is FailureKind.AGENT
        assert failed.detail == "its runner left: it made no call for 120 s"
    assert found.rollouts[other.sample_index].outcome == Scored(1.0, 1.0, {"acc": 1.0})


async def test_a_runner_that_shows_life_keeps_its_samples(
    tmp_path: Path, skip_time: Callable[[float], None]
) -> None:
    async with leased(tmp_path, jar_policy("C")) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run, 1))
        runner = run.client.leases()
        (lease,) = await runner.take(1, 60.0, keep_alive_s=120.0)
        for _ in range(5):
            skip_time(60.0)
            assert await runner.take(0, 1.0, keep_alive_s=120.0) == []
        await play(run, lease.lease_id, 1.0)
        assert (await group).rollouts[0].outcome == Scored(1.0, 1.0, {"acc": 1.0})
