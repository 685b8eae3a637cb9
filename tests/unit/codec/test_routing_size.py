"""A sample with the engine's experts of a published model, as it travels, against the largest
message that a run allows.
"""

from __future__ import annotations

import numpy as np
import pytest

from sluice.codec.rollout import rollout_to_proto
from sluice.config.derived import max_row_tokens, message_mb
from sluice.config.loading.loader import load_config
from sluice.config.memory.shape import published_shape
from sluice.config.rules.model import routing_problems
from sluice.config.run import RunConfig
from sluice.types import FinishReason, Rollout, VersionSpan

MIB = 1 << 20
SHAPE = published_shape("Qwen3-235B-A22B")
REPLAYS = ("actor_rollout_ref.actor.router_replay.mode=R3", "data.train_batch_size=8")


def encoded_bytes(config: RunConfig) -> int:
    """Size of the longest sample of a run, whose text has four bytes a token."""
    tokens, length = max_row_tokens(config.data), config.data.max_response_length
    generator = np.random.default_rng(0)
    experts = generator.integers(
        SHAPE.experts,
        size=(tokens - 1, SHAPE.expert_layers, SHAPE.experts_per_token),
        dtype=np.uint8,
    )
    sample = Rollout.of_one_turn(
        sample_index=0,
        token_ids=generator.integers(150_000, size=length, dtype=np.uint32),
        behavior_logprobs=np.full(length, -0.1, np.float32),
        version_spans=(VersionSpan(3, 0, length),),
        finish_reason=FinishReason.LENGTH,
        text="word" * length,
        routing=experts,
    )
    return rollout_to_proto(sample).ByteSize()


@pytest.mark.parametrize(("prompt", "response"), [(2048, 20_480), (4096, 32_768)])
def test_samples_of_a_published_launchs_lengths_fit_with_their_experts_as_it_is(
    prompt: int, response: int
) -> None:
    lengths = (f"data.max_prompt_length={prompt}", f"data.max_response_length={response}")
    config = load_config(None, [*REPLAYS, *lengths, "actor_rollout_ref.rollout.n=1"])
    assert not list(routing_problems(config, SHAPE))
    assert 15 * MIB < encoded_bytes(config) <= message_mb(config) * MIB


def test_longer_ones_are_refused_before_the_start_with_a_size_that_holds_them() -> None:
    job = [*REPLAYS, "data.max_response_length=130000", "actor_rollout_ref.rollout.n=1"]
    config = load_config(None, job)
    size = encoded_bytes(config)
    assert size > message_mb(config) * MIB
    (problem,) = routing_problems(config, SHAPE)
    assert message_mb(load_config(None, [*job, *problem.overrides])) * MIB >= size
