"""Rank 0 of trainer ranks that are not there: its collectives return at once, and move nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from services.trainer.learner.rank_rendezvous import RankPlace
from services.trainer.learner.ranks import TorchDistributed
from sluice.config.parallel_layout import ParallelLayout
from sluice.device.select import select_device

_NO_DEADLINE_S = 60.0


class FakeRanks(TorchDistributed):
    """Rank 0 of `world_size`; a process has one such group at a time."""

    def __init__(self, world_size: int) -> None:
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # so that none is opened
        }
        super().__init__(select_device("cpu"), _NO_DEADLINE_S)

    def all_gather(self, values: Sequence[float], phase: str) -> list[list[float]]:
        """Return this rank's numbers for every rank."""
        return [list(values)] * self.world_size

    def divide(self, layout: ParallelLayout) -> None:
        with unset_fake_temporarily():  # groups are made of numbers
            super().divide(layout)

    def shard_mesh(self, size: int) -> DeviceMesh:
        with unset_fake_temporarily():
            return super().shard_mesh(size)

    def expert_mesh(self, size: int) -> DeviceMesh | None:
        with unset_fake_temporarily():
            return super().expert_mesh(size)

    def _form(self, backend: str, place: RankPlace) -> None:
        store = FakeStore()
        dist.init_process_group("fake", store=store, rank=0, world_size=place.world_size)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors without memory in the block; but meshes hold the numbers of ranks."""
    mesh, init = DeviceMesh.mesh, DeviceMesh.__init__
    DeviceMesh.mesh = property(_really(mesh.fget))  # type: ignore[assignment,method-assign,attr-defined]
    DeviceMesh.__init__ = _really(init)  # type: ignore[method-assign]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        DeviceMesh.mesh, DeviceMesh.__init__ = mesh, init  # type: ignore[method-assign]


def _really(function: Callable[..., Any]) -> Callable[..., Any]:
    def outside(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any function's
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return outside
