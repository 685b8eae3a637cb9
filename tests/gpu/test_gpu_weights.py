"""Weights from one GPU to engines on others by NCCL: bit-equal, and what is sampled is theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.embedded.loop import EmbeddedEngineSettings
from services.rollout.engines.vllm.client import installed_vllm
from services.rollout.engines.vllm.engine import VllmEngine
from services.rollout.engines.vllm.settings import VllmSettings
from sluice.types import TensorSpec
from sluice.weights.plan import WeightBuffer, plan_transfer
from tests.support.accelerator import is_rehearsal, numbered
from tests.support.engine_contract_weights import UpdateContract
from tests.support.engine_contract_world import (
    MAX_MODEL_LEN,
    SLOTS,
    TIED,
    ContractWorld,
    Insight,
    contract_world,
    save_contract_config,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="class"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.timeout(600),
]


def _embedded(folder: Path) -> EmbeddedEngine:
    settings = EmbeddedEngineSettings(
        str(folder),
        device=numbered(0),
        slots=SLOTS,
        max_model_len=MAX_MODEL_LEN,
        recompute_kv=True,
    )
    return EmbeddedEngine(settings)


def _two_workers(folder: Path) -> VllmEngine:
    """On the first two GPUs."""
    arguments: dict[str, object] = {
        "tensor_parallel_size": 2,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 2 * MAX_MODEL_LEN,
    }
    if not is_rehearsal():
        arguments["gpu_memory_utilization"] = 0.3
    settings = VllmSettings(
        str(folder),
        device="cpu" if is_rehearsal() else None,
        slots=16,
        max_model_len=MAX_MODEL_LEN,
        recompute_kv=True,
        arguments=arguments,
    )
    return VllmEngine(settings)


def _blind(_: object) -> Insight | None:
    return None


@pytest.mark.real_gpu
async def test_a_gpu_copies_from_and_to_weights_in_host_memory_directly() -> None:
    gpu = torch.device("cuda", 0)
    buffer = WeightBuffer(plan_transfer([TensorSpec("a", "float32", (1000, 33))], 4096), beside=gpu)
    (own,) = buffer.tensors.values()
    assert own.is_pinned()
    sent = torch.randn(own.shape, device=gpu)
    own.copy_(sent)
    assert torch.equal(own.to(gpu, non_blocking=True), sent)


@pytest.mark.devices(2)
class TestIntoAnEmbeddedEngine(UpdateContract):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    async def world(self, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ContractWorld]:
        folder = save_contract_config(TIED, tmp_path_factory.mktemp("model"))
        async with contract_world(folder, _embedded, _blind, sender=numbered(1)) as running:
            yield running


@pytest.mark.devices(3)
@pytest.mark.skipif(not installed_vllm(), reason="vLLM is not installed")
class TestIntoTwoWorkersOfVllm(UpdateContract):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    async def world(self, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ContractWorld]:
        folder = save_contract_config(TIED, tmp_path_factory.mktemp("model"))
        async with contract_world(
            folder, _two_workers, _blind, ranks=2, sender=numbered(2)
        ) as running:
            yield running
