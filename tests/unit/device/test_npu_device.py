"""What an NPU's device does, against a stand-in for torch_npu."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from sluice.device import select
from sluice.device.cpu import CpuDevice
from sluice.device.npu import NpuDevice, hccl_options
from sluice.device.protocol import BACKENDS, PeakMemory, local_index, rank_backends
from sluice.device.select import select_device, transfer_device
from sluice.errors import ConfigError
from tests.support.stand_in_hccl import FakeNpus, fake_torch_npu


@pytest.fixture
def npus(monkeypatch: pytest.MonkeyPatch) -> FakeNpus:
    runtime = FakeNpus(2)
    monkeypatch.setitem(sys.modules, "torch_npu", fake_torch_npu(runtime))
    monkeypatch.setattr(select, "has_torch_npu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return runtime


def test_memory_goes_back_on_the_devices_own_index(npus: FakeNpus) -> None:
    NpuDevice(1).empty_cache()
    assert npus.emptied == [1]


def test_threads_that_want_a_stream_of_their_own_share_one_that_no_group_of_collectives_gets(
    npus: FakeNpus,
) -> None:
    """Torch gives groups streams of priority 0, which it hands out again after 32."""
    device = NpuDevice(1)
    device.use_own_stream()
    device.use_own_stream()
    assert npus.streams == [(1, "stream of 1, priority -1")] * 2


@pytest.mark.usefixtures("npus")
def test_peaks_are_those_of_the_devices_own_index_since_the_last_time() -> None:
    device = NpuDevice(1)
    assert device.take_peak_memory() == PeakMemory(21, 42)
    assert device.take_peak_memory() == PeakMemory(1, 2)
    assert NpuDevice(0).take_peak_memory() == PeakMemory(20, 40)
    assert CpuDevice().take_peak_memory() is None  # type: ignore[func-returns-value]


def test_bfloat16_is_what_torch_npu_says(npus: FakeNpus) -> None:
    assert NpuDevice().supports_bfloat16()
    npus.bfloat16 = False
    assert not NpuDevice().supports_bfloat16()


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("Ascend910B2", 376e12),
        ("Ascend910B2C", 354e12),
        ("Ascend910B4-1", 280e12),
        ("Ascend910_9382", 376e12),
        ("Ascend910B1", None),
        ("Ascend310P3", None),
    ],
)
def test_the_peak_follows_from_the_name_where_it_is_known(
    npus: FakeNpus, name: str, peak: float | None
) -> None:
    npus.device_name = name
    assert NpuDevice().peak_flops() == peak


def test_a_cpu_has_the_whole_protocol() -> None:
    cpu = CpuDevice()
    cpu.empty_cache()
    assert cpu.supports_bfloat16()


@pytest.mark.parametrize("name", ["npu", None])
def test_a_rank_of_torchrun_takes_its_own_npu_of_those_it_sees(
    name: str | None, npus: FakeNpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert select_device(name).name == "npu:1"
    assert select_device("npu:0").name == "npu:0"


def test_a_rank_that_sees_one_device_takes_it() -> None:
    assert [local_index(count, {"LOCAL_RANK": "3"}) for count in (1, 3, 4)] == [0, 0, 3]
    assert local_index(8, {}) == local_index(8, {"LOCAL_RANK": "x"}) == 0


def test_detection_passes_over_an_npu_that_is_hidden(
    npus: FakeNpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    npus.count = 0
    assert select_device().name == "cpu"
    assert "ASCEND_RT_VISIBLE_DEVICES is ''" in caplog.text


def test_an_npu_that_is_asked_for_and_hidden_names_the_variable_and_its_value(
    npus: FakeNpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    npus.count = 0
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "9")
    with pytest.raises(ConfigError, match=r"0 NPU\(s\) visible \(ASCEND_RT_VISIBLE_DEVICES is '9'"):
        select_device("npu")


def test_a_torch_npu_that_cannot_load_names_package_script_and_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ConfigError, match=r"torch_npu cannot.*torch-npu wheel.*set_env\.sh.*cpu"):
        select_device("npu")


def test_weights_travel_by_the_devices_collectives_or_by_gloo_from_the_cpu(npus: FakeNpus) -> None:
    assert transfer_device("npu", None).collective_backend == "hccl"
    assert transfer_device("npu", "hccl").name == "npu:0"
    assert transfer_device("npu", "gloo").name == "cpu"
    with pytest.raises(ConfigError, match="npu:0 uses hccl"):
        transfer_device("npu", "nccl")


def test_ranks_on_an_npu_have_gloo_for_commands_and_hccl_for_gradients() -> None:
    assert BACKENDS == {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
    assert [rank_backends(kind) for kind in ("cpu", "cuda", "npu")] == [
        "gloo",
        "cpu:gloo,cuda:nccl",
        "cpu:gloo,npu:hccl",
    ]


def test_a_groups_options_are_torch_npus_own_or_none(
    npus: FakeNpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = hccl_options({"hccl_buffer_size": 64})
    assert getattr(options, "hccl_config", None) == {"hccl_buffer_size": 64}
    assert hccl_options({}) is None
    monkeypatch.delitem(sys.modules, "torch_npu")
    assert hccl_options({"hccl_buffer_size": 64}) is None
    assert "HCCL_BUFFSIZE" not in os.environ
