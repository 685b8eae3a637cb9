"""AdamW over a model's gradients, whole or sharded, with clipping and a learning rate per train
batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from services.trainer.learner.model.host_memory import HostMemory
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.sharded_state import StateFiles
from services.trainer.learner.tensor_layouts import local_part, local_region
from sluice.algorithm.learning_rate import learning_rate_multiplier, resolve_warmup_steps
from sluice.config.schema.actor import OptimConfig
from sluice.errors import CheckpointError

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_PART_BYTES = 128 << 20
"""Bytes of parameters in a part (a larger one is a part alone): AdamW's moments of two parts are on
the device."""


class FlatGradients:
    """Gradients of parameters that each rank holds whole: one buffer per dtype.

    Each parameter's `grad` is a view into it, so one collective sums over ranks and one write
    clears it. `buffers` must be summed over ranks before a step.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.buffers: list[Tensor] = []
        by_dtype = sorted(parameters, key=lambda parameter: str(parameter.dtype))
        for dtype, members in groupby(by_dtype, key=lambda parameter: parameter.dtype):
            self._lay_out(list(members), dtype)

    def _lay_out(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
        size = sum(parameter.numel() for parameter in parameters)
        buffer = torch.zeros(size, dtype=dtype, device=parameters[0].device)
        cursor = 0
        for parameter in parameters:
            view = buffer[cursor : cursor + parameter.numel()]
            parameter.grad = view.view(parameter.shape)
            cursor += parameter.numel()
        self.buffers.append(buffer)

    def complete(self) -> None:
        """Do nothing: every parameter has its view."""

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.zero_()

    def norm(self) -> float:
        """Return the global L2 norm, in float32 for every dtype."""
        squares = [torch.linalg.vector_norm(b, dtype=torch.float32).square() for b in self.buffers]
        return math.sqrt(float(sum(squares)))

    def scale(self, factor: float) -> None:
        for buffer in self.buffers:
            buffer.mul_(factor)


class ShardedGradients:
    """Gradients of sharded parameters. `complete` and `norm` are collective.

    FSDP2 makes a gradient per shard in the last backward pass of a step and sums it over ranks.

    Args:
        parameters: this rank's shards.
        tied: a parameter that another pipeline stage also holds, and the rank with the same shard
            there.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        parallel: ParallelContext,
        tied: tuple[nn.Parameter, int] | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._parallel = parallel
        self._tied = tied
        self.buffers: tuple[Tensor, ...] = ()  # FSDP2 has summed them

    def complete(self) -> None:
        """Set missing gradients to 0; sum the gradients of parameters that stages share."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._tied is not None:
            parameter, twin = self._tied
            assert parameter.grad is not None
            sent = local_part(parameter.grad)
            received = torch.empty_like(sent)
            phase = "summing the gradient of the embedding over the first and the last stage"
            if sent.numel():
                self._parallel.exchange([(sent.contiguous(), twin)], [(received, twin)], phase)
                sent.add_(received)  # bitwise equal on both ranks

    def zero(self) -> None:
        """Drop the gradients; the next backward pass makes new ones."""
        for parameter in self._parameters:
            parameter.grad = None

    def norm(self) -> float:
        """Return the norm: float32 on each rank, float64 over ranks, each element counted once."""
        squares = [
            torch.linalg.vector_norm(gradient, dtype=torch.float32).square() / self._num_holders(p)
            for p, gradient in zip(self._parameters, self._local(), strict=True)
        ]
        # Every rank adds the same numbers in the same order, so all ranks clip by the same factor.
        local_sum = float(sum(squares)) if squares else 0.0
        gathered = self._parallel.all_gather([local_sum], "summing the gradients' norms")
        return math.sqrt(sum(part for (part,) in gathered))

    def scale(self, factor: float) -> None:
        for gradient in self._local():
            gradient.mul_(factor)

    def _num_holders(self, parameter: nn.Parameter) -> int:
        """Return how many ranks hold each element of a parameter; a mesh has all ranks of a
        stage."""
        if not isinstance(parameter, DTensor):
            return self._parallel.world_size
        mesh = parameter.device_mesh
        cuts = [
            n
            for n, placement in zip(mesh.shape, parameter.placements, strict=True)
            if not placement.is_replicate()
        ]
        copies = mesh.size() // math.prod(cuts)
        return 2 * copies if self._tied is not None and parameter is self._tied[0] else copies

    def _local(self) -> list[Tensor]:
        gradients = (parameter.grad for parameter in self._parameters)
        return [g.to_local() if isinstance(g, DTensor) else g for g in gradients if g is not None]


Gradients: TypeAlias = FlatGradients | ShardedGradients


class _OwnPartsAdamW(torch.optim.AdamW):
    """AdamW on this rank's parts of sharded parameters, as plain tensors.

    The update is elementwise, so its bits equal those of torch. But torch would first examine the
    sharding of each tensor, in time proportional to their number: for 400 parameters a second
    before the first step and 6 ms in each later one.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        is_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        parameters, gradients, *_ = lists
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if isinstance(parameter, DTensor):
                assert isinstance(gradient, DTensor)
                assert gradient.placements == parameter.placements
        for tensors in lists:
            tensors[:] = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return is_complex


class ModelOptimizer:
    """AdamW, stepped once per mini-batch.

    Args:
        named_parameters: trained parameters by name, tied ones once. Frozen ones are left out and
            get neither moments nor gradients.
        total_steps: train batches of the run: the schedule's length, unless `config` sets it.
        gradients: gradients of sharded parameters; by default flat buffers of whole ones.
        host_share: least share of the moments to keep in host memory. While a step updates one part
            of the parameters, the moments of the next part move to the device and those of the
            previous part leave it.

    Attributes:
        rate_factor: multiplies the scheduled learning rate; rollbacks lower it.
    """

    def __init__(
        self,
        named_parameters: Mapping[str, nn.Parameter],
        config: OptimConfig,
        total_steps: int,
        gradients: Gradients | None = None,
        *,
        host_share: float = 0.0,
    ) -> None:
        self._named = dict(named_parameters)
        self._config = config
        configured_steps = config.total_training_steps
        self._total_steps = configured_steps if configured_steps > 0 else total_steps
        self._warmup_steps = resolve_warmup_steps(
            config.lr_warmup_steps, config.lr_warmup_steps_ratio, self._total_steps
        )
        self.gradients: Gradients = gradients or FlatGradients(list(self._named.values()))
        self._host = HostMemory()
        self._streams: tuple[Any, Any] | None = None
        self._offloaded, on_device = _split_by_share(self._named.values(), host_share)
        groups = [*_equal_parts(self._offloaded), *([on_device] if on_device else [])]
        self._adamw = _OwnPartsAdamW(
            [{"params": group} for group in groups],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,  # fewer passes over memory, also on the CPU
        )
        self.skipped_updates = 0
        self.rate_factor = 1.0

    def begin_batch(self, schedule_step: int) -> float:
        """Set the learning rate for train batch `schedule_step` (0-based) and return it."""
        rate = (
            self.rate_factor
            * self._config.lr
            * learning_rate_multiplier(
                schedule_step,
                schedule=self._config.lr_scheduler_type,
                warmup_steps=self._warmup_steps,
                total_steps=self._total_steps,
                min_lr_ratio=self._config.min_lr_ratio,
                num_cycles=self._config.num_cycles,
            )
        )
        for group in self._adamw.param_groups:
            group["lr"] = rate
        return rate

    def step(self) -> float:
        """Clip and apply the accumulated gradients, then clear them.

        Returns:
            the gradient norm before clipping. If it is not finite, no weight changes, and
            `skipped_updates` counts the step.
        """
        self.gradients.complete()
        norm = self.gradients.norm()
        if math.isfinite(norm):
            if norm > self._config.clip_grad:
                # The same epsilon as torch's clip_grad_norm_.
                self.gradients.scale(self._config.clip_grad / (norm + 1e-6))
            self._update()
        else:  # one bad batch must not destroy the weights
            self.skipped_updates += 1
            logger.warning(
                "optimizer step skipped: gradient norm is %s (%d skipped so far)",
                norm,
                self.skipped_updates,
            )
        self.gradients.zero()
        return norm

    def _update(self) -> None:
        if not self._offloaded:
            self._adamw.step()
            return
        groups, offloaded = self._adamw.param_groups, set(self._offloaded)
        device = torch.get_device_module(self._offloaded[0].device)
        # Always the same two streams: freed memory belongs to the stream of its allocation.
        self._streams = self._streams or (device.Stream(), device.Stream())
        (inward, outward), moved = self._streams, device.Event()

        def bring_back(part: int) -> None:
            with device.stream(inward):
                for group in groups[part : part + 1]:
                    self._host.bring_back(self._moments(group["params"]), wait=False)

        try:
            bring_back(0)
            for number, group in enumerate(groups):
                device.current_stream().wait_stream(inward)
                self._adamw.param_groups = [group]
                self._adamw.step()
                # The next part arrives while this one leaves; the previous one has left.
                moved.synchronize()
                bring_back(number + 1)
                outward.wait_stream(device.current_stream())
                with device.stream(outward):
                    self._host.move_out(
                        self._moments(p for p in group["params"] if p in offloaded), wait=False
                    )
                    moved.record()
        finally:
            device.synchronize()  # from here on the copies on the host may be read
            self._adamw.param_groups = groups

    def _moments(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return the tensors of AdamW's state that have their parameter's shape."""
        states = (self._adamw.state[p] for p in parameters if p in self._adamw.state)
        return [state[name] for state in states for name in MOMENTS if name != "step"]

    def state_tensors(self) -> dict[str, Tensor]:
        """Return AdamW's moments and counts as ``<parameter name>.<moment>``; empty before the
        first step.

        For a sharded parameter they are this rank's part. Offloaded moments are read from the host.
        The next step changes all of them.
        """
        return {
            f"{name}.{moment}": self._host.read(self._adamw.state[parameter][moment])
            for name, parameter in self._named.items()
            for moment in MOMENTS
            if parameter in self._adamw.state
        }

    def load_state(self, state: StateFiles, elsewhere: Collection[str] = ()) -> None:
        """Load this rank's part of the tensors that `state_tensors` returned.

        Args:
            elsewhere: names of parameters that only other ranks train.

        Raises:
            CheckpointError: a parameter's state is missing, of another shape or unknown.
        """
        names = {*self._named, *elsewhere}
        expected = {f"{name}.{moment}" for name in names for moment in MOMENTS}
        if state.names and (wrong := expected.symmetric_difference(state.names)):
            raise CheckpointError(
                f"optimizer state of another model: {len(wrong)} names differ, first "
                f"{min(wrong)}; resume with the model that was trained"
            )
        self._adamw.state.clear()
        self._host.forget()
        offloaded = set(self._offloaded)
        for name, parameter in self._named.items() if state.names else ():
            self._adamw.state[parameter] = {
                moment: self._load(f"{name}.{moment}", state, parameter, moment)
                for moment in MOMENTS
            }
            if parameter in offloaded:  # one by one: the device may not have memory for all
                self._host.move_out(self._moments([parameter]))

    def _load(self, key: str, state: StateFiles, parameter: nn.Parameter, moment: str) -> Tensor:
        shape, dtype = state.spec(key)
        if moment == "step":
            loaded = torch.zeros((), dtype=dtype, device=parameter.device)
        elif shape == parameter.shape and dtype.is_floating_point:
            # The run that wrote it may have had another model_dtype.
            loaded = torch.zeros_like(parameter, requires_grad=False)
        else:
            raise CheckpointError(
                f"optimizer state {key} has shape {tuple(shape)} and {dtype}, the model "
                f"{tuple(parameter.shape)}; resume with the model that was trained"
            )
        state.fill(local_part(loaded), key, local_region(loaded)[0])
        return loaded


def _equal_parts(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Cut the parameters, in their order, into lists of about equal size on this rank."""
    parts: list[list[nn.Parameter]] = []
    bytes_left = 0
    for parameter in parameters:
        size = local_part(parameter).nbytes
        if not parts or bytes_left < size:
            parts.append([])
            bytes_left = _PART_BYTES
        parts[-1].append(parameter)
        bytes_left -= size
    return parts


def _split_by_share(
    parameters: Iterable[nn.Parameter], share: float
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the first parameters, with at least this share of the rank's bytes, and the rest."""
    ordered = list(parameters)
    sizes = [local_part(parameter).nbytes for parameter in ordered]
    least_bytes, number = share * sum(sizes), 0
    while number < len(ordered) and sum(sizes[:number]) < least_bytes:
        number += 1
    return ordered[:number], ordered[number:]
