"""`actor_rollout_ref.rollout.ignore_eos`, from the configuration to the tokens. Real servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.reward.groups.settings import training_sampling, validation_sampling
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.codec.fields import token_ids_from_bytes, token_ids_to_bytes
from sluice.codec.rollout import sampling_to_proto
from sluice.config.loading.loader import load_config
from sluice.rpc.client import open_channel, rollout_stub
from sluice.rpc.metadata import SERVICE_KEY
from sluice.types import SamplingParams
from tests.support.causal_lms import EOS, request
from tests.support.word_replica import word_replica

_KEY = "actor_rollout_ref.rollout.ignore_eos"
_TOKENS, _SAMPLES = 24, 24


async def _sampled(address: str, sampling: SamplingParams) -> list[list[int]]:
    tokens = common.TokenPrompt(token_ids_u32=token_ids_to_bytes(request().prompt_token_ids))
    asked = rollout.GenerateRequest(
        prompt=common.PromptInput(tokens=tokens),
        sample_indexes=range(_SAMPLES),
        sampling=sampling_to_proto(sampling),
    )
    named = ((SERVICE_KEY, "reward"),)
    async with open_channel(address, max_message_bytes=1 << 20, metadata=lambda: named) as channel:
        call = rollout_stub(channel).Generate
        samples = [one async for answer in call(asked, timeout=60) for one in answer.rollouts]
    return [token_ids_from_bytes(one.token_ids_u32, "ids").tolist() for one in samples]


def _wanted(*settings: str) -> list[SamplingParams]:
    """As the reward service asks: for training, and for validation."""
    config = load_config(None, list(settings)).actor_rollout_ref.rollout
    both = training_sampling(config, _TOKENS), validation_sampling(config, _TOKENS, 1.0)
    return [replace(one, seed=5) for one in both]


@pytest.mark.parametrize("ignored", [True, False])
async def test_samples_of_the_runs_own_services_continue_past_the_end_token_where_it_is_ignored(
    tmp_path: Path, ignored: bool
) -> None:
    setting = f"{_KEY}={str(ignored).lower()}"
    async with word_replica(tmp_path) as address:
        for sampling in _wanted(setting):
            sampled = await _sampled(address, sampling)
            assert len(sampled) == _SAMPLES
            assert any(EOS in tokens[:-1] for tokens in sampled) == ignored
            assert all(len(tokens) == _TOKENS for tokens in sampled) == ignored
