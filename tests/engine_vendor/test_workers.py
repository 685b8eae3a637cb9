"""Workers that share the model: each is a rank of the transfer group, and gets its own part."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from functools import partial
from typing import NamedTuple

import pytest
import pytest_asyncio
import torch

from sluice.errors import WeightSyncError
from sluice.weights.share import cuts_by_name, part_shape, unpack
from tests.engine_vendor.vendor import (
    ROUNDING,
    SGLANG,
    VENDOR,
    VendorInsight,
    make_engine,
    worker_processes,
)
from tests.support.causal_lms import request
from tests.support.engine_contract_weights import LifecycleContract, UpdateContract
from tests.support.engine_contract_world import (
    EXPERTS,
    FAMILIES,
    ContractWorld,
    contract_world,
    generate,
    save_contract_checkpoint,
    save_contract_config,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # the vendor's own
    pytest.mark.timeout(900),
]
_HEADS = 2 if VENDOR == SGLANG else 1
"""Of keys and values: with fewer than workers SGLang on the CPU pads them, and cannot read them."""
_ON_ALL = (".gate.weight", *(("k_proj.weight", "v_proj.weight") if _HEADS == 1 else ()))
_FLOAT32 = 4


class Case(NamedTuple):
    """A model and its workers."""

    family: str
    workers: int

    def __str__(self) -> str:
        return f"{self.family}-{self.workers}"


_OF_TWO = [Case(family, 2) for family in (*FAMILIES, EXPERTS)]
_two_workers = pytest.mark.parametrize("case", _OF_TWO, indirect=True, scope="module")


@pytest.fixture(scope="module", params=[*_OF_TWO, Case(EXPERTS, 1)], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    case: Case, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ContractWorld]:
    folder = tmp_path_factory.mktemp(case.family)
    save_contract_config(case.family, folder, key_value_heads=_HEADS)
    make = partial(make_engine, workers=case.workers)
    async with contract_world(folder, make, VendorInsight, ranks=case.workers) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fresh(
    case: Case, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ContractWorld]:
    folder = tmp_path_factory.mktemp("saved")
    save_contract_checkpoint(case.family, folder, key_value_heads=_HEADS)
    make = partial(make_engine, workers=case.workers, serves_model_files=True)
    async with contract_world(folder, make, VendorInsight, ranks=case.workers) as running:
        yield running


class TestWorkersUpdates(UpdateContract):
    pass


class TestWorkersLifecycle(LifecycleContract):
    rounding = ROUNDING


@_two_workers
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


@_two_workers
async def test_each_worker_has_its_own_process_and_the_version_in_it(world: ContractWorld) -> None:
    await world.serve(world.first)
    assert len(set(await worker_processes(world.engine))) == 2
    thread, core = world.engine._in_thread()
    version, digest = world.trainer.version, await world.trainer.stage(world.second)
    await thread.call(core.workers.check_staged(version + 1, digest), "looking")
    with pytest.raises(WeightSyncError, match=r"worker 0 of 2: .*version"):
        await thread.call(core.workers.check_staged(version, digest), "looking")
    assert core.version == version
    async with asyncio.timeout(60):
        assert await generate(world.engine, request(max_tokens=5))


async def test_the_workers_parts_are_the_model_and_only_small_ones_are_on_all(
    world: ContractWorld, case: Case
) -> None:
    shares = [cuts_by_name(share) for share in world.engine.weight_shares]
    assert len(shares) == case.workers
    for spec in world.engine.weight_layout:
        found, elements = torch.zeros(spec.shape), 0
        for cuts in (share.get(spec.name, ()) for share in shares):
            part = torch.ones(part_shape(spec.shape, cuts))
            unpack(part, cuts, found)
            elements += part.numel()
        assert bool(found.all()), spec.name
        is_on_all = found.ndim == 1 or spec.name.endswith(_ON_ALL)
        assert elements == found.numel() * (case.workers if is_on_all else 1), spec.name


async def test_a_worker_receives_its_part_and_no_more(world: ContractWorld) -> None:
    await world.trainer.form()
    await world.trainer.stage(world.first)
    parts = []
    for share in world.engine.weight_shares:
        cuts = cuts_by_name(share)
        shapes = [
            part_shape(one.shape, cuts.get(one.name, ())) for one in world.engine.weight_layout
        ]
        parts.append(_FLOAT32 * sum(math.prod(shape) for shape in shapes))
    # Each tensor begins at a multiple of 64 bytes.
    assert 0 <= world.trainer.received_bytes - max(parts) < 64 * len(world.engine.weight_layout)
