"""A model's weight files, read by rows: a rank reads its shards and nothing else.

Names are those of the model's parameters. The published files of a mixture of experts have a tensor
for each expert and projection; the model has one tensor for all experts, which are its first
dimension.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

CHUNK_BYTES = 64 << 20
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# The parameter of all experts, and the tensors of one expert that make a row of it.
_EXPERTS = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}


class WeightFiles:
    """The safetensors files of a folder.

    Raises:
        OSError, SafetensorError, ValueError, KeyError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        names = {_SINGLE}
        if (folder / _INDEX).is_file():
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            names = set(index["weight_map"].values())
        self._opened: dict[str, Any] = {}
        for name in sorted(names):
            opened: Any = safe_open(folder / name, framework="pt")
            self._opened.update(dict.fromkeys(opened.keys(), opened))

    def covers(self, parameters: Mapping[str, Tensor]) -> bool:
        """Return whether every parameter is there in its shape, whole or as experts."""
        return all(self._shape(name) == tuple(one.shape) for name, one in parameters.items())

    def fill(self, target: Tensor, name: str, start: int) -> None:
        """Copy the rows of a parameter from `start` on into `target`, a part at a time."""
        row_bytes = max(1, target[:1].numel() * target.element_size())
        step = max(1, CHUNK_BYTES // row_bytes)
        for first in range(0, target.shape[0], step):
            part = target[first : first + step]
            part.copy_(self._rows(name, start + first, start + first + part.shape[0]))

    def probe(self) -> float:
        """Return the sum of the first row of every tensor, to compare ranks by one number."""
        return sum(
            float(opened.get_slice(name)[:1].double().sum())
            for name, opened in sorted(self._opened.items())
            if opened.get_slice(name).get_shape()
        )

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        if name in self._opened:
            found: Tensor = self._opened[name].get_slice(name)[start:stop]
            return found
        prefix, parts = _expert_parts(name)
        experts = [
            torch.cat([self._expert(prefix, number, part) for part in parts])
            for number in range(start, stop)
        ]
        return torch.stack(experts)

    def _expert(self, prefix: str, number: int, part: str) -> Tensor:
        name = f"{prefix}.{number}.{part}.weight"
        found: Tensor = self._opened[name].get_tensor(name)
        return found

    def _shape(self, name: str) -> tuple[int, ...] | None:
        if name in self._opened:
            return tuple(self._opened[name].get_slice(name).get_shape())
        prefix, parts = _expert_parts(name)
        first = [f"{prefix}.0.{part}.weight" for part in parts]
        if not first or not all(one in self._opened for one in first):
            return None
        number = 0
        while f"{prefix}.{number}.{parts[0]}.weight" in self._opened:
            number += 1
        shapes = [self._opened[one].get_slice(one).get_shape() for one in first]
        return (number, sum(rows for rows, _ in shapes), shapes[0][1])


def _expert_parts(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the name of a layer's experts, and the tensors of one; no tensors: it has none."""
    for suffix, parts in _EXPERTS.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix.removeprefix("experts")), parts
    return name, ()
