"""Clients' prompts: receipts, outcomes, bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct, Value

from services.reward.grading.scorers.registry import scorer_for
from services.reward.group_table import PromptOutcome
from services.reward.ledger.ledger import PromptLedger
from services.reward.prompts.submissions import (
    MAX_UNSENT,
    Receipt,
    Submissions,
    SubmissionSession,
)
from services.reward.servicer import RewardServicer
from sluice.api.reward.v1 import reward_pb2
from sluice.codec.reward import extra_info_of
from sluice.config.schema.actor_rollout_ref import RolloutConfig
from sluice.config.schema.service import LimitsConfig
from sluice.rpc.client import reward_stub
from sluice.types import ChatMessage, Prompt, PromptEnd
from tests.support.client_prompt import client_prompt
from tests.support.group_events import group_ended
from tests.support.rpc_server import connected


def submission(prompt_id: str, **changes: Any) -> Prompt:
    return replace(client_prompt(prompt_id=prompt_id), **changes)


@pytest.fixture
def ledger() -> PromptLedger:
    return PromptLedger()


@pytest.fixture
def submissions(ledger: PromptLedger) -> Submissions:
    return Submissions(ledger, ledger.accept, lambda source: void(scorer_for(source)), 2)


def void(_: object) -> None:
    """Drop a value."""


async def receipt(session: SubmissionSession) -> Receipt:
    event = await session.next_event()
    assert isinstance(event, Receipt)
    return event


def end(submissions: Submissions, ledger: PromptLedger, prompt_id: str) -> None:
    prompt = ledger.end(prompt_id, PromptEnd.TRAINED)
    submissions.observe(group_ended(prompt, PromptEnd.TRAINED, step=3))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (submission(""), "use 1 to 128"),
        (submission("é" * 65), "130 bytes"),
        (submission("data-3"), "names data-set rows"),
        (submission("validation-0"), "'validation-…' names data-set rows"),
        (submission("a", messages=()), "at least one turn"),
        (submission("a", messages=(ChatMessage("", "x"),)), "each with a role"),
        (submission("a", data_source=""), "data_source: empty"),
        (submission("a", data_source="poetry"), "no built-in scorer"),
    ],
)
async def test_a_wrong_prompt_is_refused_with_the_reason_and_not_accepted(
    submissions: Submissions, ledger: PromptLedger, wrong: Prompt, reason: str
) -> None:
    with submissions.session() as session:
        submissions.submit(wrong, session)
        refused = await receipt(session)
    assert refused.sequence is None
    assert not refused.is_retryable
    assert reason in refused.refused_because
    assert ledger.num_submitted == 0


async def test_unfinished_prompts_are_bounded(
    submissions: Submissions, ledger: PromptLedger
) -> None:
    with submissions.session() as session:
        for name in "abc":
            submissions.submit(submission(name), session)
        receipts = [await receipt(session) for _ in range(3)]
        assert [r.sequence is None for r in receipts] == [False, False, True]
        assert [r.is_retryable for r in receipts] == [False, False, True]
        assert "max_client_pending" in receipts[2].refused_because
        end(submissions, ledger, "a")
        await session.next_event()
        submissions.submit(submission("c"), session)
        assert (await receipt(session)).sequence is not None


async def test_a_prompt_that_can_never_be_accepted_is_not_asked_to_wait_for_space(
    ledger: PromptLedger,
) -> None:
    limits = LimitsConfig(max_client_images_mb=1, max_prompts_per_stream=2)
    submissions = Submissions(ledger, ledger.accept, lambda _: None, 9, limits)
    with submissions.session() as session:
        for name in "xab":
            submissions.submit(submission(name), session)
            await receipt(session)
            if name == "x":
                end(submissions, ledger, "x")
                await session.next_event()
        for wrong, reason in (
            (submission("a", ground_truth="2"), "'a' was used before"),
            (submission("a"), "'a' was used before"),
            (submission("x", ground_truth="2"), "'x' was used before"),
            (submission("c", images=(bytes((1 << 20) + 1),)), "send fewer or smaller ones"),
        ):
            submissions.submit(wrong, session)
            refused = await receipt(session)
            assert reason in refused.refused_because
            assert not refused.is_retryable
        submissions.submit(submission("c"), session)
        assert (await receipt(session)).is_retryable


async def test_a_session_ends_when_its_input_and_all_its_prompts_have_ended(
    submissions: Submissions, ledger: PromptLedger
) -> None:
    with submissions.session() as session:
        submissions.submit(submission("a"), session)
        session.close_input()
        await receipt(session)
        end(submissions, ledger, "a")
        outcome = await session.next_event()
        assert isinstance(outcome, PromptOutcome)
        assert (outcome.end, outcome.step) == (PromptEnd.TRAINED, 3)
        assert await session.next_event() is None


async def test_a_client_that_left_receives_nothing_and_its_prompts_stay(
    submissions: Submissions, ledger: PromptLedger
) -> None:
    with submissions.session() as session:
        submissions.submit(submission("a"), session)
    assert ledger.num_pending == 1
    end(submissions, ledger, "a")
    with submissions.session() as other:
        submissions.submit(submission("b"), other)
        assert (await receipt(other)).sequence == 1


async def test_a_client_that_does_not_read_is_not_given_more(submissions: Submissions) -> None:
    with submissions.session() as session:
        for _ in range(MAX_UNSENT):
            submissions.submit(submission(""), session)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(session.wait_to_receive())
            await asyncio.sleep(0)
            assert not waiting.done()
            await receipt(session)


async def test_the_end_of_the_service_ends_every_session(submissions: Submissions) -> None:
    with submissions.session() as session:
        submissions.submit(submission("a"), session)
        await receipt(session)
        submissions.end()
        assert await session.next_event() is None


async def test_a_client_that_sends_nothing_is_left_in_order_when_the_service_ends(
    submissions: Submissions,
) -> None:
    app: Any = SimpleNamespace(
        submissions=submissions, traces=SimpleNamespace(receipt_sent=lambda _: None)
    )
    first = reward_pb2.SubmitPromptsRequest(prompt_id="a", data_source="math_dapo")
    first.messages.add(role="user", content="?")

    async def one_and_no_more() -> AsyncIterator[reward_pb2.SubmitPromptsRequest]:
        yield first
        await asyncio.Event().wait()

    async with connected(reward=RewardServicer(app, RolloutConfig(), 16)) as channel:
        call: Any = reward_stub(channel).SubmitPrompts(one_and_no_more(), timeout=30)
        assert (await call.read()).receipt.sequence == 0
        submissions.end()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_a_client_that_keeps_sending_is_left_in_order_when_the_service_ends(
    submissions: Submissions,
) -> None:
    app: Any = SimpleNamespace(
        submissions=submissions, traces=SimpleNamespace(receipt_sent=lambda _: None)
    )

    async def without_end() -> AsyncIterator[reward_pb2.SubmitPromptsRequest]:
        for number in count():
            one = reward_pb2.SubmitPromptsRequest(prompt_id=f"{number}", data_source="math_dapo")
            one.messages.add(role="user", content="?")
            yield one
            await asyncio.sleep(0.001)

    async with connected(reward=RewardServicer(app, RolloutConfig(), 16)) as channel:
        call: Any = reward_stub(channel).SubmitPrompts(without_end(), timeout=30)
        assert (await call.read()).receipt.sequence == 0
        submissions.end()
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            # The end met a write of grpcio's client.
            assert "SendMessageOperation" in error.debug_error_string()  # noqa: PT017
        else:
            assert await call.code() is grpc.StatusCode.OK


async def test_a_prompt_sent_again_by_another_call_gets_its_receipt_and_its_outcome(
    submissions: Submissions, ledger: PromptLedger
) -> None:
    with submissions.session() as left, submissions.session() as back:
        submissions.submit(submission("a"), left)
        submissions.submit(submission("a"), left)
        first, twice = await receipt(left), await receipt(left)
        assert (first.sequence, twice.sequence) == (0, None)
        submissions.submit(submission("a"), back)
        assert await receipt(back) == first
        assert (left.num_open, back.num_open) == (0, 1)
        end(submissions, ledger, "a")
        assert isinstance(await back.next_event(), PromptOutcome)
    with submissions.session() as late:
        submissions.submit(submission("a", ground_truth="2"), late)
        assert "used before" in (await receipt(late)).refused_because
        submissions.submit(submission("a"), late)
        late.close_input()
        assert await receipt(late) == first
        outcome = await late.next_event()
        assert isinstance(outcome, PromptOutcome)
        assert outcome.end is PromptEnd.TRAINED
        assert await late.next_event() is None
    assert ledger.num_submitted == 1


def sent_in_order(*names: str) -> Prompt:
    """A prompt whose fields travel in this order; Go's library chooses another each time."""
    parts = [Struct(fields={name: Value(bool_value=True)}) for name in names]
    struct = Struct.FromString(b"".join(part.SerializeToString() for part in parts))
    struct.update({"inner": Struct.FromString(struct.SerializeToString())})
    return submission("a", extra_info=extra_info_of(struct, "extra_info", 1 << 10))


async def test_an_ended_prompt_is_found_again_in_whatever_order_its_fields_come(
    submissions: Submissions, ledger: PromptLedger
) -> None:
    with submissions.session() as left:
        submissions.submit(sent_in_order("alpha", "beta"), left)
        first = await receipt(left)
        end(submissions, ledger, "a")
    with submissions.session() as back:
        submissions.submit(sent_in_order("beta", "alpha"), back)
        assert await receipt(back) == first
        assert isinstance(await back.next_event(), PromptOutcome)


class SlowLedger(PromptLedger):
    """A disk that commits when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.committed = asyncio.Event()

    async def durable(self, change_number: int | None = None) -> None:
        await self.committed.wait()


async def test_a_receipt_waits_for_the_disk() -> None:
    ledger = SlowLedger()
    submissions = Submissions(ledger, ledger.accept, lambda _: None, 2)
    with submissions.session() as session:
        submissions.submit(submission("a"), session)
        async with asyncio.TaskGroup() as tasks:
            reported = tasks.create_task(session.next_event())
            for _ in range(5):
                await asyncio.sleep(0)
            assert not reported.done()
            ledger.committed.set()
        assert reported.result() == Receipt("a", 0)
