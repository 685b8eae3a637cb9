"""Groups that stand alone, by the name of their backend."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from sluice.errors import ConfigError
from sluice.weights.backend import Membership, ProcessGroup, create_process_group, wait_briefly


def _membership(rank: int = 0, world_size: int = 1) -> Membership:
    return Membership(
        store=HashStore(),
        rank=rank,
        world_size=world_size,
        timeout_s=60.0,
        local_address="127.0.0.1",
        device=torch.device("cpu"),
    )


def test_forming_a_group_leaves_torchs_default_group_alone() -> None:
    create_process_group("gloo", _membership())
    assert not dist.is_initialized()


def _pair() -> list[ProcessGroup]:
    members = [replace(_membership(rank, 2), store=HashStore()) for rank in range(2)]
    members[1] = replace(members[1], store=members[0].store)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda member: create_process_group("gloo", member), members))


def test_a_short_wait_for_gloo_ends_without_ending_the_collective() -> None:
    sender, receiver = _pair()
    arrived, options = torch.zeros(8), dist.BroadcastOptions()
    work = receiver.broadcast([arrived], options)
    wait_briefly(work, "gloo")
    assert not work.is_completed()
    sent = sender.broadcast([torch.ones(8)], options)
    for _ in range(500):
        wait_briefly(work, "gloo")
        if work.is_completed() and sent.is_completed():
            break
    work.wait()
    assert torch.equal(arrived, torch.ones(8))


def test_a_short_wait_for_another_backend_only_looks() -> None:
    class Untouchable:
        def is_completed(self) -> bool:
            return False

        def wait(self, timeout: timedelta = timedelta()) -> bool:
            raise AssertionError("a wait with a timeout ends collectives of NCCL")

    wait_briefly(Untouchable(), "nccl")


def test_a_process_outlives_groups_of_nccl_and_many_of_them_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    seen: list[object] = []
    for one in (name, "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"):
        monkeypatch.setenv(one, "1")  # so that it is as before after the test
    monkeypatch.setenv(name, "1")  # torchrun's: end the process

    class Nccl:
        Options = staticmethod(lambda: SimpleNamespace(config=SimpleNamespace()))

        def __init__(self, store: object, rank: int, size: int, options: SimpleNamespace) -> None:
            assert options.config.max_ctas == 4
            seen.append(os.environ[name])

        def eager_connect_single_device(self, device: torch.device) -> None:
            seen.append(device)

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    create_process_group("nccl", _membership())
    assert seen == ["2", torch.device("cpu")]


def test_hccl_is_constructed_through_its_registration_with_everything_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished = SimpleNamespace(is_completed=lambda: True, wait=lambda: True)
    group = SimpleNamespace(broadcast=lambda tensors, options: finished)
    made: list[tuple[object, object]] = []

    def creator(options: object, device_options: object) -> object:
        made.append((options, device_options))
        return group

    plugin = SimpleNamespace(creator_fn=creator, extended_api=True)
    monkeypatch.setitem(dist.Backend._plugins, "HCCL", plugin)
    create_process_group("hccl", _membership(rank=1, world_size=3))
    options, device_options = made[0]
    assert device_options is None
    assert isinstance(options, torch._C._distributed_c10d._DistributedBackendOptions)
    assert (options.group_rank, options.group_size) == (1, 3)
    assert options.timeout.total_seconds() == 60.0
    assert options.global_ranks_in_group == [0, 1, 2]


@pytest.mark.parametrize(
    ("backend", "remedy"),
    [("hccl", "load torch_npu"), ("mpi", "use one of gloo, hccl, nccl")],
)
def test_a_backend_that_is_not_there_is_named_with_the_remedy(backend: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f'"{backend}".*{remedy}'):
        create_process_group(backend, _membership())


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_nccl_in_a_cpu_build_is_named_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="CUDA build"):
        create_process_group("nccl", _membership())
