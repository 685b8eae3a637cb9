"""Samples continue elsewhere from what came of them; a group ends at its bounds as it stands."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from services.reward.generation import stream
from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.replica_queue import ReplicaQueue
from services.reward.generation.request import (
    GenerateEvent,
    GroupFailedError,
    GroupProgress,
    GroupRequest,
    Purpose,
)
from services.reward.generation.stream import Backlog
from sluice.algorithm.groups.stragglers import StragglerRules
from sluice.algorithm.growing_sample import NewTokens
from sluice.errors import EngineError
from sluice.types import (
    ChatMessage,
    FinishReason,
    Prompt,
    PromptOrigin,
    ReplicaInfo,
    Rollout,
    RolloutGroup,
    SamplingParams,
    VersionSpan,
)
from tests.support.reward_app import replica, settled
from tests.support.scripted_rollout import PROMPT_TOKENS

pytestmark = pytest.mark.usefixtures("waits_take_no_time")
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, seed=7)
PROMPT = Prompt("p7", 7, (ChatMessage("user", "?"),), "math_dapo", "1", PromptOrigin.CLIENT, None)


def token(index: int, place: int) -> int:
    """Token `place` of sample `index`, from any replica."""
    return 100 * index + place


def delta(index: int, start: int, end: int, version: int = 0) -> GenerateEvent:
    ids = np.array([token(index, place) for place in range(start, end)], np.uint32)
    return GenerateEvent(None, (), (NewTokens(index, ids, -ids.astype(np.float32), version),))


def whole(index: int, size: int, version: int = 0, start: Sequence[VersionSpan] = ()) -> Rollout:
    """A whole sample; `start` are the spans of the part that it continues."""
    ids = np.array([token(index, place) for place in range(size)], np.uint32)
    sampled = start[-1].end if start else 0
    spans = (*start, VersionSpan(version, sampled, size))
    return Rollout.of_one_turn(
        index, ids, -ids.astype(np.float32), spans, FinishReason.STOP, f"text {index}"
    )


def sent(*rollouts: Rollout) -> GenerateEvent:
    return GenerateEvent(None, rollouts)


class Parts:
    """Replicas with scripts, or that continue and end all samples at once.

    Of a script's items events are sent, events of asyncio awaited and errors raised; a number is a
    pause in seconds; a function makes an event of the sizes of the partials.
    """

    def __init__(self, size: int = 6, **scripts: Sequence[Any]) -> None:
        self.size, self.scripts = size, scripts
        self.calls: list[tuple[str, tuple[int, ...], dict[int, int]]] = []
        self.versions: dict[str, int] = {}
        self.reads_late = False
        self.marks: list[Callable[[], None]] = []

    async def generate(
        self,
        replica: ReplicaInfo,
        request: GroupRequest,
        sample_indexes: Sequence[int],
        partials: Sequence[Rollout],
    ) -> AsyncGenerator[GenerateEvent, None]:
        held = {partial.sample_index: partial for partial in partials}
        sizes = {index: partial.num_tokens for index, partial in held.items()}
        self.calls.append((replica.name, tuple(sample_indexes), sizes))
        version = self.versions.get(replica.name, 0)
        yield GenerateEvent((PROMPT_TOKENS, version), ())
        if replica.name not in self.scripts:
            for index in sample_indexes:
                spans = held[index].version_spans if index in held else ()
                yield sent(whole(index, self.size, version, spans))
            return
        for item in self.scripts[replica.name]:
            if isinstance(item, asyncio.Event):
                await item.wait()
            elif isinstance(item, float):
                await asyncio.sleep(item)
            elif isinstance(item, Exception):
                raise item
            elif callable(item):
                yield item(sizes)
            else:
                yield item

    async def adopt_fleet(self, replicas: Collection[ReplicaInfo]) -> None:
        """Nothing is held."""

    def after_backlog(self, callback: Callable[[], None]) -> None:
        """Nothing lies unread, or the test says when it has been read."""
        if self.reads_late:
            self.marks.append(callback)
        else:
            callback()


class Setting:
    """A dispatcher over such replicas, least loaded first: "a", then "b"."""

    def __init__(self, parts: Parts, *, attempts: int = 3, **rules: Any) -> None:
        self.parts = parts
        self.tokens = GroupProgress()  # of the last request
        self.queue = ReplicaQueue(1.0)
        self.dispatcher = GroupDispatcher(
            parts, self.queue, max_attempts=attempts, rules=StragglerRules(**rules)
        )
        self.reported: list[int | None] = []

    async def draw(
        self, samples: int = 2, purpose: Purpose = Purpose.TRAINING, lowest: int = 0
    ) -> RolloutGroup:
        indexes = tuple(range(samples))
        return await self.ask(GroupRequest(PROMPT, indexes, SAMPLING, purpose, lowest))

    async def part(self, budget: GroupProgress, *indexes: int, lowest: int = 0) -> RolloutGroup:
        """Some samples of a group that is asked for by several requests."""
        request = GroupRequest(
            *(PROMPT, indexes, SAMPLING, Purpose.TRAINING, lowest), progress=budget
        )
        return await self.ask(request)

    async def ask(self, request: GroupRequest) -> RolloutGroup:
        async with asyncio.timeout(60):
            self.tokens = request.progress
            request.progress.on_oldest_version = self.reported.append
            if request.purpose is Purpose.TRAINING:
                request.progress.rules = self.dispatcher.rules
            return await self.dispatcher.generate(request)


def check_whole(group: RolloutGroup, size: int = 6) -> None:
    for rollout in group.rollouts:
        expected = [token(rollout.sample_index, place) for place in range(size)]
        assert rollout.token_ids.tolist() == expected
        assert rollout.behavior_logprobs.tolist() == [-float(t) for t in expected]
        assert rollout.finish_reason is FinishReason.STOP


async def test_a_broken_stream_continues_from_its_tokens_under_the_versions_that_drew_them() -> (
    None
):
    broken = (delta(0, 0, 3, 3), delta(1, 0, 2, 3), delta(1, 2, 4, 3), EngineError("lost"))
    parts = Parts(a=broken)
    parts.versions = {"a": 3, "b": 4}
    setting = Setting(parts)
    await setting.dispatcher.announce([replica("a", 3), replica("b", 4)])
    group = await setting.draw()
    assert parts.calls[1] == ("b", (0, 1), {0: 3, 1: 4})
    check_whole(group)
    assert group.rollouts[0].version_spans == (VersionSpan(3, 0, 3), VersionSpan(4, 3, 6))
    assert setting.reported == [None, 3, 3, 3]
    tokens = setting.tokens
    assert (tokens.num_received, tokens.num_thrown_away) == (12, 0)


async def test_a_stream_that_waits_keeps_its_tokens_and_nothing_else_of_its_last_event() -> None:
    came: list[weakref.ref[Any]] = []

    def tokens(_sizes: dict[int, int]) -> GenerateEvent:
        event = delta(0, 0, 3)
        came.append(weakref.ref(event.deltas[0].token_ids))
        return event

    over = asyncio.Event()
    setting = Setting(Parts(a=(tokens, over, sent(whole(0, 6), whole(1, 6)))))
    await setting.dispatcher.announce([replica("a")])
    async with asyncio.TaskGroup() as tasks:
        generating = tasks.create_task(setting.draw())
        await settled(lambda: setting.tokens.num_received == 3)
        assert [kept() for kept in came] == [None]
        over.set()
    check_whole(generating.result())


async def test_tokens_that_are_too_old_are_thrown_away_and_counted() -> None:
    broken = (delta(0, 0, 3, 3), delta(1, 0, 2, 5), EngineError("lost"))
    parts = Parts(a=broken)
    parts.versions = {"a": 5, "b": 5}
    setting = Setting(parts)
    await setting.dispatcher.announce([replica("a", 5), replica("b", 5)])
    check_whole(await setting.draw(lowest=4))
    assert parts.calls[1] == ("b", (0, 1), {1: 2})
    tokens = setting.tokens
    assert (tokens.num_received, tokens.num_thrown_away) == (3 + 12, 3)
    assert setting.reported == [None, 5, 5, 5]  # not 3: no token of that version is left


async def test_samples_that_a_replica_broke_off_continue_from_its_tokens() -> None:
    cut = Rollout.of_one_turn(
        *(1, np.array([100, 101], np.uint32), -np.array([100, 101], np.float32)),
        *((VersionSpan(0, 0, 2),), FinishReason.ABORTED, ""),
    )
    parts = Parts(a=(sent(whole(0, 6)), sent(cut)))
    setting = Setting(parts)
    await setting.dispatcher.announce([replica("a"), replica("b")])
    check_whole(await setting.draw())
    assert parts.calls[1] == ("b", (1,), {1: 2})


async def test_a_removed_replicas_tokens_are_not_sampled_again_and_it_has_not_failed() -> None:
    parts = Parts(a=(delta(0, 0, 3), asyncio.Event()))
    setting = Setting(parts, attempts=1)
    await setting.dispatcher.announce([replica("a")])
    async with asyncio.TaskGroup() as tasks:
        generating = tasks.create_task(setting.draw())
        await settled(lambda: setting.tokens.num_received == 3)
        await setting.dispatcher.announce([replica("b")])
    check_whole(generating.result())
    assert parts.calls[1] == ("b", (0, 1), {0: 3})


async def test_a_silent_stream_continues_elsewhere_and_the_log_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    parts = Parts(a=(delta(0, 0, 3), asyncio.Event()))
    setting = Setting(parts, stall_timeout_s=0.05)
    await setting.dispatcher.announce([replica("a"), replica("b")])
    check_whole(await setting.draw())
    assert parts.calls[1] == ("b", (0, 1), {0: 3})
    (line,) = [m for r in caplog.records if (m := r.getMessage()).startswith("prompt p7")]
    for words in ("replica a is stalled", "nothing for 0.", "3 tokens"):
        assert words in line
    assert "1 samples without any, [1], 1 running, of these 0 is silent for 0." in line


async def test_a_stream_whose_messages_lie_unread_is_not_stalled() -> None:
    read = asyncio.Event()
    parts = Parts(a=(read, delta(0, 0, 3), asyncio.Event()))
    parts.reads_late = True
    setting = Setting(parts, stall_timeout_s=0.05)
    await setting.dispatcher.announce([replica("a"), replica("b")])
    async with asyncio.TaskGroup() as tasks:
        generating = tasks.create_task(setting.draw())
        await settled(lambda: len(parts.marks) == 1)
        read.set()
        await settled(lambda: setting.tokens.num_received == 3)
        parts.marks[0]()
        assert len(parts.calls) == 1
        await settled(lambda: len(parts.marks) == 2)  # silent since, as far as is known
        assert len(parts.calls) == 1
        parts.marks[1]()
    check_whole(generating.result())
    assert parts.calls[1] == ("b", (0, 1), {0: 3})


async def test_who_asks_while_a_backlog_is_read_waits_for_the_next_one() -> None:
    marks: list[Callable[[], None]] = []
    came: list[str] = []
    backlog = Backlog(marks.append)
    for name in "abc":
        backlog.when_read(partial(came.append, name))
    assert (len(marks), backlog.read_until) == (1, float("-inf"))
    marks[0]()
    first = backlog.read_until
    assert (len(marks), came) == (2, ["a"])
    marks[1]()
    assert (len(marks), came) == (2, ["a", "b", "c"])
    assert float("-inf") < first <= backlog.read_until


async def test_a_backlog_that_could_not_be_awaited_is_awaited_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "AGAIN_S", 0.0)
    marks: list[Callable[[], None]] = []
    came: list[str] = []
    failures = [OSError("no channel"), OSError("no channel")]

    def after(then: Callable[[], None]) -> None:
        if failures:
            raise failures.pop()
        marks.append(then)

    backlog = Backlog(after)
    for name in "ab":
        backlog.when_read(partial(came.append, name))
    await settled(lambda: len(marks) == 1)
    marks[0]()
    assert came == ["a", "b"]


async def test_replicas_that_never_answer_end_a_group_after_its_last_attempt() -> None:
    parts = Parts(a=(asyncio.Event(),), b=(asyncio.Event(),))
    setting = Setting(parts, attempts=2, stall_timeout_s=0.05)
    await setting.dispatcher.announce([replica("a"), replica("b")])
    with pytest.raises(GroupFailedError, match="2 attempts failed, the last: b: stalled: nothing"):
        await setting.draw()


async def test_a_stream_that_breaks_after_its_last_sample_costs_nothing() -> None:
    setting = Setting(Parts(a=(sent(whole(0, 6), whole(1, 6)), EngineError("late"))), attempts=1)
    await setting.dispatcher.announce([replica("a")])
    check_whole(await setting.draw())


async def test_a_group_that_waits_in_a_working_replica_is_not_stalled() -> None:
    signs = [item for n in range(6) for item in (0.1, GenerateEvent(None, (), (), n))]
    parts = Parts(a=(*signs, sent(whole(0, 6), whole(1, 6))))
    setting = Setting(parts, attempts=1, stall_timeout_s=0.3)
    await setting.dispatcher.announce([replica("a"), replica("b")])
    check_whole(await setting.draw())
    assert len(parts.calls) == 1


def slowly(step_s: float, tokens: int) -> list[Any]:
    """Sample 0, one token a step, from where it was broken off."""

    def one_more(place: int) -> Callable[[dict[int, int]], GenerateEvent]:
        return lambda sizes: delta(0, sizes.get(0, 0) + place, sizes.get(0, 0) + place + 1)

    return [item for place in range(tokens) for item in (step_s, one_more(place))]


async def test_a_slow_stream_moves_once_where_there_is_capacity() -> None:
    parts = Parts(40, a=(*slowly(0.15, 30), sent(whole(0, 40), whole(1, 40))))
    setting = Setting(parts, attempts=1, slow_factor=4)
    setting.dispatcher._rates.note("b", 1000.0)
    setting.dispatcher._rates.note("a", 1000.0)
    await setting.dispatcher.announce([replica("a"), replica("b")])
    check_whole(await setting.draw(), 40)
    (first, second) = parts.calls
    assert (first[0], second[0]) == ("a", "b")
    assert second[2][0] >= 4
    assert setting.tokens.num_received == 80
    members = setting.queue.fleet._members.values()
    assert not any(member.on_probation for member in members)  # slow is not sick


async def test_the_rate_of_a_replica_that_has_left_counts_no_longer() -> None:
    setting = Setting(Parts(6, a=(sent(whole(0, 6)), asyncio.Event())))
    await setting.dispatcher.announce([replica("a")])
    async with asyncio.TaskGroup() as tasks:
        drawing = tasks.create_task(setting.draw())
        await settled(lambda: setting.tokens.num_received == 6)
        await setting.dispatcher.announce([replica("b")])
        assert (await drawing).rollouts
    assert setting.dispatcher._rates.median_of_others("b") is None


async def test_a_slow_stream_stays_where_there_is_no_capacity_elsewhere() -> None:
    parts = Parts(10, a=(*slowly(0.15, 9), sent(whole(0, 10), whole(1, 10))))
    setting = Setting(parts, attempts=1, slow_factor=4)
    await setting.dispatcher.announce([replica("a")])
    setting.dispatcher._rates.note("b", 1000.0)
    check_whole(await setting.draw(), 10)
    assert len(parts.calls) == 1


async def test_a_group_that_was_moved_stays_however_slow_it_is() -> None:
    rest = (sent(whole(0, 40), whole(1, 40)),)
    parts = Parts(40, a=(*slowly(0.15, 30), *rest), b=(*slowly(0.15, 9), *rest))
    setting = Setting(parts, attempts=1, slow_factor=4)
    await setting.dispatcher.announce([replica("a"), replica("b"), replica("c")])
    for name in "abc":
        setting.dispatcher._rates.note(name, 1e6)
    check_whole(await setting.draw(), 40)
    assert [name for name, _, _ in parts.calls] == ["a", "b"]


async def test_at_its_deadline_a_group_comes_home_as_it_stands() -> None:
    parts = Parts(a=(sent(whole(0, 6)), delta(1, 0, 3), asyncio.Event()))
    setting = Setting(parts, group_deadline_s=0.1)
    await setting.dispatcher.announce([replica("a"), replica("b")])
    group = await setting.draw(3)
    assert [r.finish_reason for r in group.rollouts] == ["stop", "aborted", "aborted"]
    assert [r.num_tokens for r in group.rollouts] == [6, 3, 0]
    assert len(parts.calls) == 1
    assert setting.tokens.num_received == 9
    assert setting.queue.num_free_sequences(0) == 128


async def test_a_deadline_holds_while_the_group_waits_for_another_replica() -> None:
    parts = Parts(a=(sent(whole(0, 6)), delta(1, 0, 3), EngineError("lost")))
    setting = Setting(parts, group_deadline_s=0.1)
    await setting.dispatcher.announce([replica("a")])  # which pauses for longer
    group = await setting.draw()
    assert [r.num_tokens for r in group.rollouts] == [6, 3]
    assert setting.queue.num_waiting == 0


async def test_a_group_with_no_sample_finished_in_time_fails() -> None:
    setting = Setting(Parts(a=(delta(1, 0, 3), asyncio.Event())), group_deadline_s=0.1)
    await setting.dispatcher.announce([replica("a")])
    with pytest.raises(GroupFailedError, match=r"no sample finished within .*: 3 tokens, 0 of 2"):
        await setting.draw()


async def test_validation_is_never_cut_short() -> None:
    parts = Parts(a=(sent(whole(0, 6)), 0.3, sent(whole(1, 6))))
    setting = Setting(parts, group_deadline_s=0.1, group_token_budget=6)
    await setting.dispatcher.announce([replica("a")])
    check_whole(await setting.draw(purpose=Purpose.VALIDATION))


async def test_a_group_that_has_used_its_tokens_comes_home_as_it_stands() -> None:
    parts = Parts(a=(sent(whole(0, 6)), delta(1, 0, 3), delta(1, 3, 5), asyncio.Event()))
    setting = Setting(parts, group_token_budget=9)
    await setting.dispatcher.announce([replica("a")])
    group = await setting.draw()
    assert [r.num_tokens for r in group.rollouts] == [6, 3]


async def test_a_last_sample_that_exceeds_the_budget_is_whole_all_the_same() -> None:
    setting = Setting(Parts(), group_token_budget=9)
    await setting.dispatcher.announce([replica("a")])
    check_whole(await setting.draw())


async def test_a_part_of_a_group_that_has_taken_its_time_is_not_asked_of_a_replica() -> None:
    setting, budget = Setting(Parts(), group_deadline_s=0.1), GroupProgress()
    await setting.dispatcher.announce([replica("a")])
    check_whole(await setting.part(budget, 0, 1))
    await asyncio.sleep(0.15)
    group = await setting.part(budget, 2, 3)
    assert [r.sample_index for r in group.rollouts] == [2, 3]
    assert {r.finish_reason for r in group.rollouts} == {FinishReason.ABORTED}
    assert len(setting.parts.calls) == 1
    check_whole(await setting.draw())  # another group has its own time


async def test_the_deadline_of_a_groups_first_start_ends_parts_that_have_not_started() -> None:
    parts = Parts(a=(sent(whole(0, 6)), asyncio.Event()))
    setting, budget = Setting(parts, group_deadline_s=0.1), GroupProgress()
    await setting.dispatcher.announce([replica("a")])
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(setting.part(budget, 2, lowest=5))  # no replica has it
        await settled(lambda: setting.queue.num_waiting == 1)
        running = tasks.create_task(setting.part(budget, 0, 1))
    assert [r.num_tokens for r in running.result().rollouts] == [6, 0]
    assert [r.num_tokens for r in waiting.result().rollouts] == [0]
    assert setting.queue.num_waiting == 0


async def test_the_tokens_of_all_parts_count_and_end_the_silent_ones() -> None:
    spends = asyncio.Event()
    parts = Parts(
        a=(delta(0, 0, 3), spends, sent(whole(0, 6))), b=(delta(1, 0, 3), asyncio.Event())
    )
    setting, budget = Setting(parts, group_token_budget=9), GroupProgress()
    await setting.dispatcher.announce([replica("a"), replica("b")])
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(setting.part(budget, 0))
        await settled(lambda: budget.num_tokens == 3)
        second = tasks.create_task(setting.part(budget, 1))
        await settled(lambda: budget.num_tokens == 6)
        third = tasks.create_task(setting.part(budget, 2, lowest=5))
        await settled(lambda: setting.queue.num_waiting == 1)
        assert not budget.is_over
        spends.set()
    check_whole(first.result())
    assert [t.result().rollouts[0].num_tokens for t in (second, third)] == [3, 0]
    assert [name for name, _, _ in parts.calls] == ["a", "b"]


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ((delta(5, 0, 2),), "sample 5 was not asked for"),
        ((sent(whole(0, 6)), delta(0, 6, 7)), "sample 0 was not asked for"),
        ((delta(0, 1, 2), sent(whole(0, 6))), "6 tokens that do not continue the 1"),
        ((delta(0, 0, 5), sent(whole(0, 4))), "4 tokens that do not continue the 5"),
    ],
)
async def test_a_replica_that_sends_what_cannot_be_is_not_believed(
    events: Sequence[Any], complaint: str
) -> None:
    setting = Setting(Parts(a=events), attempts=1)
    await setting.dispatcher.announce([replica("a")])
    with pytest.raises(GroupFailedError, match=complaint):
        await setting.draw()


async def test_a_sample_that_does_not_fit_its_tokens_starts_again() -> None:
    parts = Parts(a=(delta(0, 3, 5), sent(whole(0, 6))))
    setting = Setting(parts, group_token_budget=100)
    await setting.dispatcher.announce([replica("a"), replica("b")])
    check_whole(await setting.draw())
    assert parts.calls[1] == ("b", (0, 1), {})
    tokens = setting.tokens
    assert tokens.num_received - tokens.num_thrown_away == 12
