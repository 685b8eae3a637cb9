"""The engine contract, kept by the vendor's engine: on the CPU `make test-vllm` and
`make test-sglang`, vLLM on GPUs `make gpu-day1`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engine_vendor.vendor import ROUNDING, VendorInsight, make_engine
from tests.support.engine_contract_suite import RunningContract
from tests.support.engine_contract_weights import LifecycleContract
from tests.support.engine_contract_world import (
    FAMILIES,
    SLOTS,
    ContractWorld,
    contract_world,
    save_contract_checkpoint,
    save_contract_config,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # the vendor's own
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_contract_config(family, tmp_path_factory.mktemp(family))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(folder: Path) -> AsyncIterator[ContractWorld]:
    async with contract_world(folder, partial(make_engine, slots=SLOTS), VendorInsight) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fresh(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ContractWorld]:
    saved = save_contract_checkpoint(family, tmp_path_factory.mktemp("saved"))
    make = partial(make_engine, slots=SLOTS, serves_model_files=True)
    async with contract_world(saved, make, VendorInsight) as running:
        yield running


class TestVendorContract(RunningContract):
    pass


class TestVendorLifecycle(LifecycleContract):
    rounding = ROUNDING
