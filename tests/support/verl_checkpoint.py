"""Checkpoints as verl's FSDP trainer leaves them, written with made-up ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

Layout = Mapping[str, Placement | None]  # None: no DTensor, every rank holds its piece of dim 0


def write_verl_checkpoint(
    folder: Path,
    model: Path,
    weights: Mapping[str, Tensor],
    layout: Layout,
    *,
    mesh_shape: tuple[int, ...] = (2,),
    mesh_names: tuple[str, ...] = ("fsdp",),
) -> Path:
    """Write ``global_step_N/actor`` for a model.

    Args:
        folder: the actor folder.
        model: whose configuration and tokenizer are copied.
        weights: whole ones by name.
        layout: how each is laid over the last mesh dimension; not named ones by ``Shard(0)``.
        mesh_shape: ranks by mesh dimension; dimensions before the last hold copies.
        mesh_names: of the dimensions.
    """
    folder.mkdir(parents=True)
    world_size, num_shards = torch.Size(mesh_shape).numel(), mesh_shape[-1]
    (folder / "fsdp_config.json").write_text(
        json.dumps({"FSDP_version": 2, "world_size": world_size}), encoding="utf-8"
    )
    (folder / "huggingface").mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        if (model / name).is_file():
            shutil.copy(model / name, folder / "huggingface")
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=mesh_names)
            state = {
                name: _piece(whole, layout.get(name, Shard(0)), mesh, rank % num_shards)
                for name, whole in weights.items()
            }
            file = folder / f"model_world_size_{world_size}_rank_{rank}.pt"
            torch.save(state, file)  # noqa: TID251 - as verl does
        finally:
            dist.destroy_process_group()
    return folder


def _piece(whole: Tensor, placement: Placement | None, mesh: DeviceMesh, shard: int) -> Tensor:
    num_shards = mesh.shape[-1]
    if placement is None:
        return whole.chunk(num_shards)[shard].clone()
    local = whole
    if isinstance(placement, Shard):
        # As FSDP: the last ranks may be left with less, or nothing.
        pieces = whole.chunk(num_shards, dim=placement.dim)
        empty = whole.narrow(placement.dim, 0, 0)
        local = pieces[shard] if shard < len(pieces) else empty
    placements = [*[Replicate()] * (mesh.ndim - 1), placement]
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
