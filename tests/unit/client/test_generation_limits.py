"""What cannot be is refused before anybody is asked; what no replica sends is its defect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.client import (
    AsyncClient,
    ChatMessage,
    GenerateOptions,
    NewPrompt,
    RetryPolicy,
    RunAddress,
    Sampling,
    ScoreItem,
)
from sluice.client.generation import GenerationProgress
from sluice.client.generation_types import Prompt
from sluice.codec.fields import token_ids_to_bytes
from sluice.codec.rollout import check_generate, rollout_to_proto
from sluice.errors import InvalidRequestError, PeerDefectError
from sluice.types import FinishReason
from tests.support.rpc_server import serving
from tests.support.token_replica import TokenReplica, token_replicas, whole_sample

NAN, TOO_LARGE = float("nan"), 1 << 64


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("temperature", lambda: Sampling(temperature=NAN)),
        ("temperature", lambda: Sampling(temperature=101)),
        ("top_p", lambda: Sampling(top_p=0.0)),
        ("top_p", lambda: Sampling(top_p=NAN)),
        ("top_k", lambda: Sampling(top_k=0)),
        ("top_k", lambda: Sampling(top_k=TOO_LARGE)),
        ("max_tokens", lambda: Sampling(max_tokens=-1)),
        ("max_tokens", lambda: Sampling(max_tokens=1 << 32)),
        ("seed", lambda: Sampling(seed=-1)),
        ("seed", lambda: Sampling(seed=TOO_LARGE)),
        ("stop_token_ids", lambda: Sampling(stop_token_ids=(3, -1))),
        ("stop", lambda: Sampling(stop=("x",) * 17)),
        (r"stop\[1\]", lambda: Sampling(stop=("x", ""))),
        (r"stop\[0\]", lambda: Sampling(stop=("é" * 65,))),
        ("stop", lambda: Sampling(stop=("\ud800",))),
        ("stop", lambda: Sampling(stop="END")),  # type: ignore[arg-type]
        ("n", lambda: GenerateOptions(n=0)),
        ("n", lambda: GenerateOptions(n=1025)),
        ("priority", lambda: GenerateOptions(priority=101)),
        ("token_budget", lambda: GenerateOptions(token_budget=1 << 32)),
        ("token_budget", lambda: GenerateOptions(n=3, token_budget=2)),
        ("deadline_s", lambda: GenerateOptions(deadline_s=NAN)),
        ("deadline_s", lambda: GenerateOptions(deadline_s=float("inf"))),
        ("deadline_s", lambda: GenerateOptions(deadline_s=0)),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_its_name(
    field: str, make: Callable[[], object]
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field}: "):
        make()


def test_stop_strings_at_their_limits_reach_the_replica_as_they_are() -> None:
    stops = ("x", "é" * 64, *map(str, range(14)))
    options = GenerateOptions(sampling=Sampling(stop=stops))
    request = GenerationProgress("text", options, every_token=False).request()
    assert tuple(request.sampling.stop) == stops
    check_generate(request, max_n=1)


@pytest.mark.parametrize(
    "prompt",
    [
        *("\ud800", [ChatMessage("user", "\udcff")], [], ["a"], [ChatMessage("user", "a"), 3]),
        *([-1], [1 << 32], [1.5], [TOO_LARGE], [[1], [2]]),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(prompt: Prompt) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt: "):
        GenerationProgress(prompt, GenerateOptions(), every_token=True)


async def test_what_is_larger_than_a_message_is_refused_and_not_tried_again() -> None:
    replica = TokenReplica()
    async with token_replicas(replica) as addresses:
        address = RunAddress(replicas=addresses, reward=addresses[0], max_message_bytes=1000)
        async with AsyncClient(address, policy=RetryPolicy(patience_s=600.0)) as client:
            with pytest.raises(InvalidRequestError, match=r"^prompt: \d+ bytes; send at most 1000"):
                await client.generate("a" * 1001)
            with pytest.raises(InvalidRequestError, match=r"^items: \d+ bytes; send at most 1000"):
                await client.score([ScoreItem("math_dapo", "a" * 1001, "4")])
    assert not replica.requests


async def test_what_is_no_text_is_refused_with_its_place_and_not_tried_again() -> None:
    address = RunAddress(reward="127.0.0.1:1")
    odd, good = "\ud800", ScoreItem("math_dapo", "4", "4")
    async with AsyncClient(address, policy=RetryPolicy(patience_s=600.0)) as client:
        with pytest.raises(InvalidRequestError, match=r"^items\[1\]: not valid Unicode"):
            await client.score([good, ScoreItem("math_dapo", odd, "4")])
        prompt = NewPrompt("odd", (ChatMessage("user", odd),), "math_dapo", "4")
        with pytest.raises(InvalidRequestError, match=r"^prompt odd: not valid Unicode"):
            async for _ in client.submit([prompt]):
                pass


class ForgetfulReward(reward_pb2_grpc.RewardServiceServicer):
    """Leaves a grade out."""

    async def Score(self, request: Any, context: Any) -> Any:
        return reward_pb2.ScoreResponse(
            results=[reward_pb2.ScoreResult(failure="unscorable: x") for _ in request.items[1:]]
        )


async def test_grades_that_are_not_one_an_item_are_given_to_nobody() -> None:
    items = [ScoreItem("math_dapo", "4", "4")] * 3
    async with (
        serving(reward=ForgetfulReward()) as server,
        AsyncClient(RunAddress(reward=server.address)) as client,
    ):
        with pytest.raises(PeerDefectError, match="2 results for 3 responses"):
            await client.score(items)


ACCEPTED = rollout.GenerateResponse(
    accepted=rollout.PromptAccepted(
        prompt_token_ids_u32=token_ids_to_bytes(np.array([7], np.uint32)), policy_version=1
    )
)
SAMPLE = rollout.GenerateResponse(
    rollouts=[rollout_to_proto(whole_sample(0, 2, 1, FinishReason.STOP))]
)
UNASKED = rollout.GenerateResponse(
    rollouts=[rollout_to_proto(whole_sample(1, 2, 1, FinishReason.STOP))]
)
BROKEN = rollout.GenerateResponse(
    deltas=[rollout.TokenDelta(sample_index=0, token_ids_u32=b"abc", policy_version=1)]
)


@pytest.mark.parametrize(
    "messages",
    [(SAMPLE,), (ACCEPTED, UNASKED), (ACCEPTED, SAMPLE, SAMPLE), (ACCEPTED, BROKEN)],
    ids=["before it accepts", "not asked for", "twice", "broken arrays"],
)
def test_what_no_replica_sends_is_its_defect_and_not_the_callers(
    messages: tuple[rollout.GenerateResponse, ...],
) -> None:
    progress = GenerationProgress("text", GenerateOptions(), every_token=True)
    *before, last = messages
    for message in before:
        list(progress.take(message, "replica", ""))
    with pytest.raises(PeerDefectError, match="replica: failed while reading its samples"):
        list(progress.take(last, "replica", ""))
