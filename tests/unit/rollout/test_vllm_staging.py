"""New weights inside a worker, and which ranks its workers take."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from services.rollout.engines.vllm.worker import Outcome, WorkerStaging, rank_in_group
from sluice.concurrency.threads import wait_for_retired_threads
from sluice.device.cpu import CpuDevice
from sluice.errors import WeightSyncError
from sluice.types import TensorSpec, TransferGroupSpec
from sluice.weights.sender import WeightSender
from tests.support.weight_digest import plain_digest

_WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5)}
_TENSORS = tuple(
    TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in _WEIGHTS.items()
)


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    sender = WeightSender(device=CpuDevice(), bucket_bytes=4096, timeout_s=5.0)
    yield sender
    sender.close()
    assert wait_for_retired_threads(10) == 0


@pytest.fixture
def staging() -> Iterator[WorkerStaging]:
    staging = WorkerStaging(CpuDevice(), {spec.name: spec.shape for spec in _TENSORS})
    yield staging
    staging.close()


async def _outcome(staging: WorkerStaging) -> Outcome:
    async with asyncio.timeout(20):
        while (found := staging.outcome()) is None:
            await asyncio.sleep(0.002)
        return found


async def _form(sender: WeightSender, staging: WorkerStaging, epoch: int) -> TransferGroupSpec:
    spec = sender.form_group(epoch, ["replica"], _TENSORS)["replica"]
    staging.join(spec)
    await asyncio.to_thread(sender.join, threading.Event())
    assert await _outcome(staging) == {"plan_digest": spec.plan_digest}
    return spec


async def _send(sender: WeightSender, staging: WorkerStaging, version: int) -> Outcome:
    staging.stage(version)
    await asyncio.to_thread(sender.broadcast, _WEIGHTS, version, threading.Event())
    return await _outcome(staging)


async def test_a_version_is_staged_in_the_background_and_proven(
    sender: WeightSender, staging: WorkerStaging
) -> None:
    await _form(sender, staging, 1)
    outcome = await _send(sender, staging, 3)
    digest = plain_digest(_WEIGHTS)
    assert (outcome["version"], outcome["digest"]) == (3, digest)
    staged = staging.staged(3, digest)
    assert torch.equal(staged.tensors["a"], _WEIGHTS["a"])
    for version, wrong in ((4, digest), (3, "another")):
        with pytest.raises(WeightSyncError):
            staging.staged(version, wrong)
    staging.release(staged)
    with pytest.raises(WeightSyncError, match="nothing is staged"):
        staging.staged(3, digest)


async def test_an_abort_ends_what_waits_and_a_later_epoch_works(
    sender: WeightSender, staging: WorkerStaging
) -> None:
    await _form(sender, staging, 1)
    staging.stage(3)
    assert staging.outcome() is None
    staging.abort("a test")
    assert "error" in await _outcome(staging)
    await _form(sender, staging, 2)
    assert (await _send(sender, staging, 3))["version"] == 3


async def test_a_group_for_another_model_is_refused_in_the_outcome(
    sender: WeightSender, staging: WorkerStaging
) -> None:
    spec = sender.form_group(1, ["replica"], _TENSORS[:1])["replica"]
    staging.join(spec)
    outcome: dict[str, Any] = await _outcome(staging)
    assert outcome["kind"] == "InvalidRequestError"
    assert "the first is b" in outcome["error"]


def test_the_workers_of_a_replica_take_consecutive_ranks(sender: WeightSender) -> None:
    specs = sender.form_group(1, ["one", "four", "other"], _TENSORS, {"four": 4})
    assert {spec.world_size for spec in specs.values()} == {7}
    assert [(spec.rank, spec.ranks) for spec in specs.values()] == [(1, 1), (2, 4), (6, 1)]
    workers = [rank_in_group(specs["four"], worker) for worker in range(4)]
    assert [(spec.rank, spec.ranks) for spec in workers] == [(2, 1), (3, 1), (4, 1), (5, 1)]
    with pytest.raises(WeightSyncError, match="none for its worker 4"):
        rank_in_group(specs["four"], 4)


async def test_a_receiver_of_one_rank_refuses_several(
    sender: WeightSender, staging: WorkerStaging
) -> None:
    staging.join(sender.form_group(1, ["replica"], _TENSORS, {"replica": 2})["replica"])
    outcome = await _outcome(staging)
    assert outcome["kind"] == "InvalidRequestError"
    assert "ranks = 2" in str(outcome["error"])
