"""Transfer groups over HCCL, played by a stand-in; the path up to torch_npu is the real one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from sluice.device.cpu import CpuDevice
from sluice.errors import ConfigError, SluiceError
from sluice.weights.backend import Membership, create_process_group
from sluice.weights.plan import tensor_specs
from sluice.weights.rank_sender import RankSender
from sluice.weights.receiver import WeightReceiver
from sluice.weights.sender import WeightSender
from sluice.weights.transfer import BucketPort
from tests.support.retired_threads import wait_for_retired_threads
from tests.support.stand_in_hccl import (
    FakeNpus,
    GroupOptions,
    StandInGroup,
    StandInNpu,
    fake_torch_npu,
    forget_stand_in,
    register_stand_in,
)
from tests.support.weight_buffers import buffer_of

_NEVER = threading.Event()
_MIB = 1 << 20
_WEIGHTS = {
    "wide": torch.arange(5000, dtype=torch.float32),
    "half": torch.full((9, 3), 0.5, dtype=torch.bfloat16),
}


@pytest.fixture
def groups() -> Iterator[list[StandInGroup]]:
    yield register_stand_in()
    forget_stand_in()


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", fake_torch_npu(FakeNpus()))
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)


def _alone(timeout_s: float = 60.0, bucket_bytes: int = 0) -> Membership:
    return Membership(
        store=HashStore(),
        rank=0,
        world_size=1,
        timeout_s=timeout_s,
        local_address="127.0.0.1",
        device=torch.device("cpu"),
        bucket_bytes=bucket_bytes,
    )


@pytest.fixture
def ends(groups: list[StandInGroup]) -> Iterator[tuple[WeightSender, WeightReceiver]]:
    sender = WeightSender(device=StandInNpu(), bucket_bytes=4096, timeout_s=60.0)
    with closing(sender), closing(WeightReceiver(StandInNpu())) as receiver:
        yield sender, receiver
    assert wait_for_retired_threads(60) == 0


def _form(ends: tuple[WeightSender, WeightReceiver], pool: ThreadPoolExecutor) -> None:
    sender, receiver = ends
    tensors = tensor_specs(_WEIGHTS.items())
    spec = sender.form_group(1, ["rollout-0"], tensors)["rollout-0"]
    assert spec.backend == "hccl"
    joined = pool.submit(receiver.join, spec)
    sender.join(_NEVER)
    assert joined.result(60) == spec.plan_digest


@pytest.mark.usefixtures("torch_npu")
def test_weights_cross_a_group_of_hccl_bit_for_bit(
    ends: tuple[WeightSender, WeightReceiver], groups: list[StandInGroup]
) -> None:
    sender, receiver = ends
    with ThreadPoolExecutor(2) as pool:
        _form(ends, pool)
        staging = pool.submit(receiver.stage, 7)
        sender.broadcast(buffer_of(_WEIGHTS), 7, _NEVER)
        staged = staging.result(60)
    assert staged.version == 7
    assert all(torch.equal(staged.tensors[name], _WEIGHTS[name]) for name in _WEIGHTS)
    assert {group.options.group_size for group in groups} == {2}
    assert sorted(group.options.group_rank for group in groups) == [0, 1]
    assert all(sum(group.broadcast_bytes) > 20_000 for group in groups)
    # Buckets of 4 KiB; a MB is the least that HCCL takes.
    assert [group.group_options for group in groups] == [GroupOptions({"hccl_buffer_size": 1})] * 2


@pytest.mark.usefixtures("torch_npu")
def test_what_a_sender_moves_is_made_in_the_thread_that_has_a_stream_of_its_own(
    ends: tuple[WeightSender, WeightReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_stream: set[threading.Thread] = set()
    makers: list[threading.Thread] = []
    monkeypatch.setattr(
        CpuDevice, "use_own_stream", lambda _: with_stream.add(threading.current_thread())
    )
    make = RankSender._port

    def noted(*arguments: Any) -> BucketPort:
        makers.append(threading.current_thread())
        return make(*arguments)

    monkeypatch.setattr(RankSender, "_port", noted)
    with ThreadPoolExecutor(2) as pool:
        _form(ends, pool)
        staging = pool.submit(ends[1].stage, 7)
        ends[0].broadcast(buffer_of(_WEIGHTS), 7, _NEVER)
        staging.result(60)
    assert len(makers) == 1
    assert with_stream.issuperset(makers)


def test_the_communicator_is_made_in_the_formation_not_by_the_first_bucket(
    ends: tuple[WeightSender, WeightReceiver], groups: list[StandInGroup]
) -> None:
    with ThreadPoolExecutor(2) as pool:
        _form(ends, pool)
    assert [group.broadcast_bytes for group in groups] == [[1], [1]]


def test_a_group_that_is_given_up_frees_its_communicator_by_hccls_own_call(
    ends: tuple[WeightSender, WeightReceiver], groups: list[StandInGroup]
) -> None:
    sender, receiver = ends
    with ThreadPoolExecutor(2) as pool:
        _form(ends, pool)
        staging = pool.submit(receiver.stage, 1)
        receiver.abort("the test ends it")
        with pytest.raises(SluiceError):
            staging.result(60)
    sender.close()
    assert wait_for_retired_threads(60) == 0
    assert [len(group.aborted) for group in groups] == [1, 1]


def test_a_first_collective_that_does_not_end_names_the_variables_to_check(
    groups: list[StandInGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck:
        def is_completed(self) -> bool:
            return False

    monkeypatch.setattr(StandInGroup, "broadcast", lambda *_: Stuck())
    with pytest.raises(RuntimeError, match=r"within 0.05 s.*HCCL_IF_IP"):
        create_process_group("hccl", _alone(timeout_s=0.05))
    assert len(groups[0].aborted) == 1  # and its communicator is freed


@pytest.mark.usefixtures("torch_npu")
def test_a_groups_buffer_is_no_larger_than_its_bucket(groups: list[StandInGroup]) -> None:
    create_process_group("hccl", _alone(bucket_bytes=64 * _MIB))
    assert groups[0].group_options == GroupOptions({"hccl_buffer_size": 64})


@pytest.mark.usefixtures("torch_npu")
def test_a_buffer_size_of_the_environment_holds_for_all_groups(
    groups: list[StandInGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "100")
    create_process_group("hccl", _alone(bucket_bytes=64 * _MIB))
    assert groups[0].group_options is None


def test_without_torch_npu_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(dist.Backend._plugins, "HCCL", raising=False)
    with pytest.raises(ConfigError, match="load torch_npu"):
        create_process_group("hccl", _alone())


def test_a_cpu_stays_with_gloo() -> None:
    assert CpuDevice().collective_backend == "gloo"
