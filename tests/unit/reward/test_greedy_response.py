"""A greedy response beside the samples: the baseline of remax, which the filter does not see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from services.reward.app import RewardApp
from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.request import (
    GroupFailedError,
    GroupProgress,
    GroupRequest,
    Purpose,
    SampleCallback,
)
from services.reward.group_table import GroupState
from services.reward.groups.run import with_greedy
from sluice.config.run import RunConfig
from sluice.errors import DataError, EngineError
from sluice.types import ChatMessage, Prompt, PromptOrigin, Rollout, RolloutGroup, SamplingParams
from tests.support.reward_app import ScriptedClient, replica, running_app, settled, submit
from tests.support.scripted_rollout import PROMPT_TOKENS, answer_text, rollout_of

MIXED, WRONG, RIGHT = "answer=1 right=1", "answer=1 right=0", "answer=1 right=2"
SAMPLE_TOKENS, GREEDY_TOKENS = 8, 5
SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, max_tokens=30, seed=7)
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=30, seed=7)


def config(
    n: int = 2, *, filters: bool = True, estimator: str = "remax", **reward: Any
) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 2, "max_response_length": 30},
        "actor_rollout_ref": {"rollout": {"n": n, "top_p": 0.9}},
        "algorithm": {"adv_estimator": estimator, "filter_groups": {"enable": filters}},
        "sluice": {"asynchrony": {"max_staleness": 1}, "reward": {"max_attempts": 1, **reward}},
    }
    return msgspec.convert(tree, RunConfig)


def is_greedy(request: GroupRequest) -> bool:
    return request.sampling.temperature == 0.0


class GreedyClient(ScriptedClient):
    """Replicas whose greedy responses are right or wrong whatever the samples are."""

    def __init__(self, greedy_is_right: bool = True, **rest: Any) -> None:
        super().__init__(**rest)
        self.greedy_is_right, self.requests = greedy_is_right, list[GroupRequest]()
        self.make = self.answer

    def answer(self, name: str, request: GroupRequest, index: int) -> Rollout:
        self.requests.append(request)
        content, length = request.prompt.messages[-1].content, SAMPLE_TOKENS
        if is_greedy(request):
            content, length = (RIGHT if self.greedy_is_right else WRONG), GREEDY_TOKENS
        version = self.versions.get(name, 0)
        return rollout_of(
            answer_text(content, index), index, version, request.sampling.seed, length
        )


async def publish(app: RewardApp, client: ScriptedClient, version: int) -> None:
    client.versions["a"] = version
    await app.loop.announce("trainer", version, [replica("a", version)], None)


def ends(app: RewardApp) -> dict[str, int]:
    return {end.value: count for end, count in app.ledger.by_end.items() if count}


@pytest.mark.parametrize(("greedy_is_right", "reward"), [(True, 1.0), (False, -1.0)])
async def test_a_group_carries_the_reward_of_a_greedy_response_to_its_prompt(
    greedy_is_right: bool, reward: float
) -> None:
    client = GreedyClient(greedy_is_right)
    async with running_app(config(), client) as app:
        submit(app, [MIXED] * 2)
        await publish(app, client, 0)
        batch = await app.loop.batches.take(1, 0, 60)
    assert [group.baseline_reward for group in batch.groups] == [reward] * 2
    assert [len(group.rollouts) for group in batch.groups] == [2, 2]
    assert all(r.num_tokens == SAMPLE_TOKENS for g in batch.groups for r in g.rollouts)
    greedy = [request for request in client.requests if is_greedy(request)]
    assert sorted(request.prompt.prompt_id for request in greedy) == ["p0", "p1"]
    wanted = (1, 1.0, -1, 30, -1)  # the same bound on versions as the samples
    found = {
        (
            len(r.sample_indexes),
            r.sampling.top_p,
            r.sampling.top_k,
            r.sampling.max_tokens,
            r.lowest_version,
        )
        for r in greedy
    }
    assert found == {wanted}


async def test_without_remax_no_greedy_response_is_generated() -> None:
    client = GreedyClient()
    async with running_app(config(estimator="grpo"), client) as app:
        submit(app, [MIXED] * 2)
        await publish(app, client, 0)
        batch = await app.loop.batches.take(1, 0, 60)
    assert [group.baseline_reward for group in batch.groups] == [None, None]
    assert not any(map(is_greedy, client.requests))
    assert batch.statistics["train/greedy_tokens"] == 0


async def test_the_filter_does_not_see_the_greedy_response() -> None:
    client = GreedyClient(greedy_is_right=True)
    async with running_app(config(), client) as app:
        session = submit(app, [WRONG])
        await publish(app, client, 0)
        await settled(lambda: ends(app) == {"filtered_all_wrong": 1})
    assert session.num_open == 0


async def test_one_sample_and_one_greedy_response_make_a_group() -> None:
    client = GreedyClient(greedy_is_right=False)
    async with running_app(config(n=1, filters=False), client) as app:
        submit(app, [RIGHT] * 2)
        await publish(app, client, 0)
        batch = await app.loop.batches.take(1, 0, 60)
    assert [(g.scores[0].reward, g.baseline_reward) for g in batch.groups] == [(1.0, -1.0)] * 2


async def test_greedy_tokens_are_generated_tokens_and_have_a_count_of_their_own() -> None:
    client = GreedyClient()
    async with running_app(config(), client) as app:
        submit(app, [MIXED, WRONG, MIXED])
        await publish(app, client, 0)
        await settled(lambda: app.groups.num_kept == 2 and bool(ends(app)))
        found = (await app.loop.batches.take(1, 0, 60)).statistics
        totals = app.counters.totals()
    assert found["train/greedy_tokens"] == 3 * GREEDY_TOKENS
    assert found["train/trained_tokens"] == 4 * SAMPLE_TOKENS
    assert found["train/generated_tokens"] == 3 * GREEDY_TOKENS + 6 * SAMPLE_TOKENS
    assert found["train/samples_graded"] == 3 * 3
    assert totals["reward/greedy_tokens"] == 3 * GREEDY_TOKENS
    assert totals["reward/generated_tokens"] == found["train/generated_tokens"]


async def test_a_prompt_without_its_greedy_response_is_dropped_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(_name: str, request: GroupRequest, _index: int) -> None:
        if is_greedy(request):
            await settled(lambda: any(not is_greedy(r) for r in client.requests))
            raise EngineError("the engine is on fire")

    client = GreedyClient(before_sample=fail)
    async with running_app(config(), client) as app:
        submit(app, [MIXED])
        await publish(app, client, 0)
        await settled(lambda: ends(app) == {"dropped_failed": 1})
        totals = app.counters.totals()
    line = next(line for line in caplog.messages if "dropped" in line)
    assert "(replica a): engine_error: no greedy response, the baseline" in line
    assert "on fire" in line
    assert totals["reward/discarded_tokens/failed"] == totals["reward/generated_tokens"] > 0


async def test_a_kept_group_is_as_old_as_its_oldest_response_the_greedy_one_included() -> None:
    client = GreedyClient()
    gate = asyncio.Event()

    async def hold_samples(_name: str, request: GroupRequest, _index: int) -> None:
        if not is_greedy(request):
            await gate.wait()

    client.before_sample = hold_samples
    async with running_app(config(), client) as app:
        submit(app, [MIXED] * 2)
        await publish(app, client, 0)
        await settled(lambda: len(list(filter(is_greedy, client.requests))) == 2)
        client.versions["a"] = 1  # the samples' tokens are all of version 1
        gate.set()
        await settled(lambda: app.groups.num_kept == 2)
        assert len(app.groups.of_source[""].ages.decide(1).chosen) == 2
        assert len(app.groups.of_source[""].ages.decide(2).dropped) == 2


async def hang(_name: str, _request: GroupRequest, _index: int) -> None:
    await asyncio.Event().wait()


async def test_a_greedy_response_takes_a_place_on_the_fleet_as_a_sample_does() -> None:
    client = GreedyClient(before_sample=hang)
    async with running_app(config(n=1, filters=False, inflight_slack=1.0), client) as app:
        submit(app, [MIXED])
        await app.loop.announce("trainer", 0, [replica("a", slots=3)], None)
        await settled(lambda: len(client.calls) == 2)
        submit(app, [MIXED], first=1)  # one slot is free, two are needed
        for _ in range(50):
            await asyncio.sleep(0)
        assert app.groups["p1"].state is GroupState.WAITING


async def test_at_shutdown_both_streams_are_cancelled() -> None:
    client = GreedyClient(before_sample=hang)
    async with running_app(config(), client) as app:
        submit(app, [MIXED])
        await publish(app, client, 0)
        await settled(lambda: len(client.calls) == 2)
    assert client.cancelled == ["p0", "p0"]
    assert app.ledger.num_pending == 1


PROMPT = Prompt("p", 0, (ChatMessage("user", "?"),), "s", "1", PromptOrigin.CLIENT, None)
REQUEST = GroupRequest(PROMPT, (0, 1), SAMPLING, Purpose.TRAINING, lowest_version=0)
Act = Callable[[GroupRequest], None]


class FakeDispatcher:
    """Does what the test says when a group is asked for."""

    def __init__(self, act: Act) -> None:
        self._act = act

    async def generate(
        self,
        request: GroupRequest,
        _on_sample: SampleCallback | None = None,
    ) -> RolloutGroup:
        self._act(request)
        return RolloutGroup(request.prompt, PROMPT_TOKENS, ())


async def generated(
    act: Act, on_oldest_version: Callable[[int | None], None] = lambda _: None
) -> None:
    dispatcher = cast("GroupDispatcher", FakeDispatcher(act))
    request = replace(REQUEST, progress=GroupProgress(on_oldest_version=on_oldest_version))
    await with_greedy(dispatcher, request, GREEDY)


@pytest.mark.parametrize(("samples", "greedy"), [(3, 4), (4, 3)])
async def test_a_prompt_has_started_when_the_older_of_the_two_has(
    samples: int, greedy: int
) -> None:
    reported: list[int | None] = []

    def start(request: GroupRequest) -> None:
        part = object()
        request.progress.note_version(part, None)
        request.progress.note_version(part, greedy if is_greedy(request) else samples)

    await generated(start, reported.append)
    assert reported == [None, samples, samples, 3]


async def test_a_defect_is_not_taken_for_a_failure_of_the_prompt() -> None:
    def fail(request: GroupRequest) -> None:
        if is_greedy(request):
            raise ZeroDivisionError
        raise GroupFailedError("refused")

    with pytest.raises(ExceptionGroup) as error:
        await generated(fail)
    assert error.group_contains(ZeroDivisionError)


class PromptRefusedError(GroupFailedError):
    """Stands for a refusal that is distinguished from other failures."""


@pytest.mark.parametrize("grave", [DataError("row 3"), PromptRefusedError("too long")])
@pytest.mark.parametrize("of_greedy", [True, False])
async def test_of_two_errors_the_graver_one_is_raised(grave: Exception, of_greedy: bool) -> None:
    def fail(request: GroupRequest) -> None:
        raise grave if is_greedy(request) is of_greedy else GroupFailedError("a stream broke")

    with pytest.raises(type(grave)) as error:
        await generated(fail)
    assert error.value is grave


async def test_a_failure_of_the_samples_is_raised_as_it_is() -> None:
    def fail(request: GroupRequest) -> None:
        if not is_greedy(request):
            raise GroupFailedError("refused by a: too long")

    with pytest.raises(GroupFailedError, match=r"^refused by a: too long$"):
        await generated(fail)
