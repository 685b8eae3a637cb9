"""A replica of two workers, which share the model; each is a rank of the transfer group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from services.rollout.engines.vllm.engine import VllmEngine
from services.rollout.engines.vllm.settings import VllmSettings
from sluice.errors import WeightSyncError
from sluice.weights.share import cuts_by_name, part_shape, unpack
from tests.engine_vllm.saved_weights import serve_saved
from tests.engine_vllm.shared_gpu import BACKEND, MEMORY
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
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.timeout(900),
]
_WORKERS = 2
_ON_BOTH = ("k_proj.weight", "v_proj.weight")  # one head of keys and values


def _make(folder: Path, **more: object) -> VllmEngine:
    arguments = {
        "tensor_parallel_size": _WORKERS,
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


def _make_with_weights(folder: Path) -> VllmEngine:
    return _make(folder, load_format="auto")


def _blind(_: VllmEngine) -> Insight | None:
    return None


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ContractWorld]:
    folder = save_contract_config(family, tmp_path_factory.mktemp(family))
    async with contract_world(folder, _make, _blind, ranks=_WORKERS) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fresh(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ContractWorld]:
    saved = save_contract_checkpoint(family, tmp_path_factory.mktemp("saved"))
    async with contract_world(
        saved, _make_with_weights, _blind, serve_saved, ranks=_WORKERS
    ) as running:
        yield running


class TestTwoWorkersUpdates(UpdateContract):
    pass


class TestTwoWorkersLifecycle(LifecycleContract):
    pass


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
    assert len(set(await world.engine.processes())) == _WORKERS
    thread, core = world.engine._in_thread()
    version, digest = world.trainer.version, await world.trainer.stage(world.second)
    await thread.call(core.workers.check_staged(version + 1, digest), "looking")
    with pytest.raises(WeightSyncError, match=r"worker 0 of 2: .*version"):
        await thread.call(core.workers.check_staged(version, digest), "looking")
    assert core.version == version
    async with asyncio.timeout(60):
        assert await generate(world.engine, request(max_tokens=5))


async def test_the_workers_parts_are_the_model_and_only_small_ones_are_on_both(
    world: ContractWorld,
) -> None:
    shares = [cuts_by_name(share) for share in world.engine.weight_shares]
    assert len(shares) == _WORKERS
    for spec in world.engine.weight_layout:
        found, elements = torch.zeros(spec.shape), 0
        for cuts in (share.get(spec.name, ()) for share in shares):
            part = torch.ones(part_shape(spec.shape, cuts))
            unpack(part, cuts, found)
            elements += part.numel()
        assert bool(found.all()), spec.name
        is_on_both = found.ndim == 1 or spec.name.endswith(_ON_BOTH)
        assert elements == found.numel() * (_WORKERS if is_on_both else 1), spec.name
