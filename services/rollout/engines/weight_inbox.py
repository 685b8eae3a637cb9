"""Receive weight updates, and exchange the weights of a model between two decode steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from services.rollout.engines.causal_lm import CausalLM
from services.rollout.engines.protocol import StagedVersion
from sluice.concurrency.waits import waiting_for
from sluice.device.protocol import Device
from sluice.errors import WeightSyncError
from sluice.types import TensorSpec, TransferGroupSpec
from sluice.weights.delta import changed_positions
from sluice.weights.receiver import StagedWeights, WeightReceiver

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


_T = TypeVar("_T")
_SENDER = "trainer"


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """Where a model keeps a tensor, and in which dtype."""

    device: torch.device
    dtype: torch.dtype

    def can_borrow(self, tensor: torch.Tensor) -> bool:
        """Return whether the model can compute from this memory instead of its own."""
        return (tensor.device, tensor.dtype) == (self.device, self.dtype) and tensor.is_contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class ChangedElements:
    """Where a tensor differs from the one before, and what is there.

    Attributes:
        positions: int64 ``[changed]``, in the flattened tensor; on the model's device.
        values: ``[changed]``, in the model's dtype; on the model's device.
    """

    positions: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class NewWeights:
    """A version for the model to take.

    Attributes:
        tensors: all of the model's layout, by checkpoint name, on the CPU.
        changes: known changes of tensors that would have to be copied, by name.
        base_digest: of the weights that `changes` start from.
    """

    tensors: Mapping[str, torch.Tensor]
    changes: Mapping[str, ChangedElements] = field(default_factory=dict)
    base_digest: str = ""


class LiveWeights:
    """The parameters of one model, used in the thread that computes with them.

    Create it after the model's decoder, which may replace parameters. The first tied tensor of the
    layout stands for the others, which point to the same memory.
    """

    def __init__(self, language_model: CausalLM) -> None:
        self._layout = language_model.layout
        self._known = language_model.model.state_dict().keys()
        names = [spec.name for spec in self._layout]
        self._parameters = _parameters(language_model.model, names)
        self.places: Mapping[str, TensorPlacement] = {
            name: TensorPlacement(parameters[0].device, parameters[0].dtype)
            for name, parameters in self._parameters.items()
        }
        self._borrowed: set[str] = set()

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise WeightSyncError if a tensor is missing, unknown or of another shape.

        A tied tensor's other name may come along.
        """
        for spec in self._layout:
            if spec.name not in tensors:
                raise _mismatch(spec.name, "is missing")
            shape = tuple(tensors[spec.name].shape)
            if shape != spec.shape:
                raise _mismatch(spec.name, f"has shape {shape}, the model's is {spec.shape}")
        for name in tensors:
            if name not in self._known:
                raise _mismatch(name, "is unknown to the model")

    def take(self, new: NewWeights, serving_digest: str) -> None:
        """Compute with `new` from now on; `check` it first.

        After an error the weights are a mixture of versions: do not use the model any more.

        Args:
            new: the model may keep its memory. Do not write to it before the next weights are
                taken.
            serving_digest: of what the model holds.
        """
        changes = new.changes if new.base_digest == serving_digest else {}
        for name, parameters in self._parameters.items():
            tensor, place = new.tensors[name], self.places[name]
            # Three ways, the cheapest first: use the received memory, write what changed, copy.
            if place.can_borrow(tensor):
                _point(parameters, tensor)
                self._borrowed.add(name)
            elif name in self._borrowed:
                # Staging memory goes back to the receiver: the parameter needs memory of its own.
                _point(parameters, tensor.to(place.device, place.dtype, copy=True))
                self._borrowed.remove(name)
            elif name in changes:
                flat = parameters[0].data.view(-1)
                flat.index_copy_(0, changes[name].positions, changes[name].values)
            else:
                parameters[0].data.copy_(tensor)


def _point(parameters: list[torch.Tensor], memory: torch.Tensor) -> None:
    for parameter in parameters:
        parameter.data = memory


def _parameters(model: PreTrainedModel, names: list[str]) -> dict[str, list[torch.Tensor]]:
    every: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    every |= dict(model.named_buffers(remove_duplicate=False))
    by_place: dict[tuple[int, torch.Size], list[torch.Tensor]] = {}
    for tensor in every.values():
        by_place.setdefault((tensor.data_ptr(), tensor.shape), []).append(tensor)
    found = {}
    for name in names:
        own = every[name]
        tied = by_place[own.data_ptr(), own.shape] if own.numel() else []
        found[name] = [own, *{id(other): other for other in tied if other is not own}.values()]
    return found


def _mismatch(name: str, detail: str) -> WeightSyncError:
    return WeightSyncError(
        "trainer", "loading weights", f"tensor {name} {detail}; give both ends the same model"
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    received: StagedWeights
    weights: NewWeights


class WeightInbox:
    """One replica's membership in transfer groups, and what it has staged.

    Blocking calls run in a thread of their own. Leaving a group is possible at any moment.

    Args:
        device: of the wire.
        layout: the model's weights.
        places: how the model keeps each of them.
    """

    def __init__(
        self, device: Device, layout: Sequence[TensorSpec], places: Mapping[str, TensorPlacement]
    ) -> None:
        self._places = places
        self._receiver = WeightReceiver(device, {spec.name: spec.shape for spec in layout})
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-inbox")
        self._epoch: int | None = None
        self._staged: _Staged | None = None

    async def _run(self, call: Callable[[], _T], phase: str) -> _T:
        try:
            with waiting_for(_SENDER, phase):
                return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except asyncio.CancelledError:
            # The thread cannot be interrupted; without the group its call fails soon.
            self._receiver.abort(f"the call was cancelled while {phase}")
            raise

    async def join(self, spec: TransferGroupSpec) -> str:
        """Join an epoch, leaving any earlier one; return the plan's digest."""
        # A call of an earlier epoch may still block the thread: without its group it ends.
        self._receiver.abort(f"epoch {spec.epoch} begins")
        self._epoch, self._staged = spec.epoch, None

        def join_unless_superseded() -> str:
            check_epoch(spec.epoch, self._epoch, "joining")
            return self._receiver.join(spec)

        return await self._run(join_unless_superseded, f"joining epoch {spec.epoch}")

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        """Receive a version into staging memory."""
        check_epoch(epoch, self._epoch, f"staging version {version}")
        self._staged = None
        staged = await self._run(lambda: self._stage(version), f"staging version {version}")
        check_epoch(epoch, self._epoch, f"staging version {version}")
        self._staged, received = staged, staged.received
        return StagedVersion(version, received.digest, received.received_bytes, received.seconds)

    def _stage(self, version: int) -> _Staged:
        received = self._receiver.stage(version)
        # While the model still computes with the base, the changes are found here, in the thread.
        base = self._receiver.base_of(received)
        if base is None or received.base is None:
            return _Staged(received, NewWeights(received.tensors))
        changes = {
            name: _changed(base.tensors[name], received.tensors[name], place)
            for name, place in self._places.items()
            if not place.can_borrow(received.tensors[name])
        }
        return _Staged(received, NewWeights(received.tensors, changes, received.base.digest))

    def staged(self, epoch: int, version: int, digest: str) -> NewWeights:
        """Return what was staged under that epoch, version and digest.

        Raises:
            WeightSyncError: nothing is staged, or something else.
        """
        check_epoch(epoch, self._epoch, f"committing version {version}")
        check_staged(None if self._staged is None else self._staged.received, version, digest)
        assert self._staged is not None
        return self._staged.weights

    def release(self, weights: NewWeights) -> None:
        """Give staging memory back once its tensors serve.

        It stays as long as the model computes from it, or if the sender asked for that: the next
        update may carry only changes to it.
        """
        staged = self._staged
        if staged is None or staged.weights is not weights:
            return  # the epoch was left during the swap; the memory is the model's only
        self._staged = None
        tensors = weights.tensors
        lent = any(place.can_borrow(tensors[name]) for name, place in self._places.items())
        self._receiver.keep(staged.received, lent=lent)

    def abort(self, epoch: int, reason: str) -> None:
        """Discard what is staged and leave the epoch; do nothing for another epoch."""
        if epoch == self._epoch:
            self._epoch, self._staged = None, None
            self._receiver.abort(reason)

    def close(self) -> None:
        """Leave the group and let the thread end."""
        self._epoch, self._staged = None, None
        self._receiver.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def check_epoch(epoch: int, joined: int | None, phase: str) -> None:
    """Raise WeightSyncError unless `epoch` is the one that is `joined` here."""
    if epoch != joined:
        raise WeightSyncError(
            _SENDER, phase, f"epoch {epoch} is not joined here; the epoch is {joined}"
        )


def check_staged(staged: StagedWeights | None, version: int, digest: str) -> StagedWeights:
    """Return what is staged.

    Raises:
        WeightSyncError: nothing is staged, or another version or digest.
    """
    phase = f"committing version {version}"
    if staged is None or staged.version != version:
        found = "nothing" if staged is None else f"version {staged.version}"
        raise WeightSyncError(_SENDER, phase, f"{found} is staged here; stage it first")
    if staged.digest != digest:
        raise WeightSyncError(
            _SENDER, phase, f"the digest of what is staged here is {staged.digest}, not {digest}"
        )
    return staged


def _changed(old: torch.Tensor, new: torch.Tensor, place: TensorPlacement) -> ChangedElements:
    positions = changed_positions(old, new)
    values = new.view(-1)[positions].to(place.device, place.dtype)
    return ChangedElements(positions.to(place.device), values)
