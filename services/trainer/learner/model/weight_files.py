"""A model's weight files, read by parts: a rank reads its shards and nothing else.

Names are the model's parameter names, or those that transformers renames when it reads a vision
model. The published files of a mixture of experts have a tensor for each expert and projection; the
model has one tensor with the experts as first dimension. Qwen3-VL's files have that tensor with its
other dimensions swapped.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from services.trainer.learner.tensor_layouts import region
from sluice.checkpoint.safetensors_files import INDEX_FILE, former_name
from sluice.weights.adapters import PROJECTIONS

CHUNK_BYTES = 64 << 20
_SINGLE = "model.safetensors"
_FLOATS = {"F64", "F32", "F16", "BF16"}
# The parameter of all experts, and the tensors of one expert that form its row.
_EXPERTS = {
    f"experts.{weight}": tuple(part for part, p in PROJECTIONS.items() if p.weight == weight)
    for weight in {projection.weight for projection in PROJECTIONS.values()}
}


def expert_names(name: str, rows: int) -> list[list[str]]:
    """Return the published tensors of each expert in an experts' parameter, in order.

    Concatenated, they form the expert's row of the parameter. Empty if `name` is not a parameter of
    experts.
    """
    for suffix, parts in _EXPERTS.items():
        if name.endswith(suffix):
            experts = name.removesuffix(suffix) + "experts"
            return [[f"{experts}.{row}.{part}.weight" for part in parts] for row in range(rows)]
    return []


class WeightFiles:
    """The safetensors files of a folder that transformers would load.

    Raises:
        OSError, SafetensorError, ValueError, KeyError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        names = {_SINGLE}
        if not (folder / _SINGLE).is_file():
            index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
            names = set(index["weight_map"].values())
        self._opened: dict[str, Any] = {}
        for name in sorted(names):
            opened: Any = safe_open(folder / name, framework="pt")
            self._opened.update(dict.fromkeys(opened.keys(), opened))
        self._swapped: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Return whether the files have that parameter, as one tensor or one per expert."""
        return self._sources(self._stored_name(name), 1)[0][0] in self._opened

    def match(self, parameters: Mapping[str, Tensor], unused: Collection[str] = ()) -> bool:
        """Return whether the files hold exactly these parameters, with their shapes, as floats.

        Call it before `fill`: it notes which parameters have swapped dimensions in the files.
        `unused` names tensors that the files may hold as well.
        """
        read: set[str] = set()
        for name, parameter in ((self._stored_name(n), p) for n, p in parameters.items()):
            sources = self._sources(name, parameter.shape[0] if parameter.ndim else 0)
            read.update(*sources)
            if not read <= self._opened.keys():
                return False
            shape = self._shape(sources, is_whole=name in self._opened)
            if shape != (wanted := tuple(parameter.shape)):
                if not name.endswith(tuple(_EXPERTS)) or shape != (wanted[0], *wanted[:0:-1]):
                    return False
                self._swapped.add(name)
        dtypes = {self._slice(name).get_dtype() for name in self._opened}
        return self._opened.keys() - read <= set(unused) and dtypes <= _FLOATS

    def fill(self, target: Tensor, name: str, offset: Sequence[int]) -> None:
        """Copy a part of a parameter into `target`, some rows at a time.

        Args:
            offset: where the part begins in the parameter, by dimension.
        """
        name = self._stored_name(name)
        columns = region(offset[1:], target.shape[1:])
        row_bytes = max(1, target[:1].numel() * target.element_size())
        step = max(1, CHUNK_BYTES // row_bytes)
        for row in range(0, target.shape[0], step):
            part = target[row : row + step]
            start = offset[0] + row
            part.copy_(self._rows(name, start, start + part.shape[0], columns))

    def probe(self) -> float:
        """Return a sum over some rows of every tensor, to compare ranks by one number."""
        total = 0.0
        for name in sorted(self._opened):
            tensor = self._slice(name)
            rows = tensor.get_shape()[0]
            for row in {0, rows // 3, rows - 1}:
                total += float(tensor[row : row + 1].double().sum())
        return total

    def _rows(self, name: str, start: int, stop: int, columns: Sequence[slice]) -> Tensor:
        if name in self._swapped:
            swapped: Tensor = self._slice(name)[(slice(start, stop), *columns[::-1])]
            return swapped.transpose(1, 2)
        if name in self._opened:
            rows: Tensor = self._slice(name)[(slice(start, stop), *columns)]
            return rows
        experts = self._sources(name, stop)[start:]
        return torch.stack([self._expert_rows(parts, *columns) for parts in experts])

    def _expert_rows(self, parts: Sequence[str], rows: slice, *columns: slice) -> Tensor:
        """Return some rows of an expert's tensors, concatenated."""
        blocks: list[Tensor] = []
        first_row = 0
        for part in map(self._slice, parts):
            num_rows = part.get_shape()[0]
            start, stop = max(0, rows.start - first_row), min(num_rows, rows.stop - first_row)
            if start < stop or not blocks:
                blocks.append(part[(slice(start, max(start, stop)), *columns)])
            first_row += num_rows
        return torch.cat(blocks)

    def _stored_name(self, name: str) -> str:
        """Return the name that a parameter has in the files."""
        return name if name in self._opened else former_name(name)

    def _sources(self, name: str, rows: int) -> list[list[str]]:
        """Return the tensors of a parameter: one, or those of each expert."""
        return (expert_names(name, rows) if name not in self._opened else []) or [[name]]

    def _shape(self, sources: list[list[str]], *, is_whole: bool) -> tuple[int, ...]:
        """Return the shape of these tensors combined; empty if they do not fit together."""
        if is_whole:
            return tuple(self._slice(sources[0][0]).get_shape())
        shapes = [[tuple(self._slice(part).get_shape()) for part in parts] for parts in sources]
        if any(x != shapes[0] for x in shapes) or any(len(shape) != 2 for shape in shapes[0]):
            return ()
        return (len(sources), sum(shape[0] for shape in shapes[0]), shapes[0][0][1])

    def _slice(self, name: str) -> Any:  # noqa: ANN401 - safetensors has no types
        return self._opened[name].get_slice(name)
