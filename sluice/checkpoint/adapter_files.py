"""A folder with a low-rank adapter, in peft's format (https://github.com/huggingface/peft).

adapter_config.json        rank, alpha, layers, and the folder of the base model
adapter_model.safetensors  A and B of each layer, as ``base_model.model.<layer>.lora_A.weight``;
                           an expert's ``gate_proj``, ``up_proj`` and ``down_proj`` are layers
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file

from sluice.checkpoint.safetensors_files import former_name
from sluice.errors import CheckpointError
from sluice.weights.adapters import (
    A_SUFFIX,
    B_SUFFIX,
    EACH,
    AdaptedPart,
    adapted_part,
    merged_weight,
)

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_FOLDER = "lora_adapter"
ADAPTER_STEM = "adapter_model"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", f"{ADAPTER_STEM}.safetensors"
ADAPTER_PREFIX = "base_model.model."
"""Before every name in the file of A and B."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
# Settings of peft that change what an adapter computes, and the values that change nothing.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
}


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter of some linear layers.

    Attributes:
        rank: rows of A, columns of B.
        alpha: the product of B and A counts alpha / rank times.
        tensors: A [rank, in] and B [out, rank], by the model's names.
        base: folder or name of the model that it adapts.
        is_rank_stabilized: the product counts alpha / sqrt(rank) times instead.
    """

    rank: int
    alpha: float
    tensors: Mapping[str, Tensor]
    base: str
    is_rank_stabilized: bool = False

    @property
    def scale(self) -> float:
        """Return the factor of the product of B and A."""
        return self.alpha / (math.sqrt(self.rank) if self.is_rank_stabilized else self.rank)

    @property
    def layers(self) -> frozenset[str]:
        """Return the names of the layers that it adapts."""
        return frozenset(
            name.removesuffix(suffix)
            for name in self.tensors
            for suffix in (A_SUFFIX, B_SUFFIX)
            if name.endswith(suffix)
        )


class AdapterMerge:
    """Adds an adapter to the weights of its base model, one by one.

    Args:
        names: of the base model's tensors in its files.

    Raises:
        CheckpointError: a layer is not among them.
    """

    def __init__(self, adapter: Adapter, names: Collection[str]) -> None:
        self._adapter = adapter
        self._changes: dict[str, list[_LayerChange]] = {}
        for layer in adapter.layers:
            possible = [
                change for name in (layer, former_name(layer)) for change in _changes(name, layer)
            ]
            matching = next((change for change in possible if change.part.weight in names), None)
            if matching is None:
                raise CheckpointError(
                    f"the adapter's layer {layer} is not in the files of its base model "
                    f"{adapter.base}; merge with the model that was adapted, or with peft's "
                    "merge_and_unload"
                )
            self._changes.setdefault(matching.part.weight, []).append(matching)

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight, in float32 if an adapter was added.

        Raises:
            CheckpointError: the shapes do not fit.
        """
        if name not in self._changes:
            return weight
        merged = weight.float()
        if merged is weight:
            merged = weight.clone()
        for change in self._changes[name]:
            self._add(change, merged)
        return merged

    def _add(self, change: _LayerChange, merged: Tensor) -> None:
        a = self._adapter.tensors[change.layer + A_SUFFIX]
        b = self._adapter.tensors[change.layer + B_SUFFIX]
        shape = (b.shape[0], a.shape[1])
        for weight in change.candidates(merged):
            if weight.shape == shape:
                weight.copy_(merged_weight(weight, a, b, self._adapter.scale))
                return
        raise CheckpointError(
            f"{change.part.weight} has shape {tuple(merged.shape)} in {self._adapter.base}, the "
            f"adapter's layer {shape}; merge with the model that was adapted"
        )


@dataclass(frozen=True, slots=True)
class _LayerChange:
    """What a layer changes in a file: a part of a tensor, and of an expert there if it has all."""

    layer: str
    part: AdaptedPart
    expert: int | None = None

    def candidates(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the views [out, in] that the layer may mean: some files have experts [in, out]."""
        if self.expert is None:
            yield self.part.view(tensor)
        elif tensor.ndim == 3 and self.expert < len(tensor):
            yield self.part.view(tensor[self.expert])
            yield self.part.view(tensor[self.expert].t())


def _changes(name: str, layer: str) -> list[_LayerChange]:
    """Return what a layer of that name in files may change there."""
    changes = [_LayerChange(layer, AdaptedPart(f"{name}.weight"))]
    if expert := _EXPERT.fullmatch(name):
        of_all = f"{expert[1]}.{EACH}.{expert[3]}"
        changes.append(_LayerChange(layer, adapted_part(of_all), int(expert[2])))
    return changes


def write_adapter_config(
    folder: Path, rank: int, alpha: float, layers: Collection[str], base: str
) -> None:
    """Write the configuration that belongs to a file of A and B.

    Args:
        layers: all that are adapted, each expert's too.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(layers),
        "use_rslora": False,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter of sluice's, verl's or peft's.

    Raises:
        CheckpointError: a file is missing or damaged, or the adapter is more than A and B.
    """
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        base = str(config.get("base_model_name_or_path") or "")
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} holds no adapter that can be read ({error!r}); give a folder with "
            f"{ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, as peft saves them"
        ) from error
    # verl's merger writes 0 where it does not know the run's alpha: the adapter would add nothing.
    if rank < 1 or not math.isfinite(alpha) or alpha == 0:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: r={rank} and lora_alpha={alpha} make no adapter; write "
            "the run's lora_rank, at least 1, and its lora_alpha, finite and not 0, into the file"
        )
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            raise CheckpointError(
                f"{folder / ADAPTER_CONFIG}: {key}={config[key]!r} is not supported; give an "
                f"adapter with {key}={plain[0]!r}"
            )
    named = {name.removeprefix(ADAPTER_PREFIX): tensor for name, tensor in tensors.items()}
    adapter = Adapter(rank, alpha, named, base, bool(config.get("use_rslora")))
    _check_pairs(folder, adapter)
    return adapter


def _check_pairs(folder: Path, adapter: Adapter) -> None:
    wanted = {f"{layer}{suffix}" for layer in adapter.layers for suffix in (A_SUFFIX, B_SUFFIX)}
    if not wanted or (unpaired := wanted ^ adapter.tensors.keys()):
        detail = f"{min(unpaired)} has no partner or is no adapter" if wanted else "it is empty"
        raise CheckpointError(
            f"{folder / ADAPTER_WEIGHTS}: {detail}; give an adapter of linear layers only"
        )
    for name, tensor in adapter.tensors.items():
        rank = tensor.shape[0 if name.endswith(A_SUFFIX) else -1] if tensor.ndim == 2 else None
        if rank != adapter.rank:
            raise CheckpointError(
                f"{folder / ADAPTER_WEIGHTS}: {name} has shape {tuple(tensor.shape)}, but "
                f"{ADAPTER_CONFIG} says r={adapter.rank}; give both files of one adapter"
            )
