"""What breaks the contract is refused with the field's name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.api.weights.v1 import weights_pb2 as weights
from sluice.codec.fields import logprobs_from_bytes, token_ids_from_bytes
from sluice.codec.messages import replica_from_proto
from sluice.codec.reward import train_batch_from_bytes, train_batch_from_proto
from sluice.codec.rollout import chat_messages_from_proto, rollout_from_proto, sampling_from_proto
from sluice.codec.weights import group_spec_from_proto
from sluice.errors import InvalidRequestError

STOP = common.FINISH_REASON_STOP
NAN = float("nan")


def sampling(**fields: Any) -> Any:
    return sampling_from_proto(common.SamplingParams(**fields), default_seed=7, longest=99)


@pytest.mark.parametrize("decode", [token_ids_from_bytes, logprobs_from_bytes])
@given(st.binary(max_size=40).filter(lambda data: len(data) % 4))
def test_a_torn_array_is_refused_by_name(decode: Callable[[bytes, str], Any], data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=rf"batch\.x: {len(data)} bytes are no whole"):
        decode(data, "batch.x")


@given(st.binary(max_size=200))
def test_bytes_that_are_no_batch_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with suppress(InvalidRequestError):
        train_batch_from_bytes(data)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (common.Rollout(), "rollout.finish_reason: 0 is unknown"),
        (common.Rollout(finish_reason=77), "rollout.finish_reason: 77 is unknown"),  # type: ignore[arg-type]
        (common.Rollout(finish_reason=STOP, token_ids_u32=b"123"), "rollout.token_ids_u32"),
        (
            common.Rollout(finish_reason=STOP, behavior_logprobs_f32=b"12345"),
            "rollout.behavior_logprobs_f32",
        ),
        (common.Rollout(finish_reason=STOP, token_ids_u32=bytes(4)), "behavior logprobs"),
        (
            common.Rollout(
                sample_index=3,
                finish_reason=STOP,
                token_ids_u32=bytes(8),
                behavior_logprobs_f32=bytes(8),
                version_spans=[common.VersionSpan(version=1, start=0, end=1)],
            ),
            "rollout 3: version spans cover 1 of 2 tokens",
        ),
        (
            common.Rollout(
                finish_reason=STOP,
                token_ids_u32=bytes(8),
                behavior_logprobs_f32=bytes(8),
                version_spans=[common.VersionSpan(version=1, start=1, end=2)],
            ),
            "version spans leave gaps",
        ),
    ],
)
def test_a_rollout_whose_parts_do_not_fit_is_refused(message: common.Rollout, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        rollout_from_proto(message)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -0.5}, "sampling.temperature: -0.5"),
        ({"temperature": 100.5}, "sampling.temperature: 100.5"),
        ({"temperature": NAN}, "sampling.temperature: nan"),
        ({"top_p": 0.0}, "sampling.top_p: 0.0"),
        ({"top_p": 1.5}, "sampling.top_p: 1.5"),
        ({"top_p": NAN}, "sampling.top_p: nan"),
        ({"top_k": 0}, "sampling.top_k: 0"),
        ({"top_k": -2}, "sampling.top_k: -2"),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        sampling(**fields)


def test_the_ends_of_the_ranges_are_taken() -> None:
    assert sampling(temperature=0.0).temperature == 0.0
    assert sampling(temperature=100.0).temperature == 100.0
    assert sampling(top_p=1.0, top_k=-1).top_k == -1
    assert sampling(top_k=1).top_k == 1


def test_absent_parameters_take_the_protocols_defaults() -> None:
    value = sampling()
    assert (value.temperature, value.top_p, value.top_k) == (1.0, 1.0, -1)
    assert (value.seed, value.max_tokens) == (7, 99)
    assert sampling(seed=0).seed == 0


def test_a_group_with_a_score_too_few_is_refused_by_its_prompt() -> None:
    group = reward.TrainGroup(prompt_id="p7", rollouts=[common.Rollout(finish_reason=STOP)])
    with pytest.raises(InvalidRequestError, match="group p7: 0 scores for 1 rollouts"):
        train_batch_from_proto(reward.TrainBatch(groups=[group]))


@pytest.mark.parametrize("field", ["name", "instance_id", "address", "slots"])
def test_a_replica_without_one_of_its_fields_is_refused_by_it(field: str) -> None:
    message = common.Replica(name="r", instance_id="i", address="a", slots=1)
    message.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=rf"replica\.{field}: missing"):
        replica_from_proto(message)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (2, 2), (5, 2), (0, 0)])
def test_a_receiver_that_is_not_among_the_receivers_is_refused(rank: int, world_size: int) -> None:
    message = weights.JoinGroupRequest(rank=rank, world_size=world_size)
    with pytest.raises(InvalidRequestError, match=f"rank {rank} of {world_size}"):
        group_spec_from_proto(message)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages: empty"),
        ([common.ChatMessage(role="user"), common.ChatMessage()], r"messages\[1\]\.role: empty"),
    ],
)
def test_a_conversation_without_turns_or_roles_is_refused(
    messages: list[common.ChatMessage], named: str
) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        chat_messages_from_proto(messages)
