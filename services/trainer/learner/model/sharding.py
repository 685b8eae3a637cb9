"""Shard one model over ranks (FSDP2), and let every rank make the same number of passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from services.trainer.learner.batch.micro_batch import MicroBatch, build_micro_batch
from services.trainer.learner.batch.packed_rows import TrainingRow
from services.trainer.learner.model.experts import SparseExperts, expert_blocks
from services.trainer.learner.model.forward import gather_in_passes
from services.trainer.learner.model.tensor_cut import cut_weights
from services.trainer.learner.model.weight_files import WeightFiles
from services.trainer.learner.places import local_part, place, region
from services.trainer.learner.ranks import (
    COPY_DIM,
    EXPERT_DIM,
    EXPERT_SHARD_DIM,
    SHARD_DIM,
    TENSOR_DIM,
    DataParallel,
)
from sluice.algorithm.packing import plan_micro_batches
from sluice.vision.torch_inputs import vision_tower

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class Meshes:
    """The ranks that share the parts of a model.

    Attributes:
        layers: see `DataParallel.shard_mesh`.
        experts: see `DataParallel.expert_mesh`.
        tower: of a vision tower, which is whole where ranks cut layers; ``None``: as `layers`.
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

    def sum_gradients(self, wanted: bool) -> None:
        """Set whether the next backward pass sums gradients over ranks, or a later one does.

        Until then each rank holds whole gradients, which takes memory but saves communication.
        """
        for module in _sharded_modules(self.model):
            module.set_requires_gradient_sync(wanted or not self.sums_once, recurse=False)

    def reshard(self) -> None:
        """Drop gathered weights after a forward pass without a backward pass.

        Otherwise the next pass would use them, although a step has changed the shards.
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

    One unit is a layer: a module of a class that the model family lists as not to be split.
    Experts that ranks divide are a unit of their own. The rest (embedding, head, last norm) is one
    more unit, whole from forward to backward.

    Args:
        model: moves to the meshes' device layer by layer; for one with ``tensor`` cut already.
        meshes: of its parts.
        files: the weights, if they are not read yet: each rank reads the rows of its shards.
        dtype: of gathered weights and activations; gradients are summed in float32, but see
            `own_part`.
        reshard_after_forward: gather a layer again for its backward, instead of keeping it whole.
        sums_once: see `Shards`.
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
    over, cutting = _by_use(meshes.layers)
    if meshes.tower is not None and (tower := vision_tower(model)) is not None:
        _shard_tower(tower, units, partial(shard, mesh=meshes.tower))
    for module in (one for one in units if not isinstance(one, FSDPModule)):
        if meshes.experts is not None:
            for block in expert_blocks(module):
                _shard_experts(block, meshes.experts, shard)
        if cutting is not None:
            cut_weights(module, cutting)
        shard(module, mesh=over)
    # After its layers: the outer unit takes the parameters that are left.
    if cutting is not None:
        cut_weights(model, cutting)
    shard(model, mesh=over)
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


def _by_use(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the ranks that share the same part of each weight, and those that cut it, if any."""
    if TENSOR_DIM not in (mesh.mesh_dim_names or ()):
        return mesh, None
    sharing = mesh[SHARD_DIM] if mesh.ndim == 2 else mesh[COPY_DIM, SHARD_DIM]
    return sharing, mesh[TENSOR_DIM]


def _shard_tower(
    tower: nn.Module, units: Sequence[nn.Module], shard: Callable[..., object]
) -> None:
    """Shard a vision tower: its layers and the rest of it."""
    own = set(tower.modules())
    for module in (*(one for one in units if one in own), tower):
        shard(module)


def _shard_experts(block: SparseExperts, mesh: DeviceMesh, shard: Callable[..., object]) -> None:
    """Divide a layer's experts over ranks, and shard each rank's over those with the same ones."""
    if mesh.size(mesh.ndim - 1) > 1:
        block.divide(mesh[EXPERT_DIM])
    over = mesh[EXPERT_SHARD_DIM] if mesh.ndim == 2 else mesh[COPY_DIM, EXPERT_SHARD_DIM]
    ranks = mesh.size(mesh.ndim - 2)

    def place(parameter: nn.Parameter) -> Shard:
        # Whole experts, or some ranks would hold several and others none.
        experts, rows = parameter.shape[0] // mesh.size(mesh.ndim - 1), parameter.shape[1]
        return Shard(1 if experts % ranks and rows % ranks == 0 else 0)

    shard(block.experts, mesh=over, shard_placement_fn=place)


@torch.no_grad()
def assign(target: Tensor, whole: Tensor) -> None:
    """Copy `whole`, or this rank's shard of it, into `target` of the same global shape."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    target.to_local().copy_(whole[region(*place(target))])


def fill_shards(parameters: Mapping[str, Tensor], files: WeightFiles) -> None:
    """Read each parameter, or this rank's shard of it; leave new ones as they are."""
    for name, parameter in parameters.items():
        if name in files:
            files.fill(local_part(parameter), name, place(parameter)[0])


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class EvenPasses:
    """The same number of passes of one sharded model on every rank.

    Each pass gathers the layers' weights from all ranks, so all ranks must make equally many. A
    rank with fewer micro-batches than the busiest one adds idle passes: over a made-up row, with
    gradient 0. Does nothing for a model that each rank holds whole.

    Every method but `before_backward` is collective.

    Args:
        shards: the model; ``None`` if it is not sharded.
        idle_pass: runs the model forward over a micro-batch; returns a value per token.
        device: gets the inputs of idle passes.
    """

    def __init__(
        self,
        shards: Shards | None,
        parallel: DataParallel,
        idle_pass: Callable[[MicroBatch], Tensor],
        device: torch.device,
    ) -> None:
        self._shards = shards
        self._parallel = parallel
        self._device = device
        self._idle_pass = idle_pass
        self._own = 0
        self._left = 0

    def begin(self, own: int) -> None:
        """Prepare for `own` passes: without gradients, or the passes of one optimizer step."""
        # `_left` counts down to the pass that sums gradients; the busiest rank sets the number.
        self._own = own
        self._left = 0 if self._shards is None else self._most(own)

    @property
    def num_idle(self) -> int:
        """Return how many idle passes follow this rank's own ones, before they begin."""
        return max(0, self._left - self._own)

    @torch.no_grad()
    def end_forward_only(self) -> None:
        """Add passes, after those without gradients, up to the busiest rank's number."""
        if self._shards is None:
            return
        for _ in range(self.num_idle):
            self._idle_pass(idle_micro_batch(self._device, self._parallel))
        self._shards.reshard()

    def before_backward(self) -> None:
        """Let only the last backward pass sum gradients over ranks; call before each."""
        if self._shards is not None:
            # Earlier passes keep whole gradients: summing once per step saves communication.
            self._left -= 1
            self._shards.sum_gradients(self._left == 0)

    def end_step(self) -> None:
        """Add passes, after those of a step, up to the busiest rank's number."""
        while self._left > 0:
            # Times 0: the pass takes part in the sum over ranks and adds nothing to it.
            idle = self._idle_pass(idle_micro_batch(self._device, self._parallel)).sum() * 0.0
            self.before_backward()
            idle.backward()

    def _most(self, own: int) -> int:
        gathered = self._parallel.all_gather([float(own)], "counting micro-batches")
        return int(max(count for (count,) in gathered))


def idle_micro_batch(device: torch.device, parallel: DataParallel | None = None) -> MicroBatch:
    """Return a micro-batch of one row: a prompt of one token and a response of one token."""
    token = np.zeros(1, np.uint32)
    row = TrainingRow(0, 0, token, token, np.zeros(1, np.float32))
    (plan,) = plan_micro_batches([row.size], range(1), rows_per_micro=1)
    alone = parallel or DataParallel()
    micro_batch = build_micro_batch(
        [row], plan, device, share=alone.share, pad_to=alone.token_multiple
    )
    assert micro_batch is not None
    return micro_batch
