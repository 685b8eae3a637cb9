"""Shard one model's weights over ranks (FSDP2), sum their gradients, and let every rank make the
same number of passes.
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
from services.trainer.learner.model.image_pass import gather_for_images
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

    `parameters` are this rank's shards by the model's names, tied ones once. With `sums_once`, only
    the last pass of a mini-batch sums gradients over ranks.
    """

    model: PreTrainedModel
    mesh: DeviceMesh
    parameters: Mapping[str, nn.Parameter]
    sums_once: bool

    @property
    def num_copies(self) -> int:
        """Return how many ranks hold the same shard."""
        return self.mesh.size(0) if self.mesh.ndim > 1 else 1

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
    model: PreTrainedModel, mesh: DeviceMesh, *, reshard_after_forward: bool, sums_once: bool
) -> Shards:
    """Shard a whole model in place; it must be equal on all ranks. Collective.

    One unit is a layer: a module of a class that the model family lists as not to be split.
    The rest (embedding, head, last norm) is one more unit, whole from forward to backward.

    Args:
        model: on any device; moves to the mesh's device layer by layer.
        mesh: dimensions ``copy`` (if there are several copies) and ``shard``.
        reshard_after_forward: gather a layer again for its backward, instead of keeping it whole.
        sums_once: see `Shards`.
    """
    # None is FSDP2's default: reshard all units but the outermost.
    kept_whole: bool | None = None if reshard_after_forward else False
    layers = set(model._no_split_modules or ())
    for module in [m for m in model.modules() if type(m).__name__ in layers]:
        fully_shard(module, mesh=mesh, reshard_after_forward=kept_whole)
    # After its layers: the outer unit takes the parameters that are left.
    fully_shard(model, mesh=mesh, reshard_after_forward=kept_whole)
    for sharded in _sharded_modules(model):
        # Each loss is already divided by global counts: gradients are added up, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    if model.config.model_type in FAMILIES:
        gather_for_images(model)
    return Shards(model, mesh, dict(model.named_parameters()), sums_once)


def shard_size(fsdp_size: int, world_size: int, key: str) -> int:
    """Return how many ranks share one copy of the model: all for a size below 1 or too large.

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
    """Copy `whole`, or this rank's shard of it, into `target` of the same global shape."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    mesh = target.device_mesh
    # Shards are along the first dimension of a tensor, and along the last one of the mesh.
    start, stop = shard_rows(
        whole.shape[0], mesh.size(mesh.ndim - 1), mesh.get_local_rank(SHARD_DIM)
    )
    target.to_local().copy_(whole[start:stop])


def shard_rows(rows: int, shards: int, index: int) -> tuple[int, int]:
    """Return a shard's first row and the one after its last, as FSDP2 cuts: ``ceil(rows / shards)``
    rows each, the last shards shorter or empty.
    """
    length = -(-rows // shards)
    return min(rows, index * length), min(rows, (index + 1) * length)


def plain_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the model's class in transformers; sharding replaces it by a derived class."""
    family: type[PreTrainedModel] = type(model)
    return family.__mro__[2] if isinstance(model, FSDPModule) else family


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class Gradients(Protocol):
    """The gradients of one optimizer."""

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Return the buffers that must still be summed over ranks before a step."""
        ...

    def complete(self) -> None:
        """Give every parameter a gradient, 0 where no pass left one."""
        ...

    def zero(self) -> None:
        """Set all gradients to 0."""
        ...

    def norm(self) -> float:
        """Return the global L2 norm over all ranks' parts, the same bits on each rank."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        ...


class ShardedGradients:
    """Gradients of sharded parameters. `norm` is collective.

    FSDP2 makes a gradient per shard in the last backward pass of a step and sums it over ranks.

    Args:
        parameters: sharded ones.
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
        """Set 0 for parameters that no backward pass reached."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def zero(self) -> None:
        """Drop the gradients; the next backward pass makes new ones."""
        for parameter in self._parameters:
            parameter.grad = None

    def norm(self) -> float:
        """Return the norm: float32 on each rank, float64 over ranks, each shard counted once."""
        squares = [torch.linalg.vector_norm(g, dtype=torch.float32).square() for g in self._local()]
        # Every rank adds the same numbers in the same order, so all ranks clip alike.
        own = float(sum(squares)) if squares else 0.0
        gathered = self._parallel.all_gather([own], "summing the gradients' norms")
        return math.sqrt(sum(part for (part,) in gathered) / self._num_copies)

    def scale(self, factor: float) -> None:
        """Multiply this rank's shards."""
        for gradient in self._local():
            gradient.mul_(factor)

    def _local(self) -> list[Tensor]:
        gradients = (parameter.grad for parameter in self._parameters)
        return [g.to_local() if isinstance(g, DTensor) else g for g in gradients if g is not None]


class EvenPasses:
    """The same number of passes of one sharded model on every rank.

    Each pass gathers the layers' weights from all ranks, so all ranks must make equally many. A
    rank with fewer micro-batches than the busiest one adds idle passes: over a made-up row, with
    gradient 0. Does nothing for a model that each rank holds whole.

    Every method but `before_backward` is collective.

    Args:
        shards: the model; ``None`` if it is not sharded.
        parallel: all ranks.
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
        """Prepare for `own` passes: either without gradients, or those of one optimizer step."""
        # `_left` counts down to the pass that sums gradients; the busiest rank sets the number.
        self._own = own
        self._left = 0 if self._shards is None else self._most(own)

    @torch.no_grad()
    def end_forward_only(self) -> None:
        """After passes without gradients: add passes up to the busiest rank's number."""
        if self._shards is None:
            return
        for _ in range(self._left - self._own):
            self._idle_pass(idle_micro_batch(self._device))
        self._shards.reshard()

    def before_backward(self) -> None:
        """Before each backward pass: let only the last one sum gradients over ranks."""
        if self._shards is not None:
            self._left -= 1
            self._shards.sum_gradients(self._left == 0)

    def end_step(self) -> None:
        """After the passes of a step: add passes up to the busiest rank's number."""
        while self._left > 0:
            # Times 0: the pass takes part in the sum over ranks and adds nothing to it.
            idle = self._idle_pass(idle_micro_batch(self._device)).sum() * 0.0
            self.before_backward()
            idle.backward()

    def _most(self, own: int) -> int:
        gathered = self._parallel.all_gather([float(own)], "counting micro-batches")
        return int(max(count for (count,) in gathered))


def idle_micro_batch(device: torch.device) -> MicroBatch:
    """Return a micro-batch of one row: a prompt of one token and a response of one token."""
    token = np.zeros(1, np.uint32)
    row = TrainingRow(0, 0, token, token, np.zeros(1, np.float32))
    (plan,) = plan_micro_batches([row.size], range(1), rows_per_micro=1)
    micro_batch = build_micro_batch([row], plan, device)
    assert micro_batch is not None
    return micro_batch
