"""The engine contract, kept by the embedded engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.embedded.loop import EmbeddedEngineSettings
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

pytestmark = pytest.mark.asyncio(loop_scope="module")


def _make(folder: Path, *, serves_model_files: bool = False) -> EmbeddedEngine:
    return EmbeddedEngine(
        EmbeddedEngineSettings(
            str(folder),
            slots=SLOTS,
            max_model_len=MAX_MODEL_LEN,
            recompute_kv=True,
            serves_model_files=serves_model_files,
        )
    )


class _Insight:
    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def running_samples(self) -> int:
        await self._engine.check_alive()
        return self._engine._in_thread()[1].loop.slots_busy


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
    async with contract_world(saved, partial(_make, serves_model_files=True), _Insight) as running:
        yield running


class TestTorchContract(RunningContract):
    pass


class TestTorchLifecycle(LifecycleContract):
    pass
