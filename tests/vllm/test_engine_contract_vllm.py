"""The engine contract, kept by vLLM on the CPU; `make test-vllm`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.rollout.engines.vllm_engine import VllmEngine
from services.rollout.engines.vllm_settings import VllmSettings
from tests.support.engine_contract import DrawingContract
from tests.support.engine_contract_weights import LifecycleContract, UpdateContract
from tests.support.engine_contract_world import (
    FAMILIES,
    MAX_MODEL_LEN,
    SLOTS,
    ContractWorld,
    contract_world,
    save_contract_config,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.timeout(900),
]


def _make(folder: Path) -> VllmEngine:
    return VllmEngine(
        VllmSettings(
            str(folder),
            slots=SLOTS,
            max_model_len=MAX_MODEL_LEN,
            recompute_kv=True,
            arguments={"enable_prefix_caching": True, "max_num_batched_tokens": 2 * MAX_MODEL_LEN},
        )
    )


class _Insight:
    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def prefilled_tokens(self) -> int:
        return self._engine.prefilled_tokens

    async def running_samples(self) -> int:
        return await self._engine.samples_in_workers()


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_contract_config(request.param, tmp_path_factory.mktemp(request.param))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(folder: Path) -> AsyncIterator[ContractWorld]:
    async with contract_world(folder, _make, _Insight) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fresh(folder: Path) -> AsyncIterator[ContractWorld]:
    async with contract_world(folder, _make, _Insight) as running:
        yield running


class TestVllmContract(DrawingContract, UpdateContract):
    pass


class TestVllmLifecycle(LifecycleContract):
    pass
