"""The weights that a model computes with, and their exchange for another version.

On the device and in the dtype of the model, a version is taken over by pointing the parameters at
its memory: an exchange takes as long for a large model as for a small one, but for models with
biases of q, k and v (Qwen2), whose fused projections are put together anew. Elsewhere its elements
are copied, only the changed ones if they are known. Memory that was taken over belongs to whoever
gave it and is never written to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.rollout.engines.causal_lm import CausalLM
from sluice.errors import WeightSyncError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["ChangedElements", "LiveWeights", "NewWeights", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """What a model keeps a tensor as."""

    device: torch.device
    dtype: torch.dtype

    def can_borrow(self, tensor: torch.Tensor) -> bool:
        """Whether the model can compute from this memory in place of its own."""
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
    """A version to be taken.

    Attributes:
        tensors: all of the model's layout, by checkpoint name, on the CPU.
        changes: of tensors that would have to be copied, by name, where they are known.
        base_digest: of the weights since which `changes` are.
    """

    tensors: Mapping[str, torch.Tensor]
    changes: Mapping[str, ChangedElements] = field(default_factory=dict)
    base_digest: str = ""


class LiveWeights:
    """The parameters of one model, to be used in the thread that computes with them.

    Made after the model's decoder, whose making may replace parameters. The first tied tensor of
    the layout stands for the others, which are pointed along with it.
    """

    def __init__(self, language_model: CausalLM) -> None:
        self._layout = language_model.layout
        self._known = language_model.model.state_dict().keys()
        names = [spec.name for spec in self._layout]
        self._parameters = _parameters(language_model.model, names)
        self.places: Mapping[str, Place] = {
            name: Place(parameters[0].device, parameters[0].dtype)
            for name, parameters in self._parameters.items()
        }
        self._borrowed: set[str] = set()

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises WeightSyncError if a tensor is missing, unknown or of another shape.

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
        """Computes with `new` from now on; `check` it first.

        Any error leaves a mixture of versions: the model must not be used any more.

        Args:
            new: may be kept as the model's memory. It must not be written to before other
                weights are taken.
            serving_digest: of what the model holds.
        """
        changes = new.changes if new.base_digest == serving_digest else {}
        for name, parameters in self._parameters.items():
            tensor, place = new.tensors[name], self.places[name]
            if place.can_borrow(tensor):
                _point(parameters, tensor)
                self._borrowed.add(name)
            elif name in self._borrowed:
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
