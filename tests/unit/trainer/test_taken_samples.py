"""A rank's samples on their way from the reward service: what comes, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import pytest

from services.trainer.learner.batch.packed_rows import training_rows
from services.trainer.learner.sample_reader import RewardSamples
from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.codec.train_batch import outline_to_bytes, pack_messages, sample_messages, with_samples
from sluice.errors import DeadlineError, InvalidRequestError, PeerError
from sluice.types import TrainBatch, is_absent
from tests.support.taken_samples import outline_of, streamed, taken
from tests.support.tiny_policy import make_batch, routed

Messages = list[reward_pb2.TakeSamplesResponse]
OWN = (1, 2, 6)
TRIES = 10


def unchanged(messages: Messages) -> Messages:
    return messages


@dataclass
class Service(reward_pb2_grpc.RewardServiceServicer):
    """Sends samples of a batch, changed on the way; `hangs_after` messages it falls silent."""

    batch: TrainBatch
    change: Callable[[Messages], Messages] = unchanged
    is_lost: bool = False
    pause_s: float = 0.0
    hangs_after: int | None = None
    sizes: list[int] = field(default_factory=list)

    async def TakeSamples(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """Stream them."""
        if self.is_lost:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not leased")
        for message in self.change(list(sample_messages(self.batch, request.rows))):
            hangs = len(self.sizes) == self.hangs_after
            await asyncio.sleep(60.0 if hangs else self.pause_s)
            self.sizes.append(message.ByteSize())
            await context.write(message)


@asynccontextmanager
async def reader_of(
    service: Service, stall_s: float = 30.0, max_bytes: int = 1 << 20
) -> AsyncIterator[RewardSamples]:
    server = grpc.aio.server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    reader = RewardSamples(address, max_bytes, stall_s)
    try:
        yield reader
    finally:
        await asyncio.to_thread(reader.close)
        await server.stop(0)


@asynccontextmanager
async def read_from(
    service: Service, rows: Sequence[int] = OWN, stall_s: float = 30.0, max_bytes: int = 1 << 20
) -> AsyncIterator[TrainBatch]:
    async with reader_of(service, stall_s, max_bytes) as reader:
        yield await asyncio.to_thread(reader.read, outline_of(service.batch), rows, 3)


@pytest.fixture
def batch() -> TrainBatch:
    """Six groups of four samples; the fourth group's prompt has images."""
    made = routed(make_batch(6), num_experts=300)
    groups = list(made.groups)
    groups[1] = replace(groups[1], images=(b"one", b"two"))
    return replace(made, groups=tuple(groups))


async def test_a_rank_gets_its_own_samples_and_their_prompts_and_no_others(
    batch: TrainBatch,
) -> None:
    async with read_from(Service(batch)) as found:
        pass
    rows = [(g, i) for g, group in enumerate(batch.groups) for i in range(len(group.rollouts))]
    for row, (index, member) in enumerate(rows):
        one, other = (each.groups[index].rollouts[member] for each in (found, batch))
        assert one.num_tokens == other.num_tokens
        assert is_absent(one.token_ids) == (row not in OWN)
        if row in OWN:
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.behavior_logprobs, other.behavior_logprobs)
            assert one.routing is not None
            assert other.routing is not None
            np.testing.assert_array_equal(one.routing, other.routing)
            assert one.routing.dtype == np.uint16
    prompts = [not is_absent(group.prompt_token_ids) for group in found.groups]
    assert prompts == [True, True, False, False, False, False]
    assert found.groups[1].images == (b"one", b"two")
    assert found.num_routed == batch.num_routed


async def test_no_message_grows_with_the_batch(batch: TrainBatch) -> None:
    service = Service(batch)
    largest = max(message.ByteSize() for message in sample_messages(batch, range(24)))
    async with read_from(service, range(24), max_bytes=largest + 64) as found:
        assert found.num_routed == 24
    assert sum(service.sizes) > 5 * largest


async def test_small_samples_travel_together_and_a_large_one_alone(batch: TrainBatch) -> None:
    parts = list(sample_messages(batch, range(24)))
    largest = max(part.ByteSize() for part in parts)
    assert all(not one.more for one in pack_messages(parts, 1))
    messages = list(pack_messages(sample_messages(batch, range(24)), 3 * largest))
    assert len(messages) < len(parts) / 2
    assert max(message.ByteSize() for message in messages) < 3.1 * largest
    found = await with_samples(outline_of(batch), range(24), streamed(messages))
    for group, own in zip(found.groups, batch.groups, strict=True):
        assert [one.token_ids.tolist() for one in group.rollouts] == [
            one.token_ids.tolist() for one in own.rollouts
        ]


def test_the_outline_that_all_ranks_get_does_not_grow_with_tokens_and_images() -> None:
    def size(tokens: int, image: bytes) -> int:
        group = make_batch(1).groups[0]
        one = group.rollouts[0]
        long = replace(
            one.turns[0],
            token_ids=np.zeros(tokens, np.uint32),
            behavior_logprobs=np.zeros(tokens, np.float32),
            version_spans=(replace(one.version_spans[0], end=tokens),),
        )
        rollouts = (replace(one, turns=(long,)), *group.rollouts[1:])
        made = make_batch(1)
        return len(
            outline_to_bytes(
                replace(made, groups=(replace(group, rollouts=rollouts, images=(image,)),))
            )
        )

    assert size(1 << 20, bytes(1 << 20)) - size(10, b"") < 16


def test_a_prompt_has_the_same_experts_on_every_rank(batch: TrainBatch) -> None:
    numbers = [range(4 * g, 4 * g + 4) for g in range(len(batch.groups))]
    whole = training_rows(batch.groups, numbers, slice(None))
    for rows in (range(24), OWN, [7]):
        for row in training_rows(taken(batch, rows).groups, numbers, slice(None)):
            if row.number in rows:
                expected = whole[row.number].prompt_routing
                assert expected is not None
                assert row.prompt_routing is not None
                np.testing.assert_array_equal(row.prompt_routing, expected)


async def test_a_lease_that_is_gone_lets_the_batch_be_taken_again(batch: TrainBatch) -> None:
    with pytest.raises(PeerError, match=r"reward service.*taking samples of step 3.*not leased"):
        async with read_from(Service(batch, is_lost=True)):
            pass


async def test_samples_that_do_not_come_are_a_deadline_with_peer_and_phase(
    batch: TrainBatch,
) -> None:
    expected = r"reward service: no answer within 0\.5 s while taking samples of step 3"
    for _ in range(TRIES):  # a slow machine may not bring both messages in time
        with pytest.raises(DeadlineError, match=expected) as caught:
            async with read_from(Service(batch, hangs_after=2), stall_s=0.5):
                pass
        if "2 messages had" in (text := str(caught.value)):
            break
    assert "2 messages had" in text


async def test_all_reads_share_one_event_loop(
    batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    in_time = RewardSamples._until_stall

    def noted(*arguments: Any) -> Any:
        loops.append(asyncio.get_running_loop())
        return in_time(*arguments)

    monkeypatch.setattr(RewardSamples, "_until_stall", noted)
    async with reader_of(Service(batch)) as reader:
        for step in (3, 4):
            await asyncio.to_thread(reader.read, outline_of(batch), OWN, step)
    assert loops[0] is loops[1]


async def test_every_message_has_the_whole_time(batch: TrainBatch) -> None:
    for left in reversed(range(TRIES)):  # a slow machine may not bring one in time
        with suppress(DeadlineError) if left else nullcontext():
            async with read_from(Service(batch, pause_s=0.4), stall_s=1.9) as found:
                assert found.num_routed == 24
                return


def without_experts(messages: Messages) -> Messages:
    messages[1].sample.ClearField("routing")
    return messages


def without_experts_of_the_prompt(messages: Messages) -> Messages:
    messages[0].prompt.ClearField("routing")
    return messages


def with_nan(messages: Messages) -> Messages:
    logprobs = np.frombuffer(messages[1].sample.behavior_logprobs_f32, "<f4").copy()
    logprobs[0] = np.nan
    messages[1].sample.behavior_logprobs_f32 = logprobs.tobytes()
    return messages


def with_fewer_tokens(messages: Messages) -> Messages:
    messages[1].sample.token_ids_u32 = messages[1].sample.token_ids_u32[4:]
    return messages


def with_fewer_logprobs(messages: Messages) -> Messages:
    logprobs = messages[1].sample.behavior_logprobs_f32
    messages[1].sample.behavior_logprobs_f32 = logprobs[4:]
    return messages


def with_fewer_images(messages: Messages) -> Messages:
    del messages[3].prompt.images[:1]
    return messages


REFUSED = {
    "a sample is missing": (lambda sent: sent[:-1], "2 of 3 samples came"),
    "a sample came twice": (lambda sent: [*sent, sent[-1]], "sample 6 came instead of None"),
    "another sample came": (lambda sent: [sent[0], sent[2]], "sample 2 came instead of 1"),
    "no prompt came": (lambda sent: sent[1:], "sample 1 came before its prompt"),
    "a prompt came twice": (lambda sent: [sent[0], *sent], "prompt of group 0 is not expected"),
    "no experts came": (without_experts, r"group [\w-]+, sample 1: no experts came"),
    "no experts of the prompt came": (
        without_experts_of_the_prompt,
        r"group [\w-]+: no experts came for the prompt",
    ),
    "no logprob": (with_nan, r"group [\w-]+, sample 1: the logprob of token 0 is nan"),
    "fewer tokens": (with_fewer_tokens, r"group [\w-]+, sample 1: \d+ tokens came for the \d+"),
    "fewer logprobs": (with_fewer_logprobs, r"group [\w-]+, sample 1: .* behavior logprobs"),
    "fewer images": (with_fewer_images, r"group [\w-]+: 1 images came for the 2"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_samples_that_do_not_fit_the_batch_are_refused(batch: TrainBatch, name: str) -> None:
    change, expected = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=expected):
        async with read_from(Service(batch, change)):
            pass


@pytest.mark.parametrize("rows", [[3, 2], [1, 1], [24]])
def test_a_request_for_samples_names_rising_numbers_of_the_batch(
    batch: TrainBatch, rows: list[int]
) -> None:
    with pytest.raises(InvalidRequestError, match=r"rows: \d+ after .*; send rising numbers"):
        list(sample_messages(batch, rows))
