"""The engine contract, kept by the embedded engine on a GPU; weights come from the CPU by Gloo."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.embedded.loop import EmbeddedEngineSettings
from tests.support.accelerator import accelerator
from tests.support.engine_contract_suite import RunningContract
from tests.support.engine_contract_world import (
    MAX_MODEL_LEN,
    SLOTS,
    TIED,
    ContractWorld,
    contract_world,
    save_contract_config,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


def _make(folder: Path) -> EmbeddedEngine:
    return EmbeddedEngine(
        EmbeddedEngineSettings(
            str(folder),
            device=accelerator(),
            slots=SLOTS,
            max_model_len=MAX_MODEL_LEN,
            recompute_kv=True,
            weights_backend="gloo",
        )
    )


class _Insight:
    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def running_samples(self) -> int:
        await self._engine.check_alive()
        return self._engine._in_thread()[1].loop.slots_busy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ContractWorld]:
    folder = save_contract_config(TIED, tmp_path_factory.mktemp("model"))
    async with contract_world(folder, _make, _Insight) as running:
        yield running


class TestGpuContract(RunningContract):
    pass
