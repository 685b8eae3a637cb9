"""Groups reach replicas with capacity, and come home whole whatever happens to a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.replica_queue import ReplicaQueue
from services.reward.generation.request import (
    GenerateEvent,
    GroupFailedError,
    GroupRequest,
    OverlongPromptError,
    Purpose,
)
from sluice.algorithm.growing_sample import NewTokens
from sluice.algorithm.routing import (
    FIRST_PAUSE_S,
    ReplicaOffer,
    ReplicaRequirement,
    ReplicaRouter,
)
from sluice.errors import (
    EngineError,
    ExhaustedError,
    InvalidRequestError,
    PeerError,
    PromptTooLongError,
)
from sluice.types import (
    ChatMessage,
    FinishReason,
    Prompt,
    PromptOrigin,
    ReplicaInfo,
    Rollout,
    SamplingParams,
)
from tests.support.domain_values import with_turn
from tests.support.reward_app import ScriptedClient, replica, settled
from tests.support.scripted_rollout import rollout_of

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, seed=7)


def request(
    sequence: int = 0, *, n: int = 4, purpose: Purpose = Purpose.TRAINING, **versions: int
) -> GroupRequest:
    prompt = Prompt(
        f"p{sequence}",
        sequence,
        (ChatMessage("user", "answer=1 right=2"),),
        "math_dapo",
        "1",
        PromptOrigin.CLIENT,
        None,
    )
    bounds = {"lowest_version": 0} | versions
    return GroupRequest(prompt, tuple(range(n)), SAMPLING, purpose, **bounds)


class Setting:
    """A dispatcher over scripted replicas."""

    def __init__(self, client: ScriptedClient, *, slack: float = 1.0, attempts: int = 3) -> None:
        self.client = client
        self.queue = ReplicaQueue(slack)
        self.dispatcher = GroupDispatcher(client, self.queue, max_attempts=attempts)


async def test_a_group_comes_whole_and_in_order() -> None:
    setting = Setting(ScriptedClient())
    await setting.dispatcher.announce([replica("a")])
    group = await setting.dispatcher.generate(request())
    assert [r.sample_index for r in group.rollouts] == [0, 1, 2, 3]
    assert setting.queue.num_free_sequences(0) == 64


async def test_a_row_that_names_an_environment_is_refused_where_there_is_none() -> None:
    setting = Setting(ScriptedClient())
    await setting.dispatcher.announce([replica("a")])
    named = replace(request().prompt, extra_info={"agent_name": "tool_agent"})
    with pytest.raises(GroupFailedError, match=r"agent_name is 'tool_agent'.* no environment"):
        await setting.dispatcher.generate(replace(request(), prompt=named))
    assert not setting.client.calls
    single = replace(request().prompt, extra_info={"agent_name": "single_turn_agent"})
    assert (await setting.dispatcher.generate(replace(request(), prompt=single))).rollouts


async def test_the_least_loaded_replica_relative_to_its_slots_gets_the_next_group() -> None:
    gate = asyncio.Event()

    async def hold(_name: str, _request: GroupRequest, _index: int) -> None:
        await gate.wait()

    setting = Setting(ScriptedClient(before_sample=hold))
    await setting.dispatcher.announce([replica("small", slots=8), replica("big", slots=16)])
    async with asyncio.TaskGroup() as tasks:
        for sequence in range(7):
            tasks.create_task(setting.dispatcher.generate(request(sequence)))
        await settled(lambda: len(setting.client.calls) == 6)
        names = [name for name, _, _ in setting.client.calls]
        assert (names.count("small"), names.count("big")) == (2, 4)
        assert setting.queue.num_waiting == 1
        assert setting.queue.num_free_sequences(0) <= 0
        gate.set()
    assert setting.queue.num_free_sequences(0) == 24


async def test_a_replica_gets_as_many_sequences_as_its_cache_holds_of_those_that_ended() -> None:
    setting = Setting(ScriptedClient())
    announced = replica("a")
    held = replace(announced, info=replace(announced.info, kv_tokens=100))
    await setting.dispatcher.announce([held])
    assert setting.queue.num_free_sequences(0) == 64
    group = await setting.dispatcher.generate(request())
    # The samples share the cache of their prompt.
    own = -(-group.prompt_token_ids.size // len(group.rollouts))
    lengths = [own + r.num_tokens for r in group.rollouts]
    assert len(set(lengths)) == 1
    assert setting.queue.num_free_sequences(0) == 100 // lengths[0] < 64


async def test_a_group_larger_than_any_replica_still_runs() -> None:
    setting = Setting(ScriptedClient())
    await setting.dispatcher.announce([replica("a", slots=2)])
    assert len((await setting.dispatcher.generate(request(n=8))).rollouts) == 8


async def test_evaluation_goes_first_and_older_prompts_before_younger() -> None:
    setting = Setting(ScriptedClient())
    async with asyncio.TaskGroup() as tasks:
        for sequence, purpose in ((5, Purpose.TRAINING), (2, Purpose.TRAINING)):
            tasks.create_task(setting.dispatcher.generate(request(sequence, purpose=purpose)))
        tasks.create_task(setting.dispatcher.generate(request(9, purpose=Purpose.VALIDATION)))
        await settled(lambda: setting.queue.num_waiting == 3)
        await setting.dispatcher.announce([replica("a", slots=4)])
    assert [prompt for _, prompt, _ in setting.client.calls] == ["p9", "p2", "p5"]


async def test_who_waits_for_a_version_nobody_serves_blocks_no_one() -> None:
    setting = Setting(ScriptedClient())
    await setting.dispatcher.announce([replica("a", 3)])
    async with asyncio.TaskGroup() as tasks:
        blocked = tasks.create_task(
            setting.dispatcher.generate(
                request(0, purpose=Purpose.VALIDATION, lowest_version=4, highest_version=4)
            )
        )
        await settled(lambda: setting.queue.num_waiting == 1)
        await setting.dispatcher.generate(request(1))
        assert not blocked.done()
        await setting.dispatcher.announce([replica("a", 4)])
        await blocked


@pytest.mark.usefixtures("waits_take_no_time")
async def test_only_missing_samples_are_generated_again_and_the_failed_replica_is_avoided() -> None:
    async def break_a(name: str, _request: GroupRequest, index: int) -> None:
        if name == "a" and index == 2:
            raise PeerError("a", "generating", "connection reset")

    setting = Setting(ScriptedClient(before_sample=break_a))
    await setting.dispatcher.announce([replica("a"), replica("b")])
    group = await setting.dispatcher.generate(request(0))
    assert setting.client.calls == [("a", "p0", (0, 1, 2, 3)), ("b", "p0", (2, 3))]
    assert len(group.rollouts) == 4
    await setting.dispatcher.generate(request(1))
    assert setting.client.calls[-1][0] == "b"
    await setting.dispatcher.announce([replica("a"), replica("b", slots=1)])
    await setting.dispatcher.generate(request(2))
    assert "a" in {name for name, _, _ in setting.client.calls[3:]}


async def test_a_replica_that_failed_proves_itself_with_one_group() -> None:
    fleet = ReplicaRouter(1.0)
    fleet.announce([replica("a")])
    wanted = ReplicaRequirement(4, 0)
    member = fleet.choose(wanted, 0.0)
    assert member is not None
    until = fleet.pause(member, 0.0)
    assert fleet.choose(wanted, until - 0.01) is None
    assert fleet.choose(wanted, until) is member
    reservation = fleet.reservation(member, 4)
    assert fleet.choose(wanted, until) is None
    fleet.release_sequences(reservation, 1)
    fleet.end_probation(member)
    assert fleet.choose(wanted, until) is member
    later = fleet.pause(member, until)
    again = fleet.pause(member, later)
    assert again - later > later - until  # longer each time


def test_a_trial_that_ends_without_an_answer_gives_its_place_to_another_group() -> None:
    fleet = ReplicaRouter(1.0)
    fleet.announce([replica("a", slots=8)])
    (member,) = fleet._members.values()
    old, wanted = fleet.reservation(member, 4), ReplicaRequirement(2, 0)
    until = fleet.pause(member, 0.0)
    assert fleet.choose(wanted, until) is member
    trial = fleet.reservation(member, 2)
    fleet.release_sequences(old, 1)
    assert fleet.choose(wanted, until) is None
    assert fleet.num_free(0, until) == 0
    fleet.give_back(old)
    assert fleet.choose(wanted, until) is None
    fleet.give_back(trial)
    assert fleet.choose(wanted, until) is member
    assert fleet.num_free(0, until) == 8


async def test_an_older_stream_ends_no_pause() -> None:
    queue = ReplicaQueue(1.0)
    queue.announce([replica("a", slots=8)])
    (member,) = queue.fleet._members.values()
    queue.pause(member)
    queue.note_answer(member)
    assert member.on_probation
    assert queue.num_free_sequences(0) == 0
    member.paused_until = 0.0
    assert queue.num_free_sequences(0) == 8
    queue.note_answer(member)
    assert not member.on_probation


async def test_a_sequence_that_ends_looks_at_few_of_the_many_groups_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, looks, takes = ReplicaQueue(1.0), list[int](), ReplicaRequirement.takes
    queue.announce([replica("a", slots=2)])
    held = await queue.reserve(ReplicaRequirement(2, 0), (True, 0))

    def counted(asked: ReplicaRequirement, offer: ReplicaOffer) -> bool:
        looks.append(offer.version)
        return takes(asked, offer)

    async with asyncio.TaskGroup() as tasks:
        waiting = [
            tasks.create_task(queue.reserve(ReplicaRequirement(1, 0), (True, number)))
            for number in range(1, 1001)
        ]
        await settled(lambda: queue.num_waiting == 1000)
        monkeypatch.setattr(ReplicaRequirement, "takes", counted)
        queue.release_sequences(held, 1)
        assert (await waiting[0]).member is held.member
        assert queue.num_free_sequences(0) <= 0
        assert queue.num_waiting == 999
        assert len(looks) < 10
        for task in waiting:
            task.cancel()


async def test_a_group_ends_after_its_last_attempt_with_the_reason() -> None:
    async def burn(_name: str, _request: GroupRequest, _index: int) -> None:
        raise EngineError("out of memory")

    setting = Setting(ScriptedClient(before_sample=burn), attempts=2)
    await setting.dispatcher.announce([replica("a"), replica("b")])
    with pytest.raises(GroupFailedError, match="2 attempts failed, the last: out of memory"):
        await setting.dispatcher.generate(request())
    assert setting.queue.num_waiting == 0


async def test_a_full_replica_is_no_failed_attempt() -> None:
    refusals = iter([True, False])

    async def refuse_once(_name: str, _request: GroupRequest, index: int) -> None:
        if index == 0 and next(refusals):
            raise ExhaustedError("queue full")

    setting = Setting(ScriptedClient(before_sample=refuse_once), attempts=1)
    await setting.dispatcher.announce([replica("a")])
    assert len((await setting.dispatcher.generate(request())).rollouts) == 4


class OneLongGroup:
    """Replicas where sample 1 of prompt "p0" waits for `continues`, its last for `ends`; the first
    requests for all other prompts fail with `error`.
    """

    def __init__(self, error: Exception) -> None:
        self.error, self.refused = error, set[str]()
        self.continues, self.ends = asyncio.Event(), asyncio.Event()

    async def __call__(self, _name: str, request: GroupRequest, index: int) -> None:
        prompt_id = request.prompt.prompt_id
        if prompt_id == "p0":
            await (self.continues if index == 1 else self.ends).wait()
        elif prompt_id not in self.refused:
            self.refused.add(prompt_id)
            raise self.error


async def test_a_replica_that_refused_a_stream_takes_others_while_its_longest_group_continues() -> (
    None
):
    long = OneLongGroup(ExhaustedError("queue full"))
    setting = Setting(ScriptedClient(before_sample=long))
    await setting.dispatcher.announce([replica("a")])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(setting.dispatcher.generate(request(0)))
        await settled(lambda: len(setting.client.calls) == 1)
        others = [tasks.create_task(setting.dispatcher.generate(request(n))) for n in (1, 2)]
        await settled(lambda: all(other.done() for other in others))
        long.continues.set()
        long.ends.set()


async def test_a_replica_that_failed_proves_itself_beside_its_longest_group() -> None:
    long = OneLongGroup(PeerError("a", "generating", "connection reset"))
    setting = Setting(ScriptedClient(before_sample=long))
    await setting.dispatcher.announce([replica("a")])
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(setting.dispatcher.generate(request(0)))
        await settled(lambda: len(setting.client.calls) == 1)
        second = tasks.create_task(setting.dispatcher.generate(request(1)))
        await settled(second.done)
        assert not first.done()
        long.continues.set()
        long.ends.set()


class OnlyAnOldStream(ScriptedClient):
    """Replicas where the stream of prompt "p0" brings tokens for ever; all further streams are
    refused before the third of prompt "p1".
    """

    async def generate(
        self,
        replica: ReplicaInfo,
        request: GroupRequest,
        sample_indexes: Sequence[int],
        partials: Sequence[Rollout] = (),
    ) -> AsyncGenerator[GenerateEvent, None]:
        async for event in super().generate(replica, request, sample_indexes, partials):
            while request.prompt.prompt_id == "p0":
                yield event
                await asyncio.sleep(0.01)
                token = NewTokens(0, np.ones(1, np.uint32), np.zeros(1, np.float32), 0)
                event = GenerateEvent(None, (), (token,))
            if [prompt_id for _, prompt_id, _ in self.calls].count("p1") < 3:
                raise PeerError(replica.name, "generating", "new streams are refused")
            yield event


async def test_tokens_of_an_old_stream_send_no_more_than_one_group_to_a_replica_that_failed() -> (
    None
):
    setting = Setting(OnlyAnOldStream())
    await setting.dispatcher.announce([replica("a", slots=8)])
    async with asyncio.TaskGroup() as tasks:
        old = tasks.create_task(setting.dispatcher.generate(request(0, n=1)))
        await settled(lambda: setting.dispatcher.num_received[Purpose.TRAINING] > 0)
        others = [
            tasks.create_task(setting.dispatcher.generate(request(number, n=1)))
            for number in range(1, 6)
        ]
        await settled(lambda: all(other.done() for other in others))
        old.cancel()
    called = [prompt_id for _, prompt_id, _ in setting.client.calls]
    assert called == ["p0", "p1", "p1", "p1", "p2", "p3", "p4", "p5"]


def test_an_error_that_may_mean_a_sick_replica_counts_while_it_pauses_for_another_reason() -> None:
    fleet = ReplicaRouter(1.0)
    fleet.announce([replica("a")])
    (member,) = fleet._members.values()
    until = fleet.pause(member, 0.0, may_be_sick=False)
    assert fleet.num_free(0, 0.0) == 0
    assert not member.on_probation
    assert fleet.pause(member, until / 2) > until
    assert member.on_probation


async def test_a_refused_prompt_is_not_tried_again() -> None:
    async def refuse(_name: str, _request: GroupRequest, _index: int) -> None:
        raise InvalidRequestError("prompt too long")

    setting = Setting(ScriptedClient(before_sample=refuse))
    await setting.dispatcher.announce([replica("a")])
    with pytest.raises(GroupFailedError, match="refused by a: prompt too long"):
        await setting.dispatcher.generate(request())
    assert len(setting.client.calls) == 1


async def test_a_group_too_large_for_the_least_replica_goes_to_one_with_more_slots() -> None:
    async def refuse(name: str, _request: GroupRequest, _index: int) -> None:
        if name == "small":
            raise InvalidRequestError("4 samples; the engine takes 2 in slots")

    setting = Setting(ScriptedClient(before_sample=refuse), attempts=1)
    await setting.dispatcher.announce([replica("small", slots=2), replica("big", slots=4)])
    for sequence in range(4):
        assert len((await setting.dispatcher.generate(request(sequence))).rollouts) == 4
    assert {name for name, _, _ in setting.client.calls} == {"small", "big"}
    small, _ = setting.queue.fleet._members.values()
    assert small.next_pause_s > FIRST_PAUSE_S  # it is asked less and less


async def test_a_prompt_that_all_replicas_refuse_ends_at_the_one_with_most_slots() -> None:
    async def refuse(name: str, _request: GroupRequest, _index: int) -> None:
        raise InvalidRequestError("no such token")

    setting = Setting(ScriptedClient(before_sample=refuse))
    await setting.dispatcher.announce([replica("small", slots=2), replica("big", slots=3)])
    with pytest.raises(GroupFailedError, match="refused by big: no such token"):
        await setting.dispatcher.generate(request())
    assert [name for name, _, _ in setting.client.calls] == ["small", "big"]


async def test_aborted_samples_are_generated_again() -> None:
    def aborted_on_a(name: str, request: GroupRequest, index: int) -> Rollout:
        rollout = rollout_of("text", index, 0, request.sampling.seed, 4)
        is_cut = name == "a" and index > 0
        return with_turn(rollout, finish_reason=FinishReason.ABORTED) if is_cut else rollout

    setting = Setting(ScriptedClient(make=aborted_on_a))
    await setting.dispatcher.announce([replica("a"), replica("b")])
    group = await setting.dispatcher.generate(request())
    assert setting.client.calls[1] == ("b", "p0", (1, 2, 3))
    assert all(r.finish_reason is FinishReason.STOP for r in group.rollouts)


async def test_the_oldest_version_in_a_group_is_reported_through_all_attempts() -> None:
    reported: list[int | None] = []

    async def break_a(name: str, _request: GroupRequest, index: int) -> None:
        if name == "a" and index == 1:
            raise EngineError("lost")

    client = ScriptedClient(before_sample=break_a, versions={"a": 3, "b": 4})
    setting = Setting(client)
    await setting.dispatcher.announce([replica("a", 3), replica("b", 4)])
    asked = request()
    asked.progress.on_oldest_version = reported.append
    group = await setting.dispatcher.generate(asked)
    assert reported == [None, 3, 3, 3]
    assert min(one.oldest_version or 0 for one in group.rollouts) == 3


async def test_cancelling_a_group_gives_its_capacity_back_at_every_stage() -> None:
    gate = asyncio.Event()

    async def hold(_name: str, _request: GroupRequest, _index: int) -> None:
        await gate.wait()

    setting = Setting(ScriptedClient(before_sample=hold))
    await setting.dispatcher.announce([replica("a", slots=4)])
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(setting.dispatcher.generate(request(0)))
        waiting = tasks.create_task(setting.dispatcher.generate(request(1)))
        reserved = tasks.create_task(setting.dispatcher.generate(request(2)))
        await settled(lambda: setting.queue.num_waiting == 2)
        waiting.cancel()
        await settled(lambda: setting.queue.num_waiting == 1)
        running.cancel()
        # The capacity is granted in the same moment in which the next one is cancelled.
        await settled(lambda: setting.queue.num_waiting == 0)
        reserved.cancel()
    assert setting.queue.num_free_sequences(0) == 4


@pytest.mark.parametrize("origin", [PromptOrigin.DATASET, PromptOrigin.CLIENT])
async def test_a_prompt_that_is_too_long_costs_itself_alone(origin: PromptOrigin) -> None:
    async def refuse(*_: object) -> None:
        raise PromptTooLongError.of(9, 4)

    client = ScriptedClient()
    client.before_sample = refuse
    queue = ReplicaQueue(1.0)
    dispatcher = GroupDispatcher(client, queue, max_attempts=3)
    await dispatcher.announce([replica("a")])
    asked = request()
    prompt = replace(asked.prompt, origin=origin, place="a.parquet, row 7")
    with pytest.raises(OverlongPromptError, match=r"a\.parquet, row 7: prompt: 9 tokens exceed"):
        await dispatcher.generate(replace(asked, prompt=prompt))
