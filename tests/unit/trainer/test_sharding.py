"""Shards of a model: which part each rank holds, and how they travel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import ErrorType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.trainer.learner.model.optimizer import ModelOptimizer, ShardedGradients
from services.trainer.learner.rank_rendezvous import RankAddress
from services.trainer.learner.ranks import ParallelContext, TorchDistributed
from services.trainer.learner.tensor_layouts import (
    exchange_layouts,
    local_part,
    local_region,
    region,
)
from services.trainer.learner.weight_stream import cut_buckets
from sluice.config.parallel_layout import ParallelLayout
from sluice.config.schema.actor import OptimConfig
from sluice.device.select import select_device
from sluice.errors import ConfigError, DeadlineError, PeerError


@contextmanager
def _mesh(rank: int, shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """Return a mesh as one of its ranks sees it; nothing is ever sent."""
    size = math.prod(shape)
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield DeviceMesh("cpu", torch.arange(size).view(shape))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "placements",
    [(Replicate(), Shard(0)), (Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0))],
    ids=str,
)
def test_the_ranks_places_are_where_torch_cut_the_tensor(
    placements: tuple[Replicate | Shard, ...],
) -> None:
    whole = torch.arange(70.0).view(7, 10)
    for rank in range(4):
        with _mesh(rank, (2, 2)) as mesh:
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert torch.equal(local_part(tensor), whole[region(*local_region(tensor))])


@pytest.mark.parametrize(("rows", "shape"), [(61, (3, 2)), (7, (3, 2)), (17, (4, 2)), (8, (2, 2))])
def test_a_shard_of_uneven_rows_of_the_vocabulary_lies_where_both_cuts_put_it(
    rows: int, shape: tuple[int, int]
) -> None:
    whole = torch.arange(2.0 * rows).view(rows, 2)
    for rank in range(math.prod(shape)):
        with _mesh(rank, shape) as mesh:
            shard, cut = mesh.get_coordinate() or (0, 0)
            # FSDP cuts what the tensor ranks leave.
            own = _chunk_with_empty(whole.chunk(shape[1])[cut], shape[0], 0)[shard].view(-1, 2)
            weight = DTensor.from_local(
                own,
                mesh,
                (_StridedShard(0, split_factor=shape[1]), Shard(0)),
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
            assert torch.equal(own, whole[region(*local_region(weight))])


class Alone(TorchDistributed):
    """One of several ranks, whose groups send nothing."""

    def __init__(self) -> None:
        super().__init__(select_device("cpu"), 1.0)

    def all_gather(self, values: Sequence[float], phase: str) -> list[list[float]]:
        return [list(values)] * self.world_size

    def _form(self, backend: str, place: RankAddress) -> None:
        size = place.world_size
        dist.init_process_group("fake", store=FakeStore(), rank=place.rank, world_size=size)


def test_neighbors_cut_layers_and_the_next_ones_share_sequences_of_the_same_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {"WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (environment | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        with Alone() as ranks:
            ranks.divide(ParallelLayout(8, shard=4, sequence=2, tensor=2))
            rows, within = divmod(rank, 4)
            assert ranks.data_rank == rows
            assert ranks.tensor is not None
            assert ranks.share is not None
            assert ranks.image_ranks.share is not None
            groups = (ranks.tensor.group, ranks.share.group, ranks.image_ranks.share.group)
            neighbors, others, images = map(dist.get_process_group_ranks, groups)
            assert neighbors == [rank - rank % 2, rank - rank % 2 + 1]
            assert others == [4 * rows + within % 2, 4 * rows + within % 2 + 2]
            assert images == list(range(4 * rows, 4 * rows + 4))
            assert (ranks.tensor.rank, ranks.share.rank) == (within % 2, within // 2)
            shards = ranks.shard_mesh(4).mesh
            assert torch.equal(shards, torch.arange(8).view(4, 2))


@contextmanager
def _first_of_two_on_gpus(
    monkeypatch: pytest.MonkeyPatch, error: ErrorType
) -> Iterator[TorchDistributed]:
    """Return a rank in whose second group NCCL's watchdog found an error."""
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (environment | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    with Alone() as ranks:
        ranks.divide(ParallelLayout(2, sequence=2))
        assert ranks.share is not None
        assert [dist.get_process_group_ranks(one) for one in ranks._groups] == [[0, 1]] * 2
        found = dict(zip(ranks._groups, (ErrorType.SUCCESS, error), strict=True))

        def backend(group: object, _: torch.device) -> object:
            return SimpleNamespace(get_error=lambda: found[cast("dist.ProcessGroup", group)])

        with monkeypatch.context() as patched:
            patched.setattr(dist.ProcessGroup, "_get_backend", backend)
            patched.setattr(ranks, "device_type", "cuda")
            yield ranks


@pytest.mark.parametrize(
    ("found", "expected"),
    [(ErrorType.TIMEOUT, DeadlineError), (ErrorType.COMM_ERROR, PeerError)],
)
@pytest.mark.parametrize(
    "seen", [None, RuntimeError("CUDA out of memory"), OverflowError("too many rows")], ids=str
)
def test_after_nccl_gave_up_a_collective_no_result_and_no_other_error_counts(
    seen: Exception | None,
    found: ErrorType,
    expected: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(ranks: TorchDistributed) -> None:
        with ranks.naming_failures("training step 1"):
            if seen is not None:
                raise seen

    with (
        _first_of_two_on_gpus(monkeypatch, found) as ranks,
        pytest.raises(expected, match=r"trainer rank.*training step 1"),
    ):
        train(ranks)


def test_a_ranks_own_error_stays_where_every_collective_is_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with _first_of_two_on_gpus(monkeypatch, ErrorType.SUCCESS) as ranks:
        with pytest.raises(RuntimeError, match="out of memory"), ranks.naming_failures("training"):
            raise RuntimeError("CUDA out of memory")
        with ranks.naming_failures("training"):
            pass


class SeenUpdates(TorchDispatchMode):
    """Notes the types of the tensors that AdamW's update is asked to change."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[type] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._fused_adamw_.default:
            self.types += [type(one) for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def test_adamw_changes_a_ranks_own_parts_without_a_look_at_how_they_are_cut() -> None:
    def sharded(mesh: DeviceMesh, seed: int) -> list[nn.Parameter]:
        torch.manual_seed(seed)
        placements = [(Shard(0),), (Shard(1),), (Replicate(),)]
        return [
            nn.Parameter(distribute_tensor(torch.randn(6, 4), mesh, one, src_data_rank=None))
            for one in placements
        ]

    config = OptimConfig(lr=0.1, clip_grad=1e9)
    with _mesh(1, (2,)) as mesh:
        ours, theirs = sharded(mesh, 0), sharded(mesh, 0)
        named = {str(number): one for number, one in enumerate(ours)}
        optimizer = ModelOptimizer(named, config, 4, ShardedGradients(ours, ParallelContext()))
        reference = torch.optim.AdamW(
            theirs,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        with SeenUpdates() as seen:
            for number in (1, 2):
                optimizer.begin_batch(0)
                for parameter, gradient in zip(ours, sharded(mesh, number), strict=True):
                    parameter.grad = gradient.detach()
                optimizer.step()
        for number in (1, 2):
            for parameter, gradient in zip(theirs, sharded(mesh, number), strict=True):
                parameter.grad = gradient.detach()
            reference.step()
        for own, other in zip(ours, theirs, strict=True):
            assert torch.equal(local_part(own), local_part(other))
    assert seen.types
    assert DTensor not in seen.types


class Peer(ParallelContext):
    """Rank 0 of two, which hears that the other one has the same part."""

    world_size = 2

    def all_gather(self, values: Sequence[float], phase: str) -> list[list[float]]:
        return [list(values)] * 2


def test_parts_that_do_not_make_their_tensor_are_refused_by_name() -> None:
    with _mesh(0, (2,)) as mesh:
        half = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
        with pytest.raises(ConfigError, match=r"^w: the ranks' parts .* do not make its shape"):
            exchange_layouts({"w": half}, Peer())


class OverlappingPeer(ParallelContext):
    """Rank 0 of two, which hears that the other one's rows begin a row too early."""

    world_size = 2

    def all_gather(self, values: Sequence[float], phase: str) -> list[list[float]]:
        first, size = values
        return [[first, size], [first + size - 1, size]]


def test_parts_with_an_overlap_and_a_gap_are_refused_by_name() -> None:
    with _mesh(0, (2,)) as mesh:
        half = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
        with pytest.raises(ConfigError, match=r"^w: the ranks' parts .* do not make its shape"):
            exchange_layouts({"w": half}, OverlappingPeer())


@given(
    shapes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=5),
    bucket_bytes=st.integers(1, 200),
)
def test_buckets_hold_every_row_once_in_order_and_no_more_bytes_than_they_may(
    shapes: list[tuple[int, int]], bucket_bytes: int
) -> None:
    tensors = {f"{n}": torch.zeros(shape) for n, shape in enumerate(shapes)}
    places = exchange_layouts(tensors, ParallelContext())
    rows: dict[str, list[int]] = {name: [] for name in tensors}
    for bucket in cut_buckets(places, places, bucket_bytes):
        sizes = [(one.stop - one.start) * places[one.name].row_bytes for one in bucket]
        assert sum(sizes) <= bucket_bytes or sum(one.stop - one.start for one in bucket) == 1
        for one in bucket:
            rows[one.name] += range(one.start, one.stop)
    assert rows == {name: list(range(tensor.shape[0])) for name, tensor in tensors.items()}
