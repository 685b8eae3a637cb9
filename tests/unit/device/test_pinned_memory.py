"""Host memory that a GPU copies from and to directly; a stand-in takes the place of CUDA."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sluice.errors import ConfigError
from sluice.types import TensorSpec
from sluice.weights.plan import WeightBuffer, plan_transfer
from sluice.weights.snapshot import SnapshotBuffers

_GPU = torch.device("cuda", 1)
_SPECS = (TensorSpec("a", "float32", (33, 3)), TensorSpec("b", "bfloat16", (7,)))
_OUT_OF_MEMORY = 2


class _Cuda:
    """Knows what is pinned, by address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self.current: list[object] = []

        def register(address: int, size: int, _flags: int) -> int:
            if not error:
                self.pinned[address] = size
            return error

        runtime = SimpleNamespace(
            cudaHostRegister=register, cudaHostUnregister=lambda address: self.pinned.pop(address)
        )
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

        def use(device: object) -> nullcontext[None]:
            self.current.append(device)
            return nullcontext()

        monkeypatch.setattr(torch.cuda, "device", use)


def test_weights_beside_a_gpu_pin_their_own_bytes_and_no_more_until_they_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, plan = _Cuda(monkeypatch), plan_transfer(_SPECS, 4096)
    buffer = WeightBuffer(plan, beside=_GPU)
    assert cuda.pinned == {buffer.bucket(plan.buckets[0]).data_ptr(): plan.total_bytes}
    assert cuda.current == [_GPU]
    kept = buffer.tensors["b"]  # as a model that still loads from it has
    del buffer
    assert [*cuda.pinned.values()] == [plan.total_bytes]
    del kept
    assert cuda.pinned == {}


def test_both_snapshots_beside_a_gpu_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(monkeypatch)
    snapshots = SnapshotBuffers(_SPECS, beside=_GPU)
    assert [*cuda.pinned.values()] == [snapshots.plan.total_bytes] * 2


@pytest.mark.parametrize("beside", [None, torch.device("cpu"), torch.device("meta")])
def test_weights_beside_no_gpu_pin_nothing(
    beside: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = _Cuda(monkeypatch)
    WeightBuffer(plan_transfer(_SPECS, 4096), beside=beside)
    assert (cuda.pinned, cuda.current) == ({}, [])


def test_memory_that_cannot_be_pinned_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _Cuda(monkeypatch, _OUT_OF_MEMORY)
    with pytest.raises(ConfigError, match=r"cuda:1: 0.0 GiB .* pinned \(CUDA error 2\).*plan"):
        WeightBuffer(plan_transfer(_SPECS, 4096), beside=_GPU)
