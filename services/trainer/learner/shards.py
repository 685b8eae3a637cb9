"""One model's weights cut into shards over ranks (FSDP2), each layer whole only while it computes.

Every parameter is a DTensor cut along its first dimension, the last shards shorter or empty. What
the optimizer keeps for it has the same shape. A pass through the model is collective: all ranks of
the mesh make the same number of them (`even_passes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from services.trainer.learner.packed_images import gathers_for_images
from services.trainer.learner.parallel import SHARD_DIM
from sluice.errors import ConfigError
from sluice.vision.vision_shape import FAMILIES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """A sharded model.

    `parameters` are this rank's, by the model's names, tied ones once. `sums_once` says whether
    gradients are summed over ranks by the last pass of a mini-batch only.
    """

    model: PreTrainedModel
    mesh: DeviceMesh
    parameters: Mapping[str, nn.Parameter]
    sums_once: bool

    @property
    def num_copies(self) -> int:
        """Ranks that hold the same shard."""
        return self.mesh.size(0) if self.mesh.ndim > 1 else 1

    def sum_gradients(self, wanted: bool) -> None:
        """Whether the next backward pass sums gradients over ranks or leaves them to a later one.

        What is left stays whole on the rank until then.
        """
        for module in _sharded_modules(self.model):
            module.set_requires_gradient_sync(wanted or not self.sums_once, recurse=False)

    def reshard(self) -> None:
        """Drop gathered weights that a pass without a backward left; they would become stale."""
        for module in _sharded_modules(self.model):
            module.reshard()


def shard_model(
    model: PreTrainedModel, mesh: DeviceMesh, *, reshard_after_forward: bool, sums_once: bool
) -> Shards:
    """Cut a whole model, equal on all ranks, in place; collective.

    The layers are the classes that the model family says not to split; what is outside of them
    (embedding, head, last norm) is one more unit, which stays whole from forward to backward.

    Args:
        model: anywhere; moves to the mesh's device layer by layer.
        mesh: dimensions ``copy`` (if there are several) and ``shard``.
        reshard_after_forward: gather a layer again for its backward, instead of keeping it whole.
        sums_once: see `Shards`.
    """
    kept_whole: bool | None = None if reshard_after_forward else False
    layers = set(model._no_split_modules or ())
    for module in [m for m in model.modules() if type(m).__name__ in layers]:
        fully_shard(module, mesh=mesh, reshard_after_forward=kept_whole)
    fully_shard(model, mesh=mesh, reshard_after_forward=kept_whole)
    for sharded in _sharded_modules(model):
        # A micro-batch's loss is divided by global counts: gradients are added up, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    if model.config.model_type in FAMILIES:
        gathers_for_images(model)
    return Shards(model, mesh, dict(model.named_parameters()), sums_once)


def shard_size(fsdp_size: int, world_size: int, key: str) -> int:
    """Ranks that share one copy of the model: all for a size below 1 or above their number.

    Raises:
        ConfigError: the size does not divide the number of ranks.
    """
    if not 0 < fsdp_size < world_size:
        return world_size
    if world_size % fsdp_size:
        raise ConfigError(
            f"{key}={fsdp_size} does not divide the {world_size} trainer ranks (trainer.nnodes * "
            "trainer.n_gpus_per_node); give a divisor, -1 to shard over all ranks, or 1 to hold "
            "the whole model on each"
        )
    return fsdp_size


@torch.no_grad()
def assign(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, or this rank's shard of it, into `target`, which has its shape."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    mesh = target.device_mesh
    start, stop = shard_rows(
        whole.shape[0], mesh.size(mesh.ndim - 1), mesh.get_local_rank(SHARD_DIM)
    )
    target.to_local().copy_(whole[start:stop])


def shard_rows(rows: int, shards: int, index: int) -> tuple[int, int]:
    """First row of a shard and the one after its last: shards of ``ceil(rows / shards)`` rows."""
    length = -(-rows // shards)
    return min(rows, index * length), min(rows, (index + 1) * length)


def plain_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The model's class as transformers knows it; sharding derives one of its own from it."""
    family: type[PreTrainedModel] = type(model)
    return family.__mro__[2] if isinstance(model, FSDPModule) else family


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
