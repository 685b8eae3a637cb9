"""Generation through replicas that fail, leave, hang or are full."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import aclosing, nullcontext
from typing import Any

import grpc
import numpy as np
import pytest

from sluice.client import (
    AsyncClient,
    ChatMessage,
    GenerateOptions,
    GenerationStarted,
    RetryPolicy,
    RunAddress,
    SampleDelta,
    SampleFinished,
    Sampling,
    ScoredPrompt,
)
from sluice.client.channels import default_client_name
from sluice.errors import DeadlineError, ExhaustedError, InvalidRequestError, PeerError, SluiceError
from sluice.rpc.metadata import MAX_NAME_LENGTH
from sluice.rpc.retries import Retries, is_transient
from tests.support.token_replica import PROMPT, SCORED, TokenReplica, text_of, token_replicas

QUICK = RetryPolicy(first_s=0.01, max_s=0.02)
TWO = GenerateOptions(n=2, sampling=Sampling(seed=11))


def client_of(*addresses: str, policy: RetryPolicy = QUICK, name: str = "") -> AsyncClient:
    return AsyncClient(RunAddress(replicas=addresses), policy=policy, name=name)


async def test_samples_come_whole_in_order_of_index_with_the_prompt_as_the_model_reads_it() -> None:
    async with token_replicas(TokenReplica()) as addresses, client_of(*addresses) as client:
        found = await client.generate("text", TWO)
    assert found.prompt_token_ids.tolist() == PROMPT.tolist()
    assert [r.token_ids.tolist() for r in found.rollouts] == [
        list(range(6)),
        list(range(100, 106)),
    ]
    assert found.texts == tuple(text_of(r.token_ids) for r in found.rollouts)


@pytest.mark.parametrize("failure", ["breaks", "aborts"])
@pytest.mark.parametrize("every_token", [True, False])
async def test_another_replica_continues_a_broken_generation_from_its_tokens(
    failure: str, every_token: bool
) -> None:
    broken = TokenReplica(
        breaks_after=8 if failure == "breaks" else None,
        aborts_after=8 if failure == "aborts" else None,
    )
    sound = TokenReplica(slots_busy=3)
    async with token_replicas(broken, sound) as addresses, client_of(*addresses) as client:
        if every_token:
            async with aclosing(client.stream("text", TWO)) as stream:
                events = [event async for event in stream]
            ended = [event.rollout for event in events if isinstance(event, SampleFinished)]
            for index in range(2):
                deltas = [
                    e for e in events if isinstance(e, SampleDelta) and e.sample_index == index
                ]
                tokens = np.concatenate([delta.token_ids for delta in deltas])
                assert tokens.tolist() == list(range(100 * index, 100 * index + 6))
                assert "".join(delta.text for delta in deltas) == text_of(tokens)
            started = [event for event in events if isinstance(event, GenerationStarted)]
            assert [event.replica for event in started] == list(addresses)
            assert started[0].moved_because == ""
            assert addresses[0] in started[1].moved_because
        else:
            ended = list((await client.generate("text", TWO)).rollouts)
    assert [r.token_ids.tolist() for r in ended] == [list(range(6)), list(range(100, 106))]
    assert [r.behavior_logprobs.size for r in ended] == [6, 6]
    rest = sound.requests[0]
    assert list(rest.sample_indexes) == [1]  # the first had ended
    assert len(rest.partials[0].token_ids_u32) == 2 * 4
    assert rest.sampling.seed == 11
    assert rest.prompt.tokens.token_ids_u32 == PROMPT.astype("<u4").tobytes()


async def test_without_a_seed_a_continued_sample_keeps_the_one_it_began_with() -> None:
    broken, sound = TokenReplica(breaks_after=2), TokenReplica(slots_busy=3)
    async with token_replicas(broken, sound) as addresses, client_of(*addresses) as client:
        await client.generate("text")
    assert broken.requests[0].sampling.HasField("seed")
    assert broken.requests[0].sampling.seed == sound.requests[0].sampling.seed


async def test_the_share_of_a_token_budget_stays_the_same_when_samples_are_continued() -> None:
    broken, sound = TokenReplica(breaks_after=4), TokenReplica(slots_busy=3)
    options = GenerateOptions(n=2, token_budget=7)
    async with token_replicas(broken, sound) as addresses, client_of(*addresses) as client:
        found = await client.generate("text", options)
    assert [rollout.num_tokens for rollout in found.rollouts] == [3, 3]
    assert [replica.requests[0].token_budget for replica in (broken, sound)] == [6, 3]


async def test_a_prompts_logprobs_come_once_and_another_replica_is_not_asked_for_them() -> None:
    broken = TokenReplica(breaks_after=2, scores_prompts=True)
    sound = TokenReplica(slots_busy=3, scores_prompts=True)
    options = GenerateOptions(prompt_logprobs=True)
    async with token_replicas(broken, sound) as addresses, client_of(*addresses) as client:
        async with aclosing(client.stream("text", options)) as stream:
            (found,) = [event async for event in stream if isinstance(event, ScoredPrompt)]
        await client.generate("text")
    assert [one.requests[0].with_prompt_logprobs for one in (broken, sound)] == [True, False]
    assert (found.texts, found.top_texts) == (SCORED.texts, SCORED.top_texts)
    for field in ("logprobs", "top_token_ids", "top_logprobs"):
        expected = getattr(SCORED.logprobs, field)
        np.testing.assert_array_equal(getattr(found.logprobs, field), expected)


async def test_leaving_a_stream_cancels_the_call_at_the_replica() -> None:
    replica = TokenReplica(hangs_after=2)
    async with token_replicas(replica) as addresses, client_of(*addresses) as client:
        async with aclosing(client.stream("text")) as events:
            async for event in events:
                if isinstance(event, SampleDelta):
                    break
        await replica.cancelled.wait()


async def test_a_deadline_covers_all_and_ends_the_call_at_the_replica() -> None:
    replica = TokenReplica(hangs_after=2)
    options = GenerateOptions(deadline_s=0.3)
    async with token_replicas(replica) as addresses, client_of(*addresses) as client:
        while not replica.requests:  # a slow machine may not send the first one in time
            with pytest.raises(DeadlineError, match="while generating"):
                await client.generate("text", options)
        await replica.cancelled.wait()


async def test_a_deadline_covers_the_tries_that_fail(
    monkeypatch: pytest.MonkeyPatch, skip_time: Callable[[float], None]
) -> None:
    after = Retries.wait_after

    async def wait_after(*arguments: Any) -> None:
        skip_time(600.0)
        await after(*arguments)

    monkeypatch.setattr(Retries, "wait_after", wait_after)
    async with client_of("127.0.0.1:1") as client:
        with pytest.raises(DeadlineError, match=r"the fleet: no answer within 600 s"):
            await client.generate("text", GenerateOptions(deadline_s=600.0))


@pytest.mark.parametrize(
    ("code", "kind", "is_tried_again"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError, False),
        (grpc.StatusCode.UNAVAILABLE, PeerError, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, PeerError, True),
    ],
)
async def test_only_what_may_pass_is_tried_again(
    code: grpc.StatusCode, kind: type[SluiceError], is_tried_again: bool
) -> None:
    once = TokenReplica(breaks_after=0, num_breaks=1, code=code)
    async with token_replicas(once) as addresses, client_of(*addresses) as client:
        with nullcontext() if is_tried_again else pytest.raises(kind):
            await client.generate("text")
    assert len(once.requests) == 1 + is_tried_again
    always = TokenReplica(breaks_after=0, code=code)
    hasty = RetryPolicy(first_s=0.01, max_s=0.01, patience_s=0.02)
    async with token_replicas(always) as addresses, client_of(*addresses, policy=hasty) as client:
        with pytest.raises(kind):
            await client.generate("text")


async def test_requests_spread_over_replicas_by_their_free_slots() -> None:
    small = TokenReplica(slots=2, hangs_after=1)
    large = TokenReplica(slots=8, slots_busy=2, hangs_after=1)
    async with token_replicas(small, large) as addresses, client_of(*addresses) as client:
        streams = [client.stream("text", GenerateOptions(n=2)) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        assert [len(replica.requests) for replica in (small, large)] == [1, 2]
        for stream in streams:
            await stream.aclose()


async def test_options_travel_and_the_client_tells_its_name() -> None:
    replica = TokenReplica()
    options = GenerateOptions(
        priority=-5, request_id="mine", sampling=Sampling(temperature=0.5, stop_token_ids=(4,))
    )
    async with token_replicas(replica) as addresses, client_of(*addresses, name="eval") as client:
        await client.generate([ChatMessage("user", "hi")], options)
        await client.generate(np.array([1, 2], np.uint32), options)
    chat, tokens = replica.requests
    assert (chat.priority, chat.request_id) == (-5, "mine")
    assert (chat.sampling.temperature, list(chat.sampling.stop_token_ids)) == (0.5, [4])
    assert [turn.content for turn in chat.prompt.chat.messages] == ["hi"]
    assert tokens.prompt.tokens.token_ids_u32 == b"\1\0\0\0\2\0\0\0"
    assert replica.metadata[0]["sluice-client"] == "eval"
    assert "traceparent" not in replica.metadata[0]


async def test_unnamed_clients_of_a_process_share_a_name_for_quotas() -> None:
    replica = TokenReplica()
    async with token_replicas(replica) as addresses:
        for _ in range(2):
            async with client_of(*addresses) as client:
                await client.generate("text")
    names = {sent["sluice-client"] for sent in replica.metadata}
    assert names == {f"sluice-client@{socket.gethostname()}:{os.getpid()}"}


@pytest.mark.parametrize("host", ["h" * 300, "größe", "a b\n"])
def test_a_default_name_is_what_metadata_can_hold(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    name = default_client_name()
    assert len(name) <= MAX_NAME_LENGTH
    assert all("!" <= each <= "~" for each in name)
    assert name.startswith(f"sluice-client@{host[0]}")
    assert name.endswith(f":{os.getpid()}")


async def test_the_callers_span_goes_along_with_the_call() -> None:
    replica, header = TokenReplica(), f"00-{'a' * 32}-{'b' * 16}-01"
    options = GenerateOptions(traceparent=header)
    async with token_replicas(replica) as addresses, client_of(*addresses, name="eval") as client:
        await client.generate("text", options)
    assert replica.metadata[0]["traceparent"] == header
    assert replica.metadata[0]["sluice-client"] == "eval"


@pytest.mark.parametrize("header", ["x", f"00-{'0' * 32}-{'b' * 16}-01", "00-a-b-01"])
def test_what_is_no_trace_context_is_refused(header: str) -> None:
    with pytest.raises(InvalidRequestError, match="traceparent: "):
        GenerateOptions(traceparent=header)


def test_a_full_queue_is_worth_another_try() -> None:
    assert is_transient(ExhaustedError("full"))
    assert not is_transient(InvalidRequestError("wrong"))
