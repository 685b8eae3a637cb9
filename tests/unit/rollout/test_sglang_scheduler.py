"""New weights in SGLang's schedulers: calls, real transfers over Gloo, and loads in turn."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from services.rollout.engines.sglang import scheduler
from services.rollout.engines.sglang.scheduler import SchedulerModel, SchedulerWorker
from services.rollout.engines.sglang.scheduler_calls import SchedulerCalls, serve_calls
from services.rollout.engines.vendor_engines.share_recorder import AsInFiles, ShareLoading
from services.rollout.engines.vendor_engines.worker_group import WorkerGroup
from services.rollout.engines.weight_inbox import WeightInbox
from sluice.device.cpu import CpuDevice
from sluice.errors import ConfigError, EngineError, WeightSyncError
from sluice.types import TensorSpec
from sluice.weight_share import WHOLE, Cut, WeightShare
from sluice.weights.sender import WeightSender
from tests.support.weight_buffers import buffer_of
from tests.support.weight_digest import plain_digest

_WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5)}
_TENSORS = tuple(
    TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in _WEIGHTS.items()
)
_DIGEST = plain_digest(_WEIGHTS)
_RANKS = 2
_TIMEOUT_S = 90.0


class _Model:
    """Notes what it takes; `fails_at` names a tensor that it does not."""

    def __init__(self, fails_at: str) -> None:
        self.taken: dict[str, list[float]] = {}
        self._fails_at = fails_at

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self._fails_at:
                raise RuntimeError("no memory left")
            self.taken[name] = tensor.flatten().tolist()

    def share(self, tensors: Sequence[TensorSpec], as_in_files: AsInFiles) -> WeightShare:
        return WHOLE


class _Worker(SchedulerWorker):
    """Has a scripted loop: it loads when it is called for, as for a request of SGLang's."""

    def __init__(self, rank: int, fails_at: str) -> None:
        super().__init__(rank, SimpleNamespace(device="cpu", gpu_id=rank))
        self.sluice_inbox = WeightInbox(CpuDevice())
        self.model = _Model(fails_at)
        self.sluice_model = self.model
        self.sluice_loading = ShareLoading(_TENSORS, WHOLE, lambda weights: weights)

    def sluice_next_step(self) -> None:
        threading.Thread(target=self.take, args=(lambda: None,), daemon=True).start()

    def sluice_taken(self) -> dict[str, list[float]]:
        return self.model.taken


class _Replica:
    """Two schedulers of a replica, each in a thread, and a trainer."""

    def __init__(self, fails_at: tuple[str, str] = ("", "")) -> None:
        self.calls = SchedulerCalls(_RANKS)
        self.members = [_Worker(rank, name) for rank, name in enumerate(fails_at)]
        self.ends = [one.dup() for one in self.calls.theirs]
        for worker, own in zip(self.members, self.ends, strict=True):
            threading.Thread(target=serve_calls, args=(own, worker.answer), daemon=True).start()
        self.workers = WorkerGroup(self, "SGLang")
        self.sender = WeightSender(device=CpuDevice(), bucket_bytes=4096, timeout_s=_TIMEOUT_S)
        self._never = threading.Event()

    async def call_workers(self, method: str, *arguments: object, timeout_s: float) -> list[object]:
        if method == "sluice_apply":  # SGLang's own request reaches every rank
            await self.calls.call("sluice_next_step", ())
        return await self.calls.call(method, arguments)

    async def stage(self) -> None:
        spec = self.sender.form_group(1, ["replica"], _TENSORS, {"replica": (WHOLE,) * _RANKS})[
            "replica"
        ]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(self.sender.join, self._never))
            tasks.create_task(self.workers.join(spec))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                asyncio.to_thread(self.sender.broadcast, buffer_of(_WEIGHTS), 3, self._never)
            )
            staged = tasks.create_task(self.workers.stage(3))
        assert (staged.result().version, staged.result().digest) == (3, _DIGEST)

    def close(self) -> None:
        self._never.set()
        self.sender.close()
        for one in self.members:
            one.sluice_close()
        self.calls.close()


@pytest.fixture
async def replica(request: pytest.FixtureRequest) -> AsyncIterator[_Replica]:
    running = _Replica(getattr(request, "param", ("", "")))
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await running.calls.open()
            yield running
    finally:
        running.close()


async def test_every_rank_receives_all_weights_and_all_of_them_load(
    replica: _Replica,
) -> None:
    await replica.stage()
    await replica.workers.check_staged(3, _DIGEST)
    await replica.workers.apply(3)
    whole = {name: tensor.flatten().tolist() for name, tensor in _WEIGHTS.items()}
    assert await replica.calls.call("sluice_taken", ()) == [whole] * _RANKS
    with pytest.raises(WeightSyncError, match=r"worker 0 of 2: .*nothing is staged"):
        await replica.workers.check_staged(3, _DIGEST)


@pytest.mark.parametrize("replica", [("", "b")], indirect=True)
async def test_a_rank_that_cannot_load_breaks_the_replica_and_is_named(replica: _Replica) -> None:
    await replica.stage()
    with pytest.raises(EngineError, match=r"half-way \(worker 1 of 2: .*no memory left"):
        await replica.workers.apply(3)


async def test_the_end_of_a_ranks_process_ends_the_calls(replica: _Replica) -> None:
    assert await replica.calls.call("sluice_taken", ()) == [{}] * _RANKS
    replica.ends[1].shutdown(socket.SHUT_RDWR)  # as the system does when a process ends
    with pytest.raises(ExceptionGroup) as caught:
        await replica.calls.call("sluice_taken", ())
    assert "the process of its rank 1 has ended" in repr(caught.value.exceptions)


async def test_the_answer_to_a_cancelled_call_is_not_taken_for_a_later_ones() -> None:
    calls, may_answer = SchedulerCalls(1), threading.Event()
    (their,) = calls.theirs

    def answer(method: str, _: list[object]) -> str:
        assert may_answer.wait(_TIMEOUT_S)
        return method

    serving = threading.Thread(target=serve_calls, args=(their.dup(), answer), daemon=True)
    serving.start()
    await calls.open()
    async with asyncio.timeout(_TIMEOUT_S):
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(calls.call("first", ()))
            await asyncio.sleep(0.01)
            first.cancel()
        may_answer.set()
        assert await calls.call("second", ()) == ["second"]
    calls.close()
    await asyncio.to_thread(serving.join, _TIMEOUT_S)
    assert not serving.is_alive()


def test_a_load_that_nothing_called_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_CALL_TIMEOUT_S", 0.01)
    failure = _Worker(0, "").take(lambda: None)
    assert failure is not None
    assert "no call for new weights came" in failure


def test_a_call_for_new_weights_that_no_loop_took_is_refused_and_taken_by_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "_CALL_TIMEOUT_S", 0.01)
    worker = _Worker(0, "")
    refused: Any = worker.answer("sluice_apply", [3])
    assert refused["kind"] == "WeightSyncError"
    failure = worker.take(lambda: None)
    assert failure is not None
    assert "no call for new weights came" in failure


class _Linear(torch.nn.Module):
    """A layer as SGLang has it: its parameter knows the layer's loader, which cuts the rank's rows.

    `packed` is another layout, which SGLang computes with between two loads.
    """

    def __init__(self, rank: int, *, needs_values: bool) -> None:
        super().__init__()
        self.rank = rank
        self.needs_values = needs_values
        self.packed = True
        self.loads = 0
        self.weight = torch.nn.Parameter(torch.ones(3, 2).t(), requires_grad=False)
        vars(self.weight)["weight_loader"] = self.load

    def load(self, parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        assert not self.packed
        assert not self.needs_values or bool(loaded.sum() > 0)
        self.loads += 1
        parameter.data.copy_(loaded.narrow(0, 3 * self.rank, 3))


class _Loader:
    """The steps of SGLang's loader."""

    @staticmethod
    def restore_weights_before_loading(model: _Linear, _: torch.device) -> None:
        model.packed = False
        model.weight.data = model.weight.data.t()

    @staticmethod
    def load_weights_only(
        model: _Linear, weights: Iterator[tuple[str, torch.Tensor]], _: torch.device
    ) -> None:
        for name, loaded in weights:
            if name == "w":
                vars(model.weight)["weight_loader"](model.weight, loaded)

    load_weights_and_postprocess = load_weights_only


def _share(layer: _Linear, monkeypatch: pytest.MonkeyPatch) -> WeightShare:
    module: Any = ModuleType("sglang.srt.model_loader.loader")
    module.DefaultModelLoader = _Loader
    _stand_in(module, monkeypatch)
    model = SchedulerModel(SimpleNamespace(model=layer, device="cpu", model_config=None))
    return model.share([TensorSpec("w", "float32", (6, 2))], lambda weights: weights)


def test_a_ranks_share_is_what_its_own_loader_reads_and_its_model_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = _Linear(1, needs_values=False)
    assert _share(layer, monkeypatch) == WeightShare((("w", (Cut(0, ((3, 3),)),)),))
    assert (layer.packed, layer.loads, layer.weight.shape) == (True, 0, (2, 3))
    assert bool((layer.weight == 1).all())
    assert not layer.weight.is_meta


def test_a_rank_whose_loader_cannot_be_followed_takes_all_weights_and_logs_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layer = _Linear(1, needs_values=True)
    assert _share(layer, monkeypatch) == WHOLE
    (record,) = caplog.records
    assert "this worker takes all weights: its loader was not understood" in record.getMessage()
    assert (layer.packed, layer.loads) == (True, 0)


def _stand_in(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("sglang", "sglang.srt", "sglang.srt.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def test_an_sglang_without_its_loaders_steps_is_refused_by_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = ModuleType("sglang.srt.model_loader.loader")
    module.DefaultModelLoader = type("Loader", (), {"restore_weights_before_loading": None})
    _stand_in(module, monkeypatch)
    with pytest.raises(ConfigError, match="no load_weights_and_postprocess, model_config; install"):
        SchedulerModel(SimpleNamespace(model=None, device="cpu"))
