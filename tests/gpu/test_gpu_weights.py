"""Weights from one GPU to engines on others by NCCL: bit-equal, and what is sampled is theirs."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.embedded.loop import EmbeddedEngineSettings
from services.rollout.engines.vllm.client import installed_vllm
from services.rollout.engines.vllm.engine import VllmEngine
from services.rollout.engines.vllm.settings import VllmSettings
from sluice.device.select import select_device
from sluice.errors import WeightSyncError
from sluice.types import TensorSpec
from sluice.weights.plan import WeightBuffer, plan_transfer, tensor_specs
from sluice.weights.sender import WeightSender
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
from tests.support.weight_buffers import buffer_of
from tests.support.weight_fleet import PeerProcess, peer_processes

_NEVER = threading.Event()
_MIB = 1 << 20

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


async def _form(
    sender: WeightSender, epoch: int, peer: PeerProcess, weights: dict[str, torch.Tensor]
) -> None:
    spec = sender.form_group(epoch, [peer.name], tensor_specs(weights.items()))[peer.name]
    peer.join(spec)
    await asyncio.to_thread(sender.join, _NEVER)
    assert peer.answer()["ok"]


@pytest.mark.devices(2)
async def test_a_replica_that_is_killed_in_a_transfer_ends_the_epoch_and_not_the_trainer() -> None:
    weights = {"w": torch.arange(64 * _MIB, dtype=torch.float32)}
    sender = WeightSender(device=select_device(numbered(0)), bucket_bytes=4 * _MIB, timeout_s=20.0)
    with closing(sender):
        with peer_processes(["first"], forked=False, device=numbered(1)) as (first,):
            await _form(sender, 1, first, weights)
            first.stage(1, signal=int(signal.SIGKILL), bucket=3)
            with pytest.raises(WeightSyncError, match="first failed in phase broadcasting"):
                await asyncio.to_thread(sender.broadcast, buffer_of(weights), 1, _NEVER)
        with peer_processes(["second"], forked=False, device=numbered(1)) as (second,):
            await _form(sender, 2, second, weights)
            second.stage(1)
            sent = await asyncio.to_thread(sender.broadcast, buffer_of(weights), 1, _NEVER)
            assert second.answer()["digest"] == sent.bases[0].digest
