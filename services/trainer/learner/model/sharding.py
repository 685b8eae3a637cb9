"""Cut one model's weights into shards over ranks (FSDP2), sum their gradients, and keep ranks
in step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from services.trainer.learner.batch.micro_batch import MicroBatch, TrainingRow, build_micro_batch
from services.trainer.learner.batch.packing import gathers_for_images
from services.trainer.learner.ranks.parallel import SHARD_DIM, DataParallel
from sluice.algorithm.packing import plan_micro_batches
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


class Gradients(Protocol):
    """The gradients that one optimizer steps with."""

    @property
    def buffers(self) -> Sequence[Tensor]:
        """What must still be summed over ranks before a step."""
        ...

    def complete(self) -> None:
        """Give every parameter a gradient, 0 where no pass left one."""
        ...

    def zero(self) -> None:
        """Set all gradients to 0."""
        ...

    def norm(self) -> float:
        """Global L2 norm over all ranks' parts, the same bits on each."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        ...


class ShardedGradients:
    """FSDP2 makes a gradient per shard in the last backward pass of a step and sums it over ranks.

    `norm` is collective.

    Args:
        parameters: sharded.
        parallel: all ranks.
        num_copies: ranks that hold the same shard.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], parallel: DataParallel, num_copies: int
    ) -> None:
        self._parameters = list(parameters)
        self._parallel = parallel
        self._num_copies = num_copies
        self.buffers: tuple[Tensor, ...] = ()

    def complete(self) -> None:
        """Zeros for parameters that no backward pass reached."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def zero(self) -> None:
        """Drop them; the next backward pass makes them again."""
        for parameter in self._parameters:
            parameter.grad = None

    def norm(self) -> float:
        """In float32 on the rank, summed over ranks in float64; a shard held twice counts once."""
        squares = [torch.linalg.vector_norm(g, dtype=torch.float32).square() for g in self._local()]
        own = float(sum(squares)) if squares else 0.0
        gathered = self._parallel.all_gather([own], "summing the gradients' norms")
        return math.sqrt(sum(part for (part,) in gathered) / self._num_copies)

    def scale(self, factor: float) -> None:
        """Each rank its shards."""
        for gradient in self._local():
            gradient.mul_(factor)

    def _local(self) -> list[Tensor]:
        gradients = (parameter.grad for parameter in self._parameters)
        return [g.to_local() if isinstance(g, DTensor) else g for g in gradients if g is not None]


# Ranks of a sharded model make equally many passes, whatever their shares of the rows.
#
# Each pass gathers the layers' weights from all ranks. A rank whose rows fill fewer micro-
# batches than another's makes up for it with passes over a made-up row whose gradient is 0.


class EvenPasses:
    """Counts one model's passes; does nothing for a model that each rank holds whole.

    Every method but `before_backward` is collective.

    Args:
        shards: the model; ``None`` if it is not sharded.
        parallel: all ranks.
        idle_pass: runs the model forward over a micro-batch; a value per token.
        device: where its inputs are.
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
        """In front of `own` passes, without gradients or of one optimizer step."""
        self._own = own
        self._left = 0 if self._shards is None else self._most(own)

    @torch.no_grad()
    def end_forward_only(self) -> None:
        """After passes without gradients: as many more as the busiest rank makes."""
        if self._shards is None:
            return
        for _ in range(self._left - self._own):
            self._idle_pass(idle_micro_batch(self._device))
        self._shards.reshard()

    def before_backward(self) -> None:
        """In front of each backward pass: the last one sums the gradients over ranks."""
        if self._shards is not None:
            self._left -= 1
            self._shards.sum_gradients(self._left == 0)

    def end_step(self) -> None:
        """The passes that the busiest rank makes and this one has no rows for."""
        while self._left > 0:
            idle = self._idle_pass(idle_micro_batch(self._device)).sum() * 0.0
            self.before_backward()
            idle.backward()

    def _most(self, own: int) -> int:
        gathered = self._parallel.all_gather([float(own)], "counting micro-batches")
        return int(max(count for (count,) in gathered))


def idle_micro_batch(device: torch.device) -> MicroBatch:
    """One row of one token after a prompt of one."""
    token = np.zeros(1, np.uint32)
    row = TrainingRow(0, 0, token, token, np.zeros(1, np.float32))
    (plan,) = plan_micro_batches([row.size], range(1), rows_per_micro=1)
    micro_batch = build_micro_batch([row], plan, device)
    assert micro_batch is not None
    return micro_batch
