"""A folder with a low-rank adapter, in peft's format (https://github.com/huggingface/peft).

adapter_config.json        rank, alpha, layers, and the folder of the base model
adapter_model.safetensors  A and B of each layer, as ``base_model.model.<layer>.lora_A.weight``
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from sluice.errors import CheckpointError
from sluice.weights.adapters import A_SUFFIX, B_SUFFIX, merged

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_FOLDER = "lora_adapter"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
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
        adapter: to add.
        names: of the base model's tensors in its files.

    Raises:
        CheckpointError: a layer is not among them.
    """

    def __init__(self, adapter: Adapter, names: Collection[str]) -> None:
        self._adapter = adapter
        self._layers: dict[str, str] = {}
        for layer in adapter.layers:
            known = [f"{one}.weight" for one in _names_in_files(layer)]
            found = next((name for name in known if name in names), None)
            if found is None:
                raise CheckpointError(
                    f"the adapter's layer {layer} is not in the files of its base model "
                    f"{adapter.base}; merge with the model that was adapted, or with peft's "
                    "merge_and_unload"
                )
            self._layers[found] = layer

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight, in float32 if an adapter was added.

        Raises:
            CheckpointError: the shapes do not fit.
        """
        if (layer := self._layers.get(name)) is None:
            return weight
        a, b = self._adapter.tensors[layer + A_SUFFIX], self._adapter.tensors[layer + B_SUFFIX]
        if weight.shape != (b.shape[0], a.shape[1]):
            raise CheckpointError(
                f"{name} has shape {tuple(weight.shape)} in {self._adapter.base}, the adapter's "
                f"layer ({b.shape[0]}, {a.shape[1]}); merge with the model that was adapted"
            )
        return merged(weight.float(), a, b, self._adapter.scale)


def _names_in_files(layer: str) -> list[str]:
    """Return the names that a layer may have in files: some families' differ in memory."""
    text = layer.replace("model.language_model.", "model.", 1)
    return [layer, text, layer.replace("model.visual.", "visual.", 1)]


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """Write both files; create the folder.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted(adapter.layers),
        "use_rslora": adapter.is_rank_stabilized,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    named = {f"{_PREFIX}{n}": one.contiguous() for n, one in adapter.tensors.items()}
    # Not by save_file: of a full disk it makes another error than OSError.
    (folder / ADAPTER_WEIGHTS).write_bytes(save(named, metadata={"format": "pt"}))


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
    if rank < 1 or not math.isfinite(alpha):
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: r={rank} and lora_alpha={alpha} make no adapter; give a "
            "rank of at least 1 and a finite number"
        )
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            raise CheckpointError(
                f"{folder / ADAPTER_CONFIG}: {key}={config[key]!r} is not supported; give an "
                f"adapter with {key}={plain[0]!r}"
            )
    named = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    adapter = Adapter(rank, alpha, named, base, bool(config.get("use_rslora")))
    _check_pairs(folder, adapter)
    return adapter


def _check_pairs(folder: Path, adapter: Adapter) -> None:
    wanted = {f"{layer}{suffix}" for layer in adapter.layers for suffix in (A_SUFFIX, B_SUFFIX)}
    if not wanted or (odd := wanted ^ adapter.tensors.keys()):
        what = f"{min(odd)} has no partner or is no adapter" if wanted else "it is empty"
        raise CheckpointError(
            f"{folder / ADAPTER_WEIGHTS}: {what}; give an adapter of linear layers only"
        )
    for name, tensor in adapter.tensors.items():
        rank = tensor.shape[0 if name.endswith(A_SUFFIX) else -1] if tensor.ndim == 2 else None
        if rank != adapter.rank:
            raise CheckpointError(
                f"{folder / ADAPTER_WEIGHTS}: {name} has shape {tuple(tensor.shape)}, but "
                f"{ADAPTER_CONFIG} says r={adapter.rank}; give both files of one adapter"
            )
