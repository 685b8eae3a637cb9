"""Devices by name, detection, and errors that say what to do."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sluice.device import cuda, npu, select
from sluice.device.cpu import used_memory_bytes
from sluice.device.npu import NpuDevice
from sluice.device.select import select_device
from sluice.errors import ConfigError


class _FakeNpus:
    """torch_npu.npu of a host with two NPUs."""

    def __init__(self) -> None:
        self.current: int | None = None

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def set_device(self, device: int) -> None:
        self.current = device

    def synchronize(self, device: int) -> None:
        assert device == self.current


@pytest.fixture
def two_npus(monkeypatch: pytest.MonkeyPatch) -> _FakeNpus:
    module, runtime = ModuleType("torch_npu"), _FakeNpus()
    module.npu = runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(select, "has_torch_npu", lambda: True)
    return runtime


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_cpu_is_there_everywhere() -> None:
    device = select_device("cpu")
    device.set_device()
    device.synchronize()
    assert (device.name, device.collective_backend) == ("cpu", "gloo")
    assert device.torch_device == torch.device("cpu")
    assert used_memory_bytes() > 0


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", [None, "auto"])
def test_detection_ends_at_the_cpu(name: str | None) -> None:
    assert select_device(name).name == "cpu"


def test_detection_prefers_an_npu(two_npus: _FakeNpus) -> None:
    assert select_device().name == "npu:0"


def test_an_npu_is_driven_through_torch_npu(two_npus: _FakeNpus) -> None:
    device = select_device("npu:1")
    device.set_device()
    device.synchronize()
    assert two_npus.current == 1
    assert device.collective_backend == "hccl"
    assert device.visible_devices_variable == "ASCEND_RT_VISIBLE_DEVICES"


def test_an_index_beyond_the_visible_devices_is_named(two_npus: _FakeNpus) -> None:
    with pytest.raises(ConfigError, match=r'"npu:2": 2 NPU\(s\) visible'):
        select_device("npu:2")


def test_a_gpu_is_found_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = select_device("cuda:1")
    assert (device.name, device.collective_backend) == ("cuda:1", "nccl")
    assert device.torch_device == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r'highest is "cuda:1".*CUDA_VISIBLE_DEVICES'):
        select_device("cuda:2")


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A40", 150e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
    ],
)
def test_a_gpus_peak_follows_from_the_whole_words_of_its_name(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _index: name)
    assert select_device("cuda").peak_flops() == peak


@pytest.mark.usefixtures("no_gpu")
def test_a_missing_gpu_is_named_with_the_remedy() -> None:
    with pytest.raises(
        ConfigError, match=r'"cuda:0".*CUDA build of torch.*set the device to "cpu"'
    ):
        select_device("cuda")


@pytest.mark.parametrize("failure", [ImportError, OSError, RuntimeError])
def test_a_torch_npu_that_cannot_load_is_one_error_with_the_remedy(
    failure: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> ModuleType:
        raise failure("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(npu, "importlib", SimpleNamespace(import_module=fail))
    with pytest.raises(ConfigError, match=r"libhccl.so.*source CANN's set_env.sh"):
        NpuDevice()


@pytest.mark.usefixtures("no_gpu")
def test_a_broken_torch_npu_is_reported_and_passed_over_by_detection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(select, "has_torch_npu", lambda: True)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert select_device().name == "cpu"
    assert "torch_npu is installed but not used" in caplog.text


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cpu:0x", "CUDA"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=f'"{name}": unknown; use "auto", "cpu"'):
        select_device(name)


def test_threads_beside_the_computing_ones_share_one_stream_of_each_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory that was freed in one stream serves no other."""
    made: list[int] = []
    used: list[object] = []

    def make(index: int) -> SimpleNamespace:
        made.append(index)
        return SimpleNamespace(index=index)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "set_stream", used.append)
    cuda._second_stream.cache_clear()
    try:
        for name in ("cuda:1", "cuda:0", "cuda:1"):
            select_device(name).leave_stream()
    finally:
        cuda._second_stream.cache_clear()
    assert made == [1, 0]
    assert used[0] is used[2]
