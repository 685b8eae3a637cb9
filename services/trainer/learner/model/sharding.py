"""Shard one model's weights over ranks (FSDP2), gather them whole on rank 0, and let every rank
make the same number of passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from services.trainer.learner.batch.micro_batch import MicroBatch, TrainingRow, build_micro_batch
from services.trainer.learner.model.forward import gather_in_passes
from services.trainer.learner.model.weight_files import WeightFiles
from services.trainer.learner.ranks import COPY_DIM, SHARD_DIM, DataParallel
from services.trainer.learner.sequence_share import SequenceShare
from sluice.algorithm.packing import plan_micro_batches
from sluice.concurrency.waits import advance
from sluice.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

BUCKET_BYTES = 64 << 20


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
    model: PreTrainedModel,
    mesh: DeviceMesh,
    files: WeightFiles | None = None,
    *,
    dtype: torch.dtype,
    reshard_after_forward: bool,
    sums_once: bool,
    prefetches: bool = False,
) -> Shards:
    """Shard a whole model in place; it must be equal on all ranks. Collective.

    One unit is a layer: a module of a class that the model family lists as not to be split.
    The rest (embedding, head, last norm) is one more unit, whole from forward to backward.

    Args:
        model: on any device; moves to the mesh's device layer by layer.
        mesh: dimensions ``copy`` (if there are several copies) and ``shard``.
        files: the weights, if they are not read yet: each rank reads the rows of its shards.
        dtype: of gathered weights and activations; gradients are summed in float32.
        reshard_after_forward: gather a layer again for its backward, instead of keeping it whole.
        sums_once: see `Shards`.
        prefetches: start to gather the next layer when a layer's forward pass begins.
    """
    # Casting inputs would round what a model computes in float32 (rotations of image positions),
    # and copy the layout for each layer, with its masks.
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # None is FSDP2's default: reshard all units but the outermost.
    kept_whole: bool | None = None if reshard_after_forward else False
    layers = set(model._no_split_modules or ())
    names = {id(one): name for name, one in model.named_parameters()}

    def read(unit: nn.Module) -> None:
        if files is not None:
            for parameter in unit.parameters():
                if (name := names.pop(id(parameter), None)) is not None:
                    start, stop = own_rows(parameter.shape[0], mesh)
                    files.fill(parameter.detach()[start:stop], name, start)

    units = [m for m in model.modules() if type(m).__name__ in layers]
    for module in units:
        read(module)
        fully_shard(module, mesh=mesh, reshard_after_forward=kept_whole, mp_policy=precision)
    # After its layers: the outer unit takes the parameters that are left.
    read(model)
    fully_shard(model, mesh=mesh, reshard_after_forward=kept_whole, mp_policy=precision)
    for unit, following in pairwise(units) if prefetches else ():
        assert isinstance(unit, FSDPModule)
        assert isinstance(following, FSDPModule)
        unit.set_modules_to_forward_prefetch([following])
    for sharded in _sharded_modules(model):
        # Each loss is already divided by global counts: gradients are added up, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    gather_in_passes(model, mesh.size())
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
    start, stop = own_rows(whole.shape[0], target.device_mesh)
    target.to_local().copy_(whole[start:stop])


def fill_shards(parameters: Mapping[str, Tensor], files: WeightFiles) -> None:
    """Read each parameter, or this rank's shard of it."""
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            mesh, rows = parameter.device_mesh, parameter.shape[0]
            start, _ = own_rows(rows, mesh)
            files.fill(parameter.to_local().detach(), name, start)
        else:
            files.fill(parameter.detach(), name, 0)


def own_rows(rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's shard: of the first dimension, over the mesh's last."""
    return shard_rows(rows, mesh.size(mesh.ndim - 1), mesh.get_local_rank(SHARD_DIM))


def shard_rows(rows: int, shards: int, index: int) -> tuple[int, int]:
    """Return a shard's first row and the one after its last, as FSDP2 cuts: ``ceil(rows / shards)``
    rows each, the last shards shorter or empty.
    """
    length = -(-rows // shards)
    return min(rows, index * length), min(rows, (index + 1) * length)


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

    @torch.no_grad()
    def end_forward_only(self) -> None:
        """After passes without gradients: add passes up to the busiest rank's number."""
        if self._shards is None:
            return
        for _ in range(self._left - self._own):
            self._idle_pass(idle_micro_batch(self._device, self._parallel.share))
        self._shards.reshard()

    def before_backward(self) -> None:
        """Before each backward pass: let only the last one sum gradients over ranks."""
        if self._shards is not None:
            # Earlier passes keep whole gradients: summing once per step saves communication.
            self._left -= 1
            self._shards.sum_gradients(self._left == 0)

    def end_step(self) -> None:
        """After the passes of a step: add passes up to the busiest rank's number."""
        while self._left > 0:
            # Times 0: the pass takes part in the sum over ranks and adds nothing to it.
            idle = self._idle_pass(idle_micro_batch(self._device, self._parallel.share)).sum() * 0.0
            self.before_backward()
            idle.backward()

    def _most(self, own: int) -> int:
        gathered = self._parallel.all_gather([float(own)], "counting micro-batches")
        return int(max(count for (count,) in gathered))


def idle_micro_batch(device: torch.device, share: SequenceShare | None = None) -> MicroBatch:
    """Return a micro-batch of one row: a prompt of one token and a response of one token."""
    token = np.zeros(1, np.uint32)
    row = TrainingRow(0, 0, token, token, np.zeros(1, np.float32))
    (plan,) = plan_micro_batches([row.size], range(1), rows_per_micro=1)
    micro_batch = build_micro_batch([row], plan, device, share=share)
    assert micro_batch is not None
    return micro_batch


@dataclass(frozen=True, slots=True, eq=False)
class _ShardPart:
    """One rank's shard of a tensor; `dtype` is its dtype on the wire."""

    name: str
    tensor: DTensor
    dtype: torch.dtype

    @property
    def num_shards(self) -> int:
        mesh = self.tensor.device_mesh
        return mesh.size(mesh.ndim - 1)

    @property
    def rows(self) -> int:
        """Return the rows of the longest shard."""
        return -(-self.tensor.shape[0] // self.num_shards)

    @property
    def numel(self) -> int:
        """Return the elements of the longest shard."""
        return self.rows * math.prod(self.tensor.shape[1:])

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole tensor, with padding."""
        return self.num_shards * self.numel * self.dtype.itemsize

    def whole(self, shards: Tensor) -> Tensor:
        """Return the tensor from ``[shards, numel]``, a view if that is contiguous."""
        rows = shards.reshape(self.num_shards * self.rows, *self.tensor.shape[1:])
        return rows[: self.tensor.shape[0]]


@torch.no_grad()
def gather_whole(
    named_tensors: Iterable[tuple[str, Tensor]],
    parallel: DataParallel,
    phase: str,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield each whole tensor on rank 0, and nothing on the others. Collective to its end.

    Args:
        named_tensors: sharded or not, in the same order on every rank.
        parallel: all ranks.
        phase: named in errors.
        dtype: dtype on the wire of sharded floating-point tensors.
        bucket_bytes: bytes of whole tensors per collective, unless one tensor is larger.

    Raises:
        DeadlineError: a rank did not take part in time.
        PeerError: a rank failed.
    """
    bucket: list[_ShardPart] = []
    for name, tensor in named_tensors:
        if not isinstance(tensor, DTensor):
            if parallel.rank == 0:
                yield name, tensor.detach()
            continue
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        part = _ShardPart(name, tensor, wanted)
        size = sum(one.num_bytes for one in bucket) + part.num_bytes
        if bucket and (size > bucket_bytes or bucket[0].dtype != part.dtype):
            yield from _gather(bucket, parallel, phase)
            bucket = []
        bucket.append(part)
    if bucket:
        yield from _gather(bucket, parallel, phase)


def _gather(
    bucket: list[_ShardPart], parallel: DataParallel, phase: str
) -> Iterator[tuple[str, Tensor]]:
    advance()
    mesh = bucket[0].tensor.device_mesh
    if mesh.ndim > 1:
        # Only the first copy sends. The other copies wait here for each bucket: the deadline of the
        # next command is too short for the whole gather.
        parallel.all_gather([0.0], phase)
        if mesh.get_local_rank(COPY_DIM) != 0:
            return  # rank 0 is in the first copy
    ends = list(accumulate(part.numel for part in bucket))
    local = [part.tensor.to_local() for part in bucket]
    # Shards are padded to the longest, so that all ranks send equally many elements.
    own = torch.zeros(ends[-1], dtype=bucket[0].dtype, device=local[0].device)
    for shard, part, end in zip(local, bucket, ends, strict=True):
        start = end - part.numel
        own[start : start + shard.numel()].copy_(shard.flatten())
    shards = parallel.gather_to_first(own, mesh.get_group(SHARD_DIM), phase)
    if shards is None:
        return
    for part, end in zip(bucket, ends, strict=True):
        yield part.name, part.whole(shards[:, end - part.numel : end])
