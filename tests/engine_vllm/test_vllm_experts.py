"""A mixture of experts, whose weights transformers holds fused and vLLM knows one by one.

By one worker, and by two that hold a part of every expert each.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import AutoConfig

from services.rollout.engines.vllm.engine import VllmEngine
from services.rollout.engines.vllm.settings import VllmSettings
from sluice.weights.share import cuts_by_name, part_shape
from tests.engine_vllm.saved_weights import serve_saved
from tests.engine_vllm.shared_gpu import BACKEND, MEMORY
from tests.support.causal_lms import EOS, VOCABULARY, reference_model, request
from tests.support.engine_contract_weights import UpdateContract
from tests.support.engine_contract_world import (
    MAX_MODEL_LEN,
    PROMPTS,
    ContractWorld,
    Insight,
    contract_world,
    generate,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.timeout(900),
]


def _save_config(folder: Path) -> Path:
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        bos_token_id=0,
        pad_token_id=0,
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(folder)
    return folder


def _make(folder: Path, workers: int, **more: object) -> VllmEngine:
    arguments: dict[str, object] = {
        "tensor_parallel_size": workers,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 2 * MAX_MODEL_LEN,
    }
    return VllmEngine(
        VllmSettings(
            str(folder),
            slots=16,
            max_model_len=MAX_MODEL_LEN,
            recompute_kv=True,
            weights_backend=BACKEND,
            arguments=MEMORY | arguments | more,
        )
    )


def _blind(_: VllmEngine) -> Insight | None:
    return None


@pytest.fixture(scope="module", params=[1, 2])
def workers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    workers: int, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ContractWorld]:
    folder = _save_config(tmp_path_factory.mktemp("experts"))
    async with contract_world(
        folder, lambda at: _make(at, workers), _blind, ranks=workers
    ) as running:
        yield running


class TestExperts(UpdateContract):
    pass


async def test_after_updates_outputs_equal_those_of_an_engine_started_from_a_checkpoint(
    world: ContractWorld, workers: int, tmp_path: Path
) -> None:
    wanted = [request(prompt, samples=3, max_tokens=30) for prompt in PROMPTS]
    for model in (world.second, world.first, world.second):
        await world.serve(model)
        after = [await generate(world.engine, one) for one in wanted]
    reference_model(_save_config(tmp_path), seed=2).save_pretrained(tmp_path)
    async with contract_world(
        tmp_path,
        lambda at: _make(at, workers, load_format="auto"),
        _blind,
        serve_saved,
        ranks=workers,
    ) as fresh:
        await fresh.serve_checkpoint()
        assert [await generate(fresh.engine, one) for one in wanted] == after


async def test_each_of_two_workers_takes_half_of_every_expert(
    world: ContractWorld, workers: int
) -> None:
    for share in world.engine.weight_shares:
        cuts = cuts_by_name(share)
        for spec in world.engine.weight_layout:
            if ".experts." in spec.name:
                part = math.prod(part_shape(spec.shape, cuts.get(spec.name, ())))
                assert part * workers == math.prod(spec.shape), spec.name
