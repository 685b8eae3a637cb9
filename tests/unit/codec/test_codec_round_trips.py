"""What is encoded is decoded to the same value, whatever the value."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.accounting import COUNTER_NAMES, ReplicaCounters
from sluice.api.rollout.v1 import rollout_pb2
from sluice.api.trainer.v1 import trainer_pb2
from sluice.codec import fields as arrays
from sluice.codec import messages, reward, rollout, weights
from sluice.codec.fields import logprobs_to_bytes, token_ids_to_bytes
from sluice.codec.rollout import new_tokens_from_proto
from sluice.errors import InvalidRequestError
from sluice.types import (
    ChatMessage,
    PromptEnd,
    ReplicaInfo,
    Rollout,
    SamplingParams,
    TrainBatch,
    TrainGroup,
    TransferGroupSpec,
)
from sluice.weight_share import WeightShare, WorkerPlace
from tests.support.domain_values import (
    finite,
    replicas,
    rollouts,
    routed_experts,
    samplings,
    train_batches,
    transfer_groups,
    weight_shares,
    words,
    worker_places,
)
from tests.support.taken_samples import taken


def same(left: object, right: object) -> bool:
    """Equality by value; arrays by dtype and content."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if is_dataclass(left) and type(left) is type(right):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))
    return left == right


@given(rollouts())
def test_a_rollout_comes_back(value: Rollout) -> None:
    assert same(rollout.rollout_from_proto(rollout.rollout_to_proto(value)), value)


@given(rollouts(), st.data())
def test_a_rollout_comes_back_with_its_experts(value: Rollout, data: st.DataObject) -> None:
    value = value.with_routing(data.draw(routed_experts(max(1, value.num_tokens))))
    assert same(rollout.rollout_from_proto(rollout.rollout_to_proto(value)), value)


@given(train_batches, st.data())
def test_a_train_batch_comes_back_from_its_outline_and_its_samples(
    value: TrainBatch, data: st.DataObject
) -> None:
    # A prompt comes with its samples.
    groups = tuple(data.draw(with_more(group)) for group in value.groups if group.rollouts)
    value = replace(value, groups=groups)
    found = taken(value, range(sum(len(group.rollouts) for group in groups)))
    assert same(found, without_texts(value))


@st.composite
def with_more(draw: st.DrawFn, group: TrainGroup) -> TrainGroup:
    """The group with experts of some samples, images and a baseline."""
    routed = tuple(
        one.with_routing(draw(st.none() | routed_experts(max(1, one.num_tokens))))
        for one in group.rollouts
    )
    images = draw(st.lists(st.binary(max_size=20), max_size=3))
    return replace(
        group,
        rollouts=routed,
        images=tuple(images),
        baseline_reward=draw(st.none() | finite),
    )


def without_texts(batch: TrainBatch) -> TrainBatch:
    """No trainer reads them."""
    groups = []
    for group in batch.groups:
        turns = [(one, replace(one.turns[0], text="")) for one in group.rollouts]
        rollouts = tuple(replace(one, turns=(turn,)) for one, turn in turns)
        scores = tuple(replace(scored, prediction=None) for scored in group.scores)
        groups.append(replace(group, rollouts=rollouts, scores=scores))
    return replace(batch, groups=tuple(groups))


@given(samplings)
def test_sampling_parameters_come_back_whatever_the_defaults(value: SamplingParams) -> None:
    message = rollout.sampling_to_proto(value)
    assert same(rollout.sampling_from_proto(message, default_seed=1, longest=2), value)


@given(replicas, st.integers(0, 2**63 - 1))
def test_a_replica_comes_back(value: ReplicaInfo, version: int) -> None:
    message = messages.replica_to_proto(value, version)
    assert messages.replica_from_proto(message) == value
    assert message.policy_version == version


@given(transfer_groups())
def test_a_transfer_group_comes_back(value: TransferGroupSpec) -> None:
    assert weights.group_spec_from_proto(weights.group_spec_to_proto(value)) == value


@given(transfer_groups(), st.lists(worker_places, min_size=1, max_size=4))
def test_the_places_of_a_replicas_workers_come_back(
    value: TransferGroupSpec, places: list[WorkerPlace]
) -> None:
    spec = replace(value, places=tuple(places), ranks=len(places), group=places[0].group)
    assert weights.group_spec_from_proto(weights.group_spec_to_proto(spec)) == spec
    of_last = spec.of_worker(len(places) - 1)
    assert (of_last.rank, of_last.group, of_last.ranks) == (places[-1].rank, places[-1].group, 1)


@given(st.lists(weight_shares, max_size=3))
def test_the_shares_of_a_replicas_workers_come_back(value: list[WeightShare]) -> None:
    messages_of = [weights.share_to_proto(share) for share in value]
    assert weights.shares_from_proto(messages_of, len(value)) == tuple(value)


@given(st.lists(st.builds(ChatMessage, st.sampled_from(["system", "user"]), words), min_size=1))
def test_a_conversation_comes_back(turns: list[ChatMessage]) -> None:
    message = rollout.chat_prompt_to_proto(turns)
    assert rollout.chat_messages_from_proto(message.chat.messages) == tuple(turns)


def test_every_end_of_a_prompt_has_its_own_number() -> None:
    assert set(reward.PROMPT_END_TO_PROTO) == set(PromptEnd)
    assert len(set(reward.PROMPT_END_TO_PROTO.values())) == len(PromptEnd)


def test_arrays_travel_as_little_endian_32_bit_values_and_are_read_only() -> None:
    data = arrays.token_ids_to_bytes(np.array([1, 258], np.uint32))
    assert data == bytes([1, 0, 0, 0, 2, 1, 0, 0])
    assert not arrays.token_ids_from_bytes(data, "x").flags.writeable
    assert arrays.logprobs_to_bytes(np.array([-0.5], np.float32)) == bytes([0, 0, 0, 0xBF])


def message(num_tokens: int, num_logprobs: int) -> rollout_pb2.TokenDelta:
    return rollout_pb2.TokenDelta(
        sample_index=3,
        token_ids_u32=token_ids_to_bytes(np.arange(num_tokens, dtype=np.uint32)),
        behavior_logprobs_f32=logprobs_to_bytes(-np.arange(num_logprobs, dtype=np.float32)),
        policy_version=7,
    )


def test_tokens_come_with_their_logprobs_sample_and_version() -> None:
    tokens = new_tokens_from_proto(message(2, 2))
    assert (tokens.sample_index, tokens.version) == (3, 7)
    assert tokens.token_ids.tolist() == [0, 1]
    assert tokens.behavior_logprobs.tolist() == [0, -1]


@pytest.mark.parametrize("num_logprobs", [1, 3])
def test_tokens_without_as_many_logprobs_are_refused(num_logprobs: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"sample 3: 2 token ids against {num_logprobs}"):
        new_tokens_from_proto(message(2, num_logprobs))


def test_half_a_token_is_refused() -> None:
    broken = rollout_pb2.TokenDelta(token_ids_u32=b"\0\0\0")
    with pytest.raises(InvalidRequestError, match=r"delta\.token_ids_u32"):
        new_tokens_from_proto(broken)


@pytest.mark.parametrize("message", [trainer_pb2.HeartbeatRequest, rollout_pb2.GetStatusResponse])
def test_every_counter_of_a_replica_travels(message: Any) -> None:
    values: dict[str, Any] = {name: number for number, name in enumerate(COUNTER_NAMES, start=1)}
    counters = ReplicaCounters(**values | {"seconds_by_state": {"idle": 1.5}})
    encoded = message(**messages.counters_to_fields(counters, wall_seconds=9.5))
    assert messages.counters_from_proto(encoded) == replace(counters, wall_seconds=9.5)
