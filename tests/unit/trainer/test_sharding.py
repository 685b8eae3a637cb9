"""Shards of a model: how many ranks share it, which rows each holds, and how they join."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from services.trainer.learner.model.sharding import gather_whole
from services.trainer.learner.ranks import COPY_DIM, SHARD_DIM
from tests.support.threaded_ranks import ThreadedRank


Weights = dict[str, torch.Tensor]
WEIGHTS: Weights = {
    "even": torch.arange(12.0).view(4, 3),
    "uneven": torch.arange(100.0, 110.0).view(5, 2),
    "one row": torch.arange(200.0, 203.0).view(1, 3),
    "counts": torch.arange(6, dtype=torch.int64),
    "last": torch.arange(300.0, 308.0),
}
BUCKET_BYTES = 100  # "even" and "uneven" in two shards of 3 rows are 96


class Peers(ThreadedRank):
    """Ranks that record collectives; the other shards are cut from the whole weights."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.all_met = 0
        self.gathered: list[int] = []

    def all_gather(self, values: Sequence[float], phase: str) -> list[list[float]]:
        self.all_met += 1
        return [list(values)] * self.world_size

    def gather_to_first(self, own: torch.Tensor, group: object, phase: str) -> torch.Tensor | None:
        self.gathered.append(own.numel() * own.element_size())
        return torch.stack([own, own]) if self.rank == 0 else None


@contextmanager
def _mesh(rank: int, places: list[list[int]]) -> Iterator[DeviceMesh]:
    """Return a mesh of two shards per copy; nothing is ever sent."""
    size = sum(map(len, places))
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        names = (COPY_DIM, SHARD_DIM) if len(places) > 1 else (SHARD_DIM,)
        shape = places if len(places) > 1 else places[0]
        yield DeviceMesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def _sharded(mesh: DeviceMesh, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    index = mesh.get_local_rank(SHARD_DIM)
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    for name, whole in weights.items():
        rows = -(-whole.shape[0] // 2)
        local = whole[index * rows : (index + 1) * rows]
        yield (
            name,
            DTensor.from_local(
                local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            ),
        )


@pytest.mark.parametrize("bucket_bytes", [1, BUCKET_BYTES, 1 << 20])
def test_the_first_rank_gets_every_tensor_in_its_shape_whatever_the_buckets(
    bucket_bytes: int,
) -> None:
    peers = Peers(0, 2)
    with _mesh(0, [[0, 1]]) as mesh:
        found = dict(
            gather_whole(_sharded(mesh, WEIGHTS), peers, "gathering", bucket_bytes=bucket_bytes)
        )
    assert found.keys() == WEIGHTS.keys()
    for name, whole in WEIGHTS.items():
        # The peer pretends to have the same rows.
        first = whole[: -(-whole.shape[0] // 2)]
        expected = torch.cat([first, first])[: whole.shape[0]]
        assert torch.equal(found[name], expected), name
        assert found[name].dtype == whole.dtype
    # Integers travel apart from floats; whole tensors of one collective fit into a bucket.
    assert len(peers.gathered) == {1: 5, BUCKET_BYTES: 4, 1 << 20: 3}[bucket_bytes]


def test_floats_travel_in_the_dtype_asked_for_and_integers_in_their_own() -> None:
    with _mesh(0, [[0, 1]]) as mesh:
        stream = gather_whole(
            _sharded(mesh, WEIGHTS), Peers(0, 2), "gathering", dtype=torch.bfloat16
        )
        dtypes = {name: tensor.dtype for name, tensor in stream}
    assert dtypes.pop("counts") == torch.int64
    assert set(dtypes.values()) == {torch.bfloat16}


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_the_other_copies_send_nothing_and_keep_step_bucket_by_bucket(rank: int) -> None:
    """Or a long gather would use up the deadline of their next command."""
    peers = Peers(rank, 4)
    with _mesh(rank, [[0, 1], [2, 3]]) as mesh:
        stream = gather_whole(_sharded(mesh, WEIGHTS), peers, "gathering", bucket_bytes=1)
        found = dict(stream)
    assert peers.all_met == len(WEIGHTS)
    assert len(peers.gathered) == (len(WEIGHTS) if rank < 2 else 0)
    assert set(found) == (set(WEIGHTS) if rank == 0 else set())
