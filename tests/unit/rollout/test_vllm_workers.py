"""Several workers of one replica as one receiver of weights; real transfers over Gloo."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch

from services.rollout.engines.vendor_engines.share_recorder import ShareLoading
from services.rollout.engines.vendor_engines.weight_worker import WeightWorker
from services.rollout.engines.vendor_engines.worker_group import WorkerGroup
from services.rollout.engines.vllm.worker_extension import WorkerFeatures
from services.rollout.engines.weight_inbox import WeightInbox
from sluice.device.cpu import CpuDevice
from sluice.errors import EngineError, InvalidRequestError, WeightSyncError, leaves
from sluice.types import TensorSpec
from sluice.weight_share import WHOLE
from sluice.weights.sender import WeightSender
from tests.support.retired_threads import wait_for_retired_threads
from tests.support.weight_buffers import buffer_of
from tests.support.weight_digest import plain_digest

_WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5)}
_TENSORS = tuple(
    TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in _WEIGHTS.items()
)
_DIGEST = plain_digest(_WEIGHTS)
_TIMEOUT_S = 60.0


class Workers:
    """vLLM's workers in this process; `faults` answer in place of a worker's method.

    `stages` is set once all have begun to stage a version.
    """

    def __init__(self, num: int) -> None:
        self.faults: dict[tuple[str, int], Callable[[], object]] = {}
        self.stages = asyncio.Event()
        self.loaded: list[list[str]] = [[] for _ in range(num)]
        self.members = [self._worker(rank) for rank in range(num)]

    def _worker(self, rank: int) -> Any:
        worker: Any = WeightWorker()
        worker.rank, worker.device = rank, torch.device("cpu")
        worker.sluice_inbox = WeightInbox(CpuDevice())
        worker.model_runner = SimpleNamespace(
            reload_weights=lambda weights_iterator: self.loaded[rank].extend(
                name for name, _ in weights_iterator
            ),
            get_model=torch.nn.Identity,
            requests={},
        )
        worker.sluice_model = WorkerFeatures(worker)
        worker.sluice_loading = ShareLoading(_TENSORS, WHOLE, lambda weights: weights)
        return worker

    async def call_workers(self, method: str, *arguments: object, timeout_s: float) -> list[object]:
        await asyncio.sleep(0)
        answers = [
            self.faults.get((method, rank), lambda w=worker: getattr(w, method)(*arguments))()  # type: ignore[misc]
            for rank, worker in enumerate(self.members)
        ]
        if method == "sluice_stage":
            self.stages.set()
        return answers


class World:
    """A sender and one replica of two workers."""

    def __init__(self) -> None:
        self.sender = WeightSender(device=CpuDevice(), bucket_bytes=4096, timeout_s=_TIMEOUT_S)
        self.workers = Workers(2)
        self.replica = WorkerGroup(self.workers, "vLLM")
        self.epoch = 0
        self.stop = threading.Event()

    async def join(self) -> str:
        self.epoch += 1
        specs = self.sender.form_group(
            self.epoch, ["replica"], _TENSORS, {"replica": (WHOLE, WHOLE)}
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(self.sender.join, self.stop))
            joined = tasks.create_task(self.replica.join(specs["replica"]))
        assert joined.result() == specs["replica"].plan_digest
        return joined.result()

    async def stage(self, version: int) -> Any:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                asyncio.to_thread(self.sender.broadcast, buffer_of(_WEIGHTS), version, self.stop)
            )
            staged = tasks.create_task(self.replica.stage(version))
        return staged.result()


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    world.stop.set()
    await world.replica.close()
    world.sender.close()
    assert wait_for_retired_threads(30) == 0


def _failure(error: str) -> Callable[[], object]:
    return lambda: {"error": error, "kind": "WeightSyncError"}


async def test_every_worker_receives_all_weights_and_all_of_them_load(world: World) -> None:
    await world.join()
    staged = await world.stage(3)
    assert (staged.version, staged.digest) == (3, _DIGEST)
    with pytest.raises(WeightSyncError, match="digest of what is staged here is"):
        await world.replica.check_staged(3, "another")
    await world.replica.check_staged(3, _DIGEST)
    await world.replica.apply(3)
    assert world.workers.loaded == [["a", "b"], ["a", "b"]]


async def test_a_worker_hands_its_result_over_once_while_a_slower_one_receives(
    world: World,
) -> None:
    await world.join()
    first, second = world.workers.members
    answers: list[object] = []

    def fast() -> object:
        answers.append(first.sluice_outcome())
        return answers[-1]

    def slow() -> object:
        return second.sluice_outcome() if any(answers[:-3]) else None

    world.workers.faults = {("sluice_outcome", 0): fast, ("sluice_outcome", 1): slow}
    assert (await world.stage(3)).digest == _DIGEST
    assert len([one for one in answers if one is not None]) == 1


async def test_a_worker_that_fails_to_receive_has_all_leave_and_is_named(world: World) -> None:
    await world.join()
    world.workers.faults["sluice_outcome", 1] = _failure("its memory is full")
    async with asyncio.timeout(_TIMEOUT_S):  # worker 0 would wait for a sender that sends nothing
        with pytest.raises(WeightSyncError, match=r"worker 1 of 2: its memory is full"):
            await world.replica.stage(3)
    world.workers.faults.clear()
    async with asyncio.timeout(_TIMEOUT_S / 2):
        while (outcome := world.workers.members[0].sluice_outcome()) is None:
            await asyncio.sleep(0.002)
    assert "error" in outcome
    with pytest.raises(WeightSyncError, match=r"worker 0 of 2: .*nothing is staged"):
        await world.replica.check_staged(3, _DIGEST)
    await world.join()
    assert (await world.stage(4)).digest == _DIGEST


async def test_workers_with_other_bytes_than_each_other_have_not_staged(world: World) -> None:
    await world.join()
    parts = {"a": "00" * 16}
    other = {"version": 3, "digest": "x", "received_bytes": 1, "seconds": 0.0, "parts": parts}
    world.workers.faults["sluice_outcome", 1] = lambda: other
    with pytest.raises(ExceptionGroup) as caught:
        await world.stage(3)
    (error,) = leaves(caught.value)
    assert isinstance(error, WeightSyncError)
    assert f"worker 1 of 2: the digest of its a is {parts['a']}, that of an earlier" in str(error)


async def test_a_refusal_of_one_worker_keeps_its_kind(world: World) -> None:
    refusal = {"error": "another model", "kind": "InvalidRequestError"}
    world.workers.faults["sluice_outcome", 1] = lambda: refusal
    spec = world.sender.form_group(1, ["replica"], _TENSORS, {"replica": (WHOLE, WHOLE)})["replica"]
    with pytest.raises(InvalidRequestError, match="worker 1 of 2: another model"):
        await world.replica.join(spec)


async def test_a_version_that_only_some_workers_loaded_breaks_the_engine(world: World) -> None:
    await world.join()
    await world.stage(3)
    world.workers.faults["sluice_apply", 1] = _failure("the epoch was left")
    with pytest.raises(EngineError, match=r"half-way \(worker 1 of 2: the epoch was left\)"):
        await world.replica.apply(3)


async def test_a_version_that_no_worker_has_breaks_nothing(world: World) -> None:
    await world.join()
    await world.stage(3)
    await world.replica.abort("a test")
    with pytest.raises(WeightSyncError, match=r"worker 0 of 2: .*nothing is staged"):
        await world.replica.apply(3)
    assert world.workers.loaded == [[], []]


async def test_a_cancelled_stage_leaves_the_group_in_every_worker(world: World) -> None:
    await world.join()
    async with asyncio.TaskGroup() as tasks:
        staging = tasks.create_task(world.replica.stage(3))
        await world.workers.stages.wait()
        staging.cancel()
    assert staging.cancelled()
    async with asyncio.timeout(_TIMEOUT_S):
        for worker in world.workers.members:
            while worker.sluice_outcome() is None:
                await asyncio.sleep(0.002)
            assert "error" in worker.sluice_outcome()


async def test_a_join_ends_a_stage_of_the_epoch_before_and_has_a_result_of_its_own(
    world: World,
) -> None:
    await world.join()

    async def stage() -> None:
        # That another call began, or what a worker saw of it first.
        with pytest.raises(WeightSyncError, match=r"(staging|receiving) version 3"):
            await world.replica.stage(3)

    async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(stage())
        await world.workers.stages.wait()
        await world.join()
    assert (await world.stage(4)).digest == _DIGEST


async def test_a_stage_that_is_cancelled_late_leaves_the_next_epoch_alone(world: World) -> None:
    await world.join()
    async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        staging = tasks.create_task(world.replica.stage(3))
        await world.workers.stages.wait()
        joining = tasks.create_task(world.join())
        while world.workers.members[1].sluice_inbox.epoch != 2:
            await asyncio.sleep(0)
        staging.cancel()
        await joining
    assert (await world.stage(4)).digest == _DIGEST


async def test_a_poll_that_the_next_epoch_overtakes_leaves_that_epoch_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.join()
    call, polled, gate = world.workers.call_workers, asyncio.Event(), asyncio.Event()
    staged = {"version": 3, "digest": "x", "received_bytes": 1, "seconds": 0.0}

    async def call_late(method: str, *arguments: object, timeout_s: float) -> list[object]:
        if method != "sluice_outcome" or polled.is_set():
            return await call(method, *arguments, timeout_s=timeout_s)
        polled.set()
        await gate.wait()
        return [{**staged, "parts": {"a": digest}} for digest in ("one", "other")]

    async def stage() -> None:
        with pytest.raises(WeightSyncError, match=r"staging version 3: .*another call"):
            await world.replica.stage(3)

    monkeypatch.setattr(world.workers, "call_workers", call_late)
    async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(stage())
        await polled.wait()
        await world.join()
        gate.set()
    assert (await world.stage(4)).digest == _DIGEST


async def test_a_cancelled_stage_is_cancelled_though_a_worker_does_not_answer(
    world: World,
) -> None:
    def fail() -> object:
        raise EngineError("no answer")

    await world.join()
    world.workers.faults["sluice_abort", 1] = fail
    async with asyncio.TaskGroup() as tasks:
        staging = tasks.create_task(world.replica.stage(3))
        await world.workers.stages.wait()
        staging.cancel()
    assert staging.cancelled()
    world.workers.faults.clear()
    await world.replica.abort("a test")


async def test_a_join_that_is_cancelled_before_its_first_answer_leaves_the_group(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = world.workers.call_workers

    async def call_slowly(method: str, *arguments: object, timeout_s: float) -> list[object]:
        answers = await call(method, *arguments, timeout_s=timeout_s)
        await asyncio.sleep(0.01)
        return answers

    monkeypatch.setattr(world.workers, "call_workers", call_slowly)
    spec = world.sender.form_group(1, ["replica"], _TENSORS, {"replica": (WHOLE, WHOLE)})["replica"]
    async with asyncio.TaskGroup() as tasks:
        joining = tasks.create_task(world.replica.join(spec))
        while world.workers.members[1].sluice_inbox.epoch is None:
            await asyncio.sleep(0)
        joining.cancel()
    assert [one.sluice_inbox.epoch for one in world.workers.members] == [None, None]


async def test_a_replica_of_one_worker_names_none(world: World) -> None:
    one = Workers(1)
    one.faults["sluice_check_staged", 0] = _failure("nothing")
    with pytest.raises(WeightSyncError, match=r"version 3: nothing$"):
        await WorkerGroup(one, "vLLM").check_staged(3, _DIGEST)
