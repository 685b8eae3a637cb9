"""Tokens of unfinished samples from the wire."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.api.rollout.v1 import rollout_pb2
from sluice.codec.fields import logprobs_to_bytes, token_ids_to_bytes
from sluice.codec.rollout import new_tokens_from_proto
from sluice.errors import InvalidRequestError


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
