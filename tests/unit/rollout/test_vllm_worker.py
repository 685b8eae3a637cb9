"""New weights inside one of vLLM's workers: staged, checked and applied."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace, TracebackType
from typing import Any

import msgspec
import pytest
import torch

from services.rollout.engines.vendor_engines.share_recorder import ShareLoading
from services.rollout.engines.vendor_engines.weight_worker import (
    Outcome,
    WeightWorker,
    rank_in_group,
)
from services.rollout.engines.vllm.worker_extension import VllmWorker, WorkerFeatures
from services.rollout.engines.weight_inbox import WeightInbox
from sluice.device.cpu import CpuDevice
from sluice.errors import InvalidRequestError, WeightSyncError
from sluice.types import TensorSpec
from sluice.weight_share import WHOLE
from sluice.weights import group
from sluice.weights.backend import Membership, ProcessGroup, create_process_group
from sluice.weights.sender import WeightSender
from tests.support.retired_threads import wait_for_retired_threads
from tests.support.weight_buffers import buffer_of
from tests.support.weight_digest import plain_digest

_WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5)}
_TENSORS = tuple(
    TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in _WEIGHTS.items()
)


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    sender = WeightSender(device=CpuDevice(), bucket_bytes=4096, timeout_s=60.0)
    yield sender
    sender.close()
    assert wait_for_retired_threads(60) == 0


@pytest.fixture
def worker() -> Iterator[WeightWorker]:
    worker = WeightWorker()
    worker.rank, worker.device = 0, torch.device("cpu")
    worker.sluice_inbox = WeightInbox(CpuDevice())
    yield worker
    worker.sluice_close()


async def _outcome(worker: WeightWorker) -> Outcome:
    async with asyncio.timeout(60):
        while (found := worker.sluice_outcome()) is None:
            await asyncio.sleep(0.002)
        return found


async def _form(sender: WeightSender, worker: WeightWorker, epoch: int) -> None:
    spec = sender.form_group(epoch, ["replica"], _TENSORS)["replica"]
    assert worker.sluice_join(msgspec.msgpack.encode(spec)) == {}
    await asyncio.to_thread(sender.join, threading.Event())
    assert await _outcome(worker) == {"plan_digest": spec.plan_digest}


async def _send(sender: WeightSender, worker: WeightWorker, version: int) -> Outcome:
    assert worker.sluice_stage(version) == {}
    await asyncio.to_thread(sender.broadcast, buffer_of(_WEIGHTS), version, threading.Event())
    return await _outcome(worker)


async def test_a_version_is_staged_in_the_background_and_proven(
    sender: WeightSender, worker: WeightWorker
) -> None:
    await _form(sender, worker, 1)
    outcome = await _send(sender, worker, 3)
    digest = plain_digest(_WEIGHTS)
    assert (outcome["version"], outcome["digest"]) == (3, digest)
    assert worker.sluice_check_staged(3) == {}
    assert worker.sluice_check_staged(4)["kind"] == "WeightSyncError"
    inbox = worker.sluice_inbox
    assert inbox is not None
    staged = inbox.staged_weights(1, 3, digest)
    assert torch.equal(staged["a"], _WEIGHTS["a"])
    inbox.release(staged)
    assert "nothing is staged" in str(worker.sluice_check_staged(3)["error"])


async def test_a_worker_forms_groups_with_nccls_own_settings(
    sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its own groups vLLM may have others, which the trainer does not have."""
    seen: list[str] = []

    @contextmanager
    def unpinned() -> Iterator[None]:
        seen.append("unpinned")
        yield
        seen.append("pinned")

    def create(backend: str, membership: Membership) -> ProcessGroup:
        seen.append("formed")
        return create_process_group(backend, membership)

    monkeypatch.setitem(sys.modules, "vllm.utils.nccl", SimpleNamespace(unpinned_nccl_env=unpinned))
    worker = VllmWorker()
    worker.rank, worker.device = 0, torch.device("cpu")
    worker.sluice_inbox = WeightInbox(CpuDevice(), forming=worker.sluice_forming)
    try:
        monkeypatch.setattr(group, "create_process_group", create)
        await _form(sender, worker, 1)
    finally:
        worker.sluice_close()
    # The sender's is made in this process too, once the worker has come.
    assert seen == ["unpinned", "formed", "formed", "pinned"]


async def test_an_abort_ends_what_waits_and_a_later_epoch_works(
    sender: WeightSender, worker: WeightWorker
) -> None:
    await _form(sender, worker, 1)
    worker.sluice_stage(3)
    assert worker.sluice_outcome() is None
    worker.sluice_abort("a test")
    assert "error" in await _outcome(worker)
    await _form(sender, worker, 2)
    assert (await _send(sender, worker, 3))["version"] == 3


async def test_a_group_that_a_worker_refuses_is_named_in_the_outcome(
    sender: WeightSender, worker: WeightWorker
) -> None:
    spec = sender.form_group(1, ["replica"], _TENSORS)["replica"]
    worker.sluice_join(msgspec.msgpack.encode(replace(spec, backend="nccl")))
    outcome: dict[str, Any] = await _outcome(worker)
    assert outcome["kind"] == "InvalidRequestError"
    assert 'backend "nccl"' in outcome["error"]


def test_the_workers_of_a_replica_take_consecutive_ranks(sender: WeightSender) -> None:
    specs = sender.form_group(1, ["one", "four", "other"], _TENSORS, {"four": (WHOLE,) * 4})
    assert {spec.world_size for spec in specs.values()} == {7}
    assert [(spec.rank, spec.ranks) for spec in specs.values()] == [(1, 1), (2, 4), (6, 1)]
    workers = [rank_in_group(specs["four"], worker) for worker in range(4)]
    assert [(spec.rank, spec.ranks) for spec in workers] == [(2, 1), (3, 1), (4, 1), (5, 1)]
    with pytest.raises(WeightSyncError, match="none for its worker 4"):
        rank_in_group(specs["four"], 4)


async def test_a_receiver_of_one_rank_refuses_several(sender: WeightSender) -> None:
    inbox = WeightInbox(CpuDevice())
    joined: Future[str] = inbox.join(
        sender.form_group(1, ["replica"], _TENSORS, {"replica": (WHOLE, WHOLE)})["replica"]
    )
    with pytest.raises(InvalidRequestError, match="ranks = 2"):
        await asyncio.wrap_future(joined)
    inbox.close()


TENSORS = {"a": _WEIGHTS["a"]}


class FakeNpu:
    """``torch.device("npu")``, which torch does not know without its package."""

    type = "npu"

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def __enter__(self) -> None:
        self._seen.append("npu begins")

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._seen.append("npu ends")


class Recording:
    """Stands for vLLM's model runner and for the inbox."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen
        self.requests: dict[str, object] = {}
        self.fails = False
        self.epoch = 1

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._seen.append(f"loads {[name for name, _ in weights_iterator]}")
        if self.fails:
            raise RuntimeError("half-way")

    def get_model(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def staged_weights(self, epoch: int, version: int) -> Any:
        return TENSORS

    def release(self, staged: Any) -> None:
        self._seen.append("releases")


def worker_on(device: Any, recording: Recording) -> WeightWorker:
    worker: Any = WeightWorker()
    worker.device, worker.model_runner, worker.sluice_inbox = device, recording, recording
    worker.sluice_model = WorkerFeatures(worker)
    worker.sluice_loading = ShareLoading(_TENSORS[:1], WHOLE, lambda weights: weights)
    return worker  # type: ignore[no-any-return]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    module = SimpleNamespace(synchronize=lambda: events.append("waits"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return events


def test_an_npu_loads_on_itself_and_has_its_copy_before_staging_is_used_again(
    seen: list[str],
) -> None:
    answer = worker_on(FakeNpu(seen), Recording(seen)).sluice_apply(3)
    assert set(answer) == {"seconds"}
    assert seen == ["npu begins", "loads ['a']", "npu ends", "waits", "releases"]


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_elsewhere_vllm_chooses_the_place_itself(
    device: torch.device | None, seen: list[str]
) -> None:
    worker_on(device, Recording(seen)).sluice_apply(3)
    assert seen == ["loads ['a']", "releases"]


def test_what_an_npu_finds_wrong_only_later_still_breaks_the_engine(
    seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a kernel failed")

    module = SimpleNamespace(synchronize=fail)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    answer = worker_on(FakeNpu(seen), Recording(seen)).sluice_apply(3)
    assert answer["broken"]
    assert "a kernel failed" in str(answer["error"])
    assert "releases" not in seen


def test_a_reload_that_fails_half_way_releases_nothing(seen: list[str]) -> None:
    recording = Recording(seen)
    recording.fails = True
    assert worker_on(FakeNpu(seen), recording).sluice_apply(3)["broken"]
    assert seen == ["npu begins", "loads ['a']", "npu ends"]
