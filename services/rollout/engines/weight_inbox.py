"""Receive weight updates, and swap the weights of a model between two decode steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.rollout.engines.causal_lm import CausalLM
from services.rollout.engines.protocol import StagedVersion
from sluice.concurrency.threads import OwnerThread
from sluice.device.protocol import Device
from sluice.errors import WeightSyncError
from sluice.types import TransferGroupSpec
from sluice.weight_share import WHOLE, WeightShare
from sluice.weights.adapters import merge_adapters
from sluice.weights.receiver import StagedWeights, WeightReceiver

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


_SENDER = "trainer"
_CLOSE_TIMEOUT_S = 10.0


class LiveWeights:
    """The parameters of one model, used in the thread that computes with them.

    Create it after the model's decoder, which may replace parameters. The first tied tensor of the
    layout represents the others, which point to the same memory.
    """

    def __init__(self, language_model: CausalLM) -> None:
        self._layout = language_model.layout.tensors
        self._weight_names = language_model.model.state_dict().keys()
        names = [spec.name for spec in self._layout]
        self._parameters = _parameters(language_model.model, names)
        self._borrowed: set[str] = set()

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise WeightSyncError if a tensor is missing, unknown or of another shape.

        Other names of tied tensors may be present.
        """
        for spec in self._layout:
            if spec.name not in tensors:
                raise _mismatch(spec.name, "is missing")
            shape = tuple(tensors[spec.name].shape)
            if shape != spec.shape:
                raise _mismatch(spec.name, f"has shape {shape}, the model's is {spec.shape}")
        for name in tensors:
            if name not in self._weight_names:
                raise _mismatch(name, "is unknown to the model")

    def borrows(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the model would keep the memory of any of these tensors."""
        return any(self._can_borrow(name, tensors[name]) for name in self._parameters)

    def _can_borrow(self, name: str, tensor: torch.Tensor) -> bool:
        parameter = self._parameters[name][0]
        return (tensor.device, tensor.dtype) == (
            parameter.device,
            parameter.dtype,
        ) and tensor.is_contiguous()

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compute with `tensors` from now on; `check` them first.

        After an error the weights are a mixture of versions: do not use the model any more.

        Args:
            tensors: all of the layout, by checkpoint name. The model may keep their memory. Do not
                write to it before the next weights are taken.
        """
        for name, parameters in self._parameters.items():
            tensor, parameter = tensors[name], parameters[0]
            # The cheapest way first: use the received memory, else copy.
            if self._can_borrow(name, tensor):
                _use_memory(parameters, tensor)
                self._borrowed.add(name)
            elif name in self._borrowed:
                # Staging memory goes back to the receiver: the parameter needs memory of its own.
                _use_memory(parameters, tensor.to(parameter.device, parameter.dtype, copy=True))
                self._borrowed.remove(name)
            else:
                parameters[0].data.copy_(tensor)


def _use_memory(parameters: list[torch.Tensor], memory: torch.Tensor) -> None:
    for parameter in parameters:
        parameter.data = memory


def _parameters(model: PreTrainedModel, names: list[str]) -> dict[str, list[torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    by_place: dict[tuple[int, torch.Size], list[torch.Tensor]] = {}
    for tensor in tensors.values():
        by_place.setdefault((tensor.data_ptr(), tensor.shape), []).append(tensor)
    parameters = {}
    for name in names:
        parameter = tensors[name]
        tied = by_place[parameter.data_ptr(), parameter.shape] if parameter.numel() else []
        parameters[name] = [
            parameter,
            *{id(twin): twin for twin in tied if twin is not parameter}.values(),
        ]
    return parameters


def _mismatch(name: str, detail: str) -> WeightSyncError:
    return WeightSyncError(
        "trainer", "loading weights", f"tensor {name} {detail}; give both ends the same model"
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    epoch: int | None
    received: StagedWeights
    weights: Mapping[str, torch.Tensor]


class WeightInbox:
    """A receiver's membership in transfer groups, and its staged weights.

    One thread calls the methods, and none blocks: waits for the sender run in a separate thread.
    Leaving a group is possible at any time; a waiting call then fails soon.

    Args:
        device: device of the received tensors.
        model: the one that may borrow received memory, if it is in this process.
        share: the part of the weights that is received, for an engine that copies it out and
            merges adapters itself; ``None``: all of them are, and adapters are merged here.
        forming: entered while groups are formed.
    """

    def __init__(
        self,
        device: Device,
        model: LiveWeights | None = None,
        share: WeightShare | None = None,
        forming: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._model = model
        self._forming = forming
        self._merges = share is None
        self._receiver = WeightReceiver(device, share or WHOLE, in_place=model is None)
        self._thread = OwnerThread("weight-inbox")
        self._staged: _Staged | None = None
        self._was_left = threading.Event()
        self.epoch: int | None = None

    def join(self, spec: TransferGroupSpec) -> Future[str]:
        """Begin to join an epoch, leaving any earlier one; the result is the plan's digest."""
        # A call of an earlier epoch may still block the thread: without its group it ends.
        self.leave(f"epoch {spec.epoch} begins")
        self.epoch = spec.epoch
        was_left = self._was_left = threading.Event()

        def join_unless_superseded() -> str:
            check_epoch(spec.epoch, self.epoch, "joining")
            with self._forming():
                return self._receiver.join(spec, was_left)

        return self._thread.submit(join_unless_superseded)

    def stage(self, epoch: int | None, version: int) -> Future[StagedVersion]:
        """Begin to receive a version into staging memory. Raises WeightSyncError as
        `staged_weights`."""
        phase = f"staging version {version}"
        check_epoch(epoch, self.epoch, phase)
        self._staged = None

        def receive() -> StagedVersion:
            received = self._receiver.stage(version)
            tensors = received.tensors
            # Adapters are merged here, in the thread, while the model still computes.
            tensors = merge_adapters(tensors) if self._merges else tensors
            staged = _Staged(epoch, received, tensors)
            check_epoch(epoch, self.epoch, phase)
            self._staged = staged
            return StagedVersion(
                version,
                received.digest,
                received.received_bytes,
                received.seconds,
                {name: digest.hex() for name, digest in received.digests.by_name.items()},
            )

        return self._thread.submit(receive)

    def staged_weights(
        self, epoch: int | None, version: int, digest: str | None = None
    ) -> Mapping[str, torch.Tensor]:
        """Return the weights staged under that epoch and version, and that digest, if one is given.

        Raises:
            WeightSyncError: the epoch is not joined, nothing is staged, or something else.
        """
        phase, staged = f"committing version {version}", self._staged
        check_epoch(epoch, self.epoch, phase)
        if staged is None or (staged.epoch, staged.received.version) != (epoch, version):
            staged_text = "nothing" if staged is None else f"version {staged.received.version}"
            raise WeightSyncError(_SENDER, phase, f"{staged_text} is staged here; stage it first")
        if digest not in (None, staged.received.digest):
            raise WeightSyncError(
                _SENDER,
                phase,
                f"the digest of what is staged here is {staged.received.digest}, not {digest}",
            )
        return staged.weights

    def release(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give staging memory back once its tensors serve.

        It stays if the model still computes from it, or if the sender asked for that, since the
        next update may carry only changes to it.
        """
        staged = self._staged
        if staged is None or staged.weights is not weights:
            return  # the epoch was left during the swap; the memory is the model's only
        self._staged = None
        lent = self._model is not None and self._model.borrows(weights)
        self._receiver.keep(staged.received, lent=lent)

    def leave(self, reason: str) -> None:
        """Discard the staged weights and leave the epoch, if any; return at once."""
        self.epoch = self._staged = None
        self._was_left.set()  # a join that has no group yet
        self._receiver.abort(reason)

    def close(self) -> None:
        """Leave the group and let the thread end."""
        self.leave("the receiver is closed")
        self._thread.retire(self._receiver.close, within_s=_CLOSE_TIMEOUT_S)


def check_epoch(epoch: int | None, joined: int | None, phase: str) -> None:
    """Raise WeightSyncError unless `epoch` is the one that is `joined` here."""
    if epoch != joined:
        raise WeightSyncError(
            _SENDER, phase, f"epoch {epoch} is not joined here; the epoch is {joined}"
        )
