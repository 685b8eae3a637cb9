"""Shard one model over ranks (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from services.trainer.learner.model.experts import SparseExperts, expert_blocks
from services.trainer.learner.model.forward import gather_in_passes
from services.trainer.learner.model.tensor_cut import cut_weights
from services.trainer.learner.model.weight_files import WeightFiles
from services.trainer.learner.ranks import (
    COPY_DIM,
    EXPERT_DIM,
    EXPERT_SHARD_DIM,
    SHARD_DIM,
    TENSOR_DIM,
)
from services.trainer.learner.tensor_layouts import local_part, local_region, region
from sluice.vision.torch_inputs import vision_tower

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class Meshes:
    """The meshes of ranks that share the parts of a model.

    Attributes:
        layers: see `ParallelContext.shard_mesh`.
        experts: see `ParallelContext.expert_mesh`.
        tower: mesh of a vision tower, which is whole if ranks cut layers; ``None`` for `layers`.
    """

    layers: DeviceMesh
    experts: DeviceMesh | None = None
    tower: DeviceMesh | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """A sharded model.

    `parameters` are this rank's shards by the model's names, tied ones once. With `sums_once`, only
    the last pass of a mini-batch sums gradients over ranks.
    """

    model: PreTrainedModel
    mesh: DeviceMesh
    parameters: Mapping[str, nn.Parameter]
    sums_once: bool

    def sum_gradients(self, enabled: bool) -> None:
        """Set whether the next backward pass sums gradients over ranks, or only a later one.

        Until then each rank holds whole gradients, which takes memory but saves communication.
        """
        for module in _sharded_modules(self.model):
            module.set_requires_gradient_sync(enabled or not self.sums_once, recurse=False)

    def reshard(self) -> None:
        """Drop gathered weights after a forward pass without a backward pass.

        Otherwise the next pass would use them after a step has changed the shards.
        """
        for module in _sharded_modules(self.model):
            module.reshard()


def shard_model(
    model: PreTrainedModel,
    meshes: Meshes,
    files: WeightFiles | None = None,
    *,
    dtype: torch.dtype,
    reshard_after_forward: bool,
    sums_once: bool,
    prefetches: bool = False,
) -> Shards:
    """Shard a whole model in place; it must be equal on all ranks. Collective.

    A unit is a layer: a module of a class that the model family lists as not to be split. Experts
    that ranks divide are a separate unit. The rest (embedding, head, last norm) is one more unit,
    whole from forward to backward.

    Args:
        model: moves to the meshes' device layer by layer; cut already if a mesh has ``tensor``.
        files: the weights, if they are not read yet: each rank reads the rows of its shards.
        dtype: of gathered weights and activations; gradients are summed in float32, but see
            `own_part`.
        reshard_after_forward: gather a layer again for its backward, instead of keeping it whole.
        prefetches: start to gather the next layer when a layer's forward pass begins.
    """
    # Casting inputs would round positions of images, and copy the layout and masks for each layer.
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # None is FSDP2's default: reshard all units but the outermost.
    kept_whole: bool | None = None if reshard_after_forward else False
    shard = partial(fully_shard, reshard_after_forward=kept_whole, mp_policy=precision)
    units = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    shard_mesh, tensor_mesh = _split_mesh(meshes.layers)
    if meshes.tower is not None and (tower := vision_tower(model)) is not None:
        _shard_tower(tower, units, partial(shard, mesh=meshes.tower))
    for module in (m for m in units if not isinstance(m, FSDPModule)):
        if meshes.experts is not None:
            for block in expert_blocks(module):
                _shard_experts(block, meshes.experts, shard)
        if tensor_mesh is not None:
            cut_weights(module, tensor_mesh)
        shard(module, mesh=shard_mesh)
    # After its layers: the outer unit takes the parameters that are left.
    if tensor_mesh is not None:
        cut_weights(model, tensor_mesh)
    shard(model, mesh=shard_mesh)
    for unit, following in pairwise(units) if prefetches else ():
        assert isinstance(unit, FSDPModule)
        unit.set_modules_to_forward_prefetch(_sharded_modules(following))
    for sharded in _sharded_modules(model):
        # Each loss is already divided by global counts: gradients are added up, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    gather_in_passes(model)
    parameters = dict(model.named_parameters())
    if files is not None:
        fill_shards(parameters, files)
    return Shards(model, meshes.layers, parameters, sums_once)


def _split_mesh(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh that shares the same part of each weight, and the one that cuts it, if
    any."""
    if TENSOR_DIM not in (mesh.mesh_dim_names or ()):
        return mesh, None
    sharing = mesh[SHARD_DIM] if mesh.ndim == 2 else mesh[COPY_DIM, SHARD_DIM]
    return sharing, mesh[TENSOR_DIM]


def _shard_tower(
    tower: nn.Module, units: Sequence[nn.Module], shard: Callable[..., object]
) -> None:
    """Shard a vision tower: its layers and the rest of it."""
    tower_modules = set(tower.modules())
    for module in (*(unit for unit in units if unit in tower_modules), tower):
        shard(module)


def _shard_experts(block: SparseExperts, mesh: DeviceMesh, shard: Callable[..., object]) -> None:
    """Divide a layer's experts over ranks, and shard each part over the ranks that hold it."""
    if mesh.size(mesh.ndim - 1) > 1:
        block.divide(mesh[EXPERT_DIM])
    over = mesh[EXPERT_SHARD_DIM] if mesh.ndim == 2 else mesh[COPY_DIM, EXPERT_SHARD_DIM]
    ranks = mesh.size(mesh.ndim - 2)

    def expert_placement(parameter: nn.Parameter) -> Shard:
        # Divide whole experts; otherwise some ranks would hold several and others none.
        experts, rows = parameter.shape[0] // mesh.size(mesh.ndim - 1), parameter.shape[1]
        return Shard(1 if experts % ranks and rows % ranks == 0 else 0)

    shard(block.experts, mesh=over, shard_placement_fn=expert_placement)


@torch.no_grad()
def assign(target: Tensor, source: Tensor) -> None:
    """Copy `source`, or this rank's shard of it, into `target` of the same global shape."""
    if not isinstance(target, DTensor):
        target.copy_(source)
        return
    target.to_local().copy_(source[region(*local_region(target))])


def fill_shards(parameters: Mapping[str, Tensor], files: WeightFiles) -> None:
    """Read each parameter, or this rank's shard of it; leave new ones as they are."""
    for name, parameter in parameters.items():
        if name in files:
            files.fill(local_part(parameter), name, local_region(parameter)[0])


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
