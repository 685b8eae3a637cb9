"""The weights for a vendor's loader, one after the other, from the packed share of a worker.

The loader expects whole tensors and reads the worker's part of them. So each tensor that came in
part, or with an adapter, is put into memory of the whole tensor, where only what is written takes
space.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence

import torch

from services.rollout.engines.vendor.share_recorder import AsInFiles, file_views
from sluice.types import TensorSpec
from sluice.weight_share import WeightShare
from sluice.weights.adapters import A_SUFFIX, B_SUFFIX, adapted_part, merge_part
from sluice.weights.plan import torch_dtype
from sluice.weights.share import Cuts, cuts_by_name, unpack


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
            whole = self._whole(name, parts, layers.get(name, ()))
            for file_name, view in views:
                offset = whole.storage_offset() + int(view.storage_offset())
                yield file_name, whole.as_strided(view.shape, view.stride(), offset)
            del whole  # the loader keeps what it needs
        computed = {name: self._whole(name, parts, layers.get(name, ())) for name in self._computed}
        yield from self._as_in_files(computed).items() if computed else ()

    def _conversion(self) -> tuple[dict[str, list[tuple[str, torch.Tensor]]], list[str]]:
        """Return the views that files have of each tensor, and the tensors that are computed."""
        wholes = {
            spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
            for spec in self._specs.values()
        }
        names = {one.untyped_storage()._cdata: name for name, one in wholes.items()}
        views: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for file_name, one in file_views(self._as_in_files, wholes).items():
            name = names.get(one.untyped_storage()._cdata)
            if name is not None and one.dtype == wholes[name].dtype:
                views.setdefault(name, []).append((file_name, one))
        return views, [name for name in wholes if name not in views]

    def _whole(
        self, name: str, parts: Mapping[str, torch.Tensor], layers: Sequence[str]
    ) -> torch.Tensor:
        cuts = self._cuts.get(name, ())
        if not cuts and not layers:
            return parts[name]
        whole = _untouched(self._specs[name])
        unpack(parts[name], cuts, whole)
        for layer in layers:
            merge_part(whole, cuts, layer, parts[layer + A_SUFFIX], parts[layer + B_SUFFIX])
        return whole


def _untouched(spec: TensorSpec) -> torch.Tensor:
    """Return memory that takes space only where it is written, until nothing refers to it."""
    dtype = torch_dtype(spec.dtype)
    count = max(1, torch.Size(spec.shape).numel())
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page takes its space at the first byte
    return torch.frombuffer(memory, dtype=dtype, count=count).view(spec.shape)
