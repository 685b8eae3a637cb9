"""Find the part of each weight that a worker of a vendor's engine reads, and feed it to the loader.

To find that part, run the model's own loader with tensors without memory, on a copy of the model
without memory, and record its operations: views are followed, and an operation that reads a view
needs all of it. So a loader may slice, transpose and split tensors in any way; at worst the whole
tensor is needed.

A version's weights then come as packed parts, but the loader expects whole tensors and reads the
worker's part of them. So each tensor that came in part, or with an adapter, is put into memory of
the whole tensor, where only what is written takes space.
"""

from __future__ import annotations

import importlib
import logging
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sluice.errors import ConfigError
from sluice.types import TensorSpec
from sluice.weight_share import WHOLE, Cut, WeightShare
from sluice.weights.adapters import A_SUFFIX, B_SUFFIX, adapted_part, merge_part
from sluice.weights.plan import torch_dtype
from sluice.weights.share import MAX_RANGES, Cuts, cuts_by_name, num_blocks, unpack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Types of torch's dispatcher: its values have none here.
# ruff: noqa: ANN401

_log = logging.getLogger(__name__)

NamedTensors = Iterator[tuple[str, torch.Tensor]]
AsInFiles = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Takes weights by the names of the wire; returns them as a checkpoint has them."""
Box = tuple[tuple[int, int], ...]
"""A start and an end in each dimension."""

TensorsOf = Callable[
    [torch.nn.Module, torch.nn.Module], tuple[Mapping[str, Any], Mapping[str, Any]]
]
"""Takes a module and its copy. Returns the own parameters and buffers of the module as its loader
expects them, without memory."""


def checkpoint_names(model: PreTrainedModel) -> AsInFiles:
    """Return what gives weights, by a model's names in memory, as its checkpoint has them.

    A model in memory may hold as one tensor what its checkpoint splits (the experts of a layer), or
    under another name; the trainer sends what the model in memory has. Transformers knows the
    conversion for each family, since it saves checkpoints with it. Renamed or split weights are
    views.

    Args:
        model: with or without memory.

    Raises:
        ConfigError: this transformers does not offer the conversion.
    """
    try:
        revert: Any = importlib.import_module(
            "transformers.core_model_loading"
        ).revert_weight_conversion
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "transformers has no core_model_loading.revert_weight_conversion, which gives "
            "the engine's workers weights by their checkpoint's names; install transformers 5.19 "
            "(sluice was run with it)"
        ) from error
    return lambda weights: revert(model, dict(weights))


def meta_copy(model: torch.nn.Module, tensors_of: TensorsOf) -> torch.nn.Module:
    """Return a copy of a model for its loader; the two share everything but modules and tensors.

    Args:
        tensors_of: gives each module of the copy its tensors.
    """
    copies: dict[int, Any] = {}

    def copied(module: torch.nn.Module) -> Any:
        existing = copies.get(id(module))
        if existing is not None:  # a module with two names
            return existing
        copy: Any = object.__new__(type(module))
        copies[id(module)] = copy
        copy.__dict__.update(module.__dict__)
        parameters, buffers = tensors_of(module, copy)
        own_attributes = {
            "_parameters": dict(parameters),
            "_buffers": dict(buffers),
            "_modules": {
                name: None if child is None else copied(child)
                for name, child in module._modules.items()
            },
        }
        copy.__dict__.update(own_attributes)
        return copy

    copied_model: torch.nn.Module = copied(model)
    return copied_model


def record_share(
    load: Callable[[NamedTensors], object], tensors: Sequence[TensorSpec], as_in_files: AsInFiles
) -> WeightShare:
    """Return what a loader reads of the weights; all of them if it cannot be found out.

    Args:
        load: the loader of a model without memory; see `meta_copy`.
        tensors: the weights on the wire.
        as_in_files: makes of them what the loader expects.
    """
    reads = _Reads(tensors)
    try:
        with torch.inference_mode(), reads:
            load(iter(file_views(as_in_files, reads.tensors).items()))
    except Exception as error:  # noqa: BLE001 - a vendor's loader, which may do anything
        _log.warning("this worker takes all weights: its loader was not understood (%r)", error)
        return WHOLE
    return reads.share()


def file_views(
    as_in_files: AsInFiles, wholes: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return weights without memory as files have them, as views wherever that is possible.

    Transformers makes contiguous copies of parts. Their place in the whole is what counts here.
    """
    try:
        with _WithoutCopies():  # type: ignore[no-untyped-call]
            return as_in_files(wholes)
    except _WrittenError:  # a copy was made to be changed
        return as_in_files(wholes)


class _WrittenError(RuntimeError):
    """Something writes to a tensor."""


class _WithoutCopies(TorchDispatchMode):
    """Gives the tensor itself in place of its copy, as long as nothing is written."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = _run_parts(self, func, args, kwargs or {})
        if parts is not NotImplemented:
            return parts
        if func is torch.ops.aten.clone.default:
            return args[0]
        if func._schema.is_mutable:
            raise _WrittenError(str(func))
        return func(*args, **(kwargs or {}))


class _Reads(TorchDispatchMode):
    """Notes the parts of `tensors` that operations read, and lets nothing write to real memory."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors = {
            spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
            for spec in tensors
        }
        self._names = {_storage(tensor): name for name, tensor in self.tensors.items()}
        self._boxes: dict[str, set[Box]] = {}
        self._whole: set[str] = set()

    def share(self) -> WeightShare:
        """Return what was read. A tensor that was not, may have been kept: it is needed whole."""
        cuts_of = {
            name: _cuts(boxes, tuple(self.tensors[name].shape))
            for name, boxes in self._boxes.items()
            if name not in self._whole
        }
        return WeightShare(tuple((name, cuts) for name, cuts in sorted(cuts_of.items()) if cuts))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = _run_parts(self, func, args, kwargs or {})
        if parts is not NotImplemented:
            return parts
        arguments = tree_leaves((args, kwargs or {}))
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        if not func.is_view:
            for tensor in tensors:
                self._read(tensor)
        if func._schema.is_mutable and not all(argument.is_meta for argument in tensors):
            return args[0]
        return func(*args, **(kwargs or {}))

    def _read(self, tensor: torch.Tensor) -> None:
        name = self._names.get(_storage(tensor)) if tensor.is_meta else None
        if name is None or tensor.numel() == 0:
            return
        weight = self.tensors[name]
        box = _box(tensor, tuple(weight.shape)) if tensor.dtype == weight.dtype else None
        if box is None:
            self._whole.add(name)
        else:
            self._boxes.setdefault(name, set()).add(box)


def _run_parts(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Return an operation's result if it consists of others, which `mode` then sees one by one.

    In inference mode torch does not take such operations apart: `contiguous` would hide a copy.
    """
    with mode:
        return func.decompose(*args, **kwargs)


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _box(view: torch.Tensor, shape: tuple[int, ...]) -> Box | None:
    """Return a box of the contiguous tensor of `shape` that has all of a view; None: all of it."""
    steps = [1] * len(shape)
    for dimension in reversed(range(len(shape) - 1)):
        steps[dimension] = steps[dimension + 1] * shape[dimension + 1]
    offset, starts = view.storage_offset(), []
    for step in steps:
        starts.append(offset // step)
        offset %= step
    ends = list(starts)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        for dimension, step in enumerate(steps):
            if shape[dimension] > 1 and stride >= step and stride % step == 0:
                ends[dimension] += (size - 1) * (stride // step)
                break
        else:
            return None
    if any(end >= size for end, size in zip(ends, shape, strict=True)):
        return None  # it runs over the end of a row
    return tuple((start, end + 1) for start, end in zip(starts, ends, strict=True))


def _cuts(boxes: set[Box], shape: tuple[int, ...]) -> Cuts:
    """Return cuts that have all boxes, and as little else as cuts can."""
    kept_cuts = []
    for dimension, size in enumerate(shape):
        ranges: list[tuple[int, int]] = []
        for start, end in sorted({box[dimension] for box in boxes}):
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(ranges[-1][1], end)
            else:
                ranges.append((start, end))
        if ranges != [(0, size)]:
            kept_cuts.append(Cut(dimension, tuple((start, end - start) for start, end in ranges)))
    while num_blocks(tuple(kept_cuts)) > MAX_RANGES:
        kept_cuts.remove(max(kept_cuts, key=lambda cut: len(cut.ranges)))
    return tuple(kept_cuts)


class ShareLoading:
    """Gives a loader the weights of one worker.

    Args:
        tensors: the weights on the wire, without adapters.
        share: which part of them the worker has.
        as_in_files: makes of whole tensors what the loader expects.
    """

    def __init__(
        self, tensors: Sequence[TensorSpec], share: WeightShare, as_in_files: AsInFiles
    ) -> None:
        self._specs = {spec.name: spec for spec in tensors}
        self._cuts: Mapping[str, Cuts] = cuts_by_name(share)
        self._as_in_files = as_in_files
        self._views, self._computed = self._conversion()

    def tensors(self, parts: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights by the names of files.

        Args:
            parts: the packed parts and adapters, by the names of the wire. They are not changed.
        """
        layers: dict[str, list[str]] = {}
        for name in parts:
            if name.endswith(A_SUFFIX):
                layer = name.removesuffix(A_SUFFIX)
                layers.setdefault(adapted_part(layer).weight, []).append(layer)
        for name, views in self._views.items():
            weight = self._whole(name, parts, layers.get(name, ()))
            for file_name, view in views:
                offset = weight.storage_offset() + int(view.storage_offset())
                yield file_name, weight.as_strided(view.shape, view.stride(), offset)
            del weight  # the loader keeps what it needs
        computed = {name: self._whole(name, parts, layers.get(name, ())) for name in self._computed}
        yield from self._as_in_files(computed).items() if computed else ()

    def _conversion(self) -> tuple[dict[str, list[tuple[str, torch.Tensor]]], list[str]]:
        """Return the views that files have of each tensor, and the tensors that are computed."""
        wholes = {
            spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
            for spec in self._specs.values()
        }
        names = {tensor.untyped_storage()._cdata: name for name, tensor in wholes.items()}
        views: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for file_name, tensor in file_views(self._as_in_files, wholes).items():
            name = names.get(tensor.untyped_storage()._cdata)
            if name is not None and tensor.dtype == wholes[name].dtype:
                views.setdefault(name, []).append((file_name, tensor))
        return views, [name for name in wholes if name not in views]

    def _whole(
        self, name: str, parts: Mapping[str, torch.Tensor], layers: Sequence[str]
    ) -> torch.Tensor:
        cuts = self._cuts.get(name, ())
        if not cuts and not layers:
            return parts[name]
        weight = _reserve_memory(self._specs[name])
        unpack(parts[name], cuts, weight)
        for layer in layers:
            merge_part(weight, cuts, layer, parts[layer + A_SUFFIX], parts[layer + B_SUFFIX])
        return weight


def _reserve_memory(spec: TensorSpec) -> torch.Tensor:
    """Return memory that takes space only where it is written, until nothing refers to it."""
    dtype = torch_dtype(spec.dtype)
    count = max(1, torch.Size(spec.shape).numel())
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page takes its space at the first byte
    return torch.frombuffer(memory, dtype=dtype, count=count).view(spec.shape)
