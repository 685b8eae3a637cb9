"""A replica of two workers, which share the model; each is a rank of the transfer group.

The models have a head of keys and values for each worker: with fewer, SGLang on the CPU pads the
heads, and its loader cannot read the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.sglang.settings import SglangSettings
from sluice.errors import WeightSyncError
from tests.engine_sglang.files_served import serve_saved
from tests.support.causal_lms import request
from tests.support.engine_contract_weights import LifecycleContract, UpdateContract
from tests.support.engine_contract_world import (
    FAMILIES,
    MAX_MODEL_LEN,
    ContractWorld,
    Insight,
    contract_world,
    generate,
    save_contract_checkpoint,
    save_contract_config,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # SGLang's own
    pytest.mark.timeout(900),
]
_WORKERS = 2


def _make(folder: Path, **more: object) -> SglangEngine:
    arguments = {"tp_size": _WORKERS, "chunked_prefill_size": 2 * MAX_MODEL_LEN}
    return SglangEngine(
        SglangSettings(
            str(folder),
            slots=16,
            max_model_len=MAX_MODEL_LEN,
            recompute_kv=True,
            arguments=arguments | more,
        )
    )


def _make_with_weights(folder: Path) -> SglangEngine:
    return _make(folder, load_format="auto")


def _blind(_: SglangEngine) -> Insight | None:
    return None


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ContractWorld]:
    folder = save_contract_config(family, tmp_path_factory.mktemp(family), key_value_heads=_WORKERS)
    async with contract_world(folder, _make, _blind, ranks=_WORKERS) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fresh(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ContractWorld]:
    saved = save_contract_checkpoint(
        family, tmp_path_factory.mktemp("saved"), key_value_heads=_WORKERS
    )
    async with contract_world(
        saved, _make_with_weights, _blind, serve_saved, ranks=_WORKERS
    ) as running:
        yield running


class TestTwoWorkersUpdates(UpdateContract):
    pass


class TestTwoWorkersLifecycle(LifecycleContract):
    rounding = 5e-6  # the samples of a group do not always enter at the same steps


async def test_a_group_with_a_rank_too_few_is_refused_and_names_the_worker(
    world: ContractWorld,
) -> None:
    trainer = world.trainer
    trainer.epoch += 1
    layout = tuple(world.engine.weight_layout)
    spec = trainer.sender.form_group(trainer.epoch, ["replica"], layout)["replica"]
    with pytest.raises(WeightSyncError, match=r"worker 1 of 2: .*none for its worker 1"):
        await world.engine.join_group(spec)
    await trainer.form()
    await world.serve(world.second)


async def test_each_worker_has_its_own_process_and_the_version_in_it(world: ContractWorld) -> None:
    await world.serve(world.first)
    thread, core = world.engine._in_thread()
    assert len(set(await thread.call(core.workers.processes(), "looking"))) == _WORKERS
    version, digest = world.trainer.version, await world.trainer.stage(world.second)
    await thread.call(core.workers.check_staged(version + 1, digest), "looking")
    with pytest.raises(WeightSyncError, match=r"worker 0 of 2: .*version"):
        await thread.call(core.workers.check_staged(version, digest), "looking")
    assert core.version == version
    async with asyncio.timeout(60):
        assert await generate(world.engine, request(max_tokens=5))
