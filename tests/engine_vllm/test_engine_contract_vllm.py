"""The engine contract, kept by vLLM: on the CPU `make test-vllm`, on GPUs `make gpu-day1`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.rollout.engines.vllm.engine import VllmEngine
from services.rollout.engines.vllm.settings import VllmSettings
from tests.engine_vllm.saved_weights import serve_saved
from tests.engine_vllm.shared_gpu import BACKEND, MEMORY
from tests.support.engine_contract_suite import RunningContract
from tests.support.engine_contract_weights import LifecycleContract
from tests.support.engine_contract_world import (
    FAMILIES,
    MAX_MODEL_LEN,
    SLOTS,
    ContractWorld,
    contract_world,
    save_contract_checkpoint,
    save_contract_config,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.timeout(900),
]


def _make(folder: Path, **more: object) -> VllmEngine:
    arguments = {"enable_prefix_caching": True, "max_num_batched_tokens": 2 * MAX_MODEL_LEN}
    return VllmEngine(
        VllmSettings(
            str(folder),
            slots=SLOTS,
            max_model_len=MAX_MODEL_LEN,
            recompute_kv=True,
            weights_backend=BACKEND,
            arguments=MEMORY | arguments | more,
        )
    )


def _make_with_weights(folder: Path) -> VllmEngine:
    return _make(folder, load_format="auto")


class _Insight:
    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def prefilled_tokens(self) -> int:
        return self._engine.prefilled_tokens

    async def running_samples(self) -> int:
        return await self._engine.samples_in_workers()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_contract_config(family, tmp_path_factory.mktemp(family))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(folder: Path) -> AsyncIterator[ContractWorld]:
    async with contract_world(folder, _make, _Insight) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fresh(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ContractWorld]:
    saved = save_contract_checkpoint(family, tmp_path_factory.mktemp("saved"))
    async with contract_world(saved, _make_with_weights, _Insight, serve_saved) as running:
        yield running


class TestVllmContract(RunningContract):
    pass


class TestVllmLifecycle(LifecycleContract):
    pass
