"""Train low-rank adapters beside frozen weights (LoRA, https://arxiv.org/abs/2106.09685).

A linear layer y = W x + b becomes y = W x + b + scale B A x, with A [rank, in] and B [out, rank];
scale is alpha / rank. A begins as torch initializes a linear layer, B with zeros, so that the first
policy is the model. The layers' weights keep their names; an adapter's are ``X.lora_A.weight`` and
``X.lora_B.weight``, which peft's files have behind ``base_model.model.``
(https://github.com/huggingface/peft), so that engines and peft read a checkpoint's
``lora_adapter`` folder.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from services.trainer.learner.model.sharding import assign
from sluice.checkpoint.adapter_files import Adapter, read_adapter, write_adapter
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.errors import CheckpointError, ConfigError
from sluice.weights.adapters import B_SUFFIX, is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"
_MODEL = "actor_rollout_ref.model"
_EXPERT_NAMES = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter. It shares the weight of the layer that it replaces.

    Args:
        linear: the layer; its parameters become frozen.
        rank: of A and B.
        scale: of their product.
        dtype: of A and B.
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float, dtype: torch.dtype) -> None:
        # Without memory: the parameters are those of the layer.
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.lora_A = nn.Linear(self.in_features, rank, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False, device=device, dtype=dtype)
        nn.init.zeros_(self.lora_B.weight)
        self.scale = scale
        self.is_on = True

    def forward(self, hidden: Tensor) -> Tensor:
        found = super().forward(hidden)
        if not self.is_on:
            return found
        added: Tensor = self.lora_B(self.lora_A(hidden))
        return found + self.scale * added


def add_adapters(model: PreTrainedModel, config: ModelConfig, dtype: torch.dtype) -> None:
    """Freeze the model and add the adapters to train, new ones or those of `lora_adapter_path`.

    torch's global generator initializes new ones.

    Args:
        model: not sharded yet.
        config: which layers, rank and scale.
        dtype: of the adapters.

    Raises:
        ConfigError: no layer is named, or one that takes no adapter, or the adapter at
            `lora_adapter_path` is another model's; names key, value and remedy.
    """
    model.requires_grad_(requires_grad=False)
    layers = _linear_layers(model)
    if config.lora_adapter_path is not None:
        _add_saved(model, layers, config, dtype)
        return
    if config.lora_rank < 1:
        raise ConfigError(f"{_MODEL}.lora_rank={config.lora_rank}: give a rank of at least 1")
    scale = config.lora_alpha / config.lora_rank
    if any(".experts." in name for name, _ in model.named_parameters()):
        logger.warning("the experts of this %s get no adapters", model.config.model_type)
    for name in _chosen(model, layers, config):
        _adapt(model, name, layers[name], config.lora_rank, scale, dtype)


def _add_saved(
    model: PreTrainedModel,
    layers: Mapping[str, nn.Linear],
    config: ModelConfig,
    dtype: torch.dtype,
) -> None:
    key = f"{_MODEL}.lora_adapter_path='{config.lora_adapter_path}'"
    try:
        saved = read_adapter(Path(config.lora_adapter_path or ""))
    except CheckpointError as error:
        raise ConfigError(f"{key}: {error}") from error
    if config.lora_rank not in (0, saved.rank):
        raise ConfigError(
            f"{_MODEL}.lora_rank={config.lora_rank}: the adapter at lora_adapter_path has rank "
            f"{saved.rank}; leave lora_rank out"
        )
    for name in sorted(saved.layers & layers.keys()):
        _adapt(model, name, layers[name], saved.rank, saved.scale, dtype)
    problems = _differences(adapter_parameters(model), saved.tensors)
    if problems:
        raise ConfigError(
            f"{key} is the adapter of another model than {_MODEL}.path: {problems[0]}; give one "
            "of this model"
        )
    for name, parameter in adapter_parameters(model).items():
        assign(parameter.detach(), saved.tensors[name])


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Compute as the model that was loaded, inside the block."""
    adapted = list(adapted_layers(model).values())
    for layer in adapted:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in adapted:
            layer.is_on = True


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Return the layers with an adapter, by name; empty for a model that is trained as a whole."""
    return {n: layer for n, layer in model.named_modules() if isinstance(layer, AdaptedLinear)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return A and B of every adapted layer, whole or sharded, by name."""
    return {name: one for name, one in model.named_parameters() if is_adapter(name)}


@torch.no_grad()
def on_the_wire(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters as `sluice.weights.adapters` wants them: every B times its scale."""
    scales = {f"{n}{B_SUFFIX}": layer.scale for n, layer in adapted_layers(model).items()}
    return {n: one * scales[n] if n in scales else one for n, one in parameters.items()}


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return all but the head, whose logits are computed from its weight in blocks."""
    head = model.get_output_embeddings()
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    }


def _adapt(
    model: nn.Module, name: str, layer: nn.Linear, rank: int, scale: float, dtype: torch.dtype
) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, AdaptedLinear(layer, rank, scale, dtype))


def _differences(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Return what keeps `found` from being the adapters of a model that has `wanted`."""
    odd = sorted(wanted.keys() ^ found.keys())
    differences = [f"{name} is only in {'it' if name in found else 'the model'}" for name in odd]
    return differences + [
        f"{name} has shape {tuple(found[name].shape)} instead of {tuple(one.shape)}"
        for name, one in wanted.items()
        if name in found and found[name].shape != one.shape
    ]


def _chosen(
    model: PreTrainedModel, layers: Mapping[str, nn.Linear], config: ModelConfig
) -> list[str]:
    """Return the layers that get an adapter, by peft's rules for the two keys."""
    wanted, excluded = config.target_modules, config.exclude_modules
    for key, pattern in (("target_modules", wanted), ("exclude_modules", excluded)):
        try:
            re.compile(pattern if isinstance(pattern, str) else "")
        except re.error as error:
            raise ConfigError(
                f"{_MODEL}.{key}='{pattern}' is no regular expression ({error}); give one, or a "
                "list of names"
            ) from error
    if wanted == ALL_LINEAR:
        found = list(layers)
    else:
        found = [name for name in layers if _is_named(name, wanted)]
        entries = [wanted] if isinstance(wanted, str) else [[one] for one in wanted]
        for entry in entries:
            if not any(_is_named(name, entry) for name in layers):
                raise _no_layer(model, layers, entry)
    chosen = [name for name in found if excluded is None or not _is_named(name, excluded)]
    if not chosen:
        raise ConfigError(
            f"{_MODEL}.exclude_modules={excluded!r} leaves no layer of target_modules={wanted!r}; "
            "exclude fewer"
        )
    return chosen


def _is_named(name: str, wanted: str | Sequence[str]) -> bool:
    """Match a layer's name: a text is a regular expression for all of it, a list has its ends."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in wanted)


def _no_layer(
    model: PreTrainedModel, layers: Mapping[str, nn.Linear], entry: str | Sequence[str]
) -> ConfigError:
    shown = entry if isinstance(entry, str) else entry[0]
    others = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in layers]
    why = "matches no linear layer"
    if any(".experts." in name for name in others) and str(shown) in _EXPERT_NAMES:
        why = "names the experts, whose weights take no adapter"
    elif any(_is_named(name.rpartition(".")[0], entry) for name in others):
        why = "takes no adapter: it is no linear layer inside the model"
    ends = sorted({name.rpartition(".")[2] for name in layers})
    return ConfigError(
        f"{_MODEL}.target_modules: {shown!r} {why} of this {model.config.model_type} model; give "
        f"{ALL_LINEAR}, or some of {', '.join(ends)}"
    )


def save_adapters(
    folder: Path, model: nn.Module, tensors: Mapping[str, Tensor], model_path: str
) -> None:
    """Write the adapters as peft does.

    Args:
        folder: new or empty.
        model: with adapters.
        tensors: all of `adapter_parameters`, whole, on the host.
        model_path: of the model that is adapted.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    first = next(iter(adapted_layers(model).values()))
    rank = first.lora_A.out_features
    base = str(Path(model_path).absolute())
    write_adapter(folder, Adapter(rank, first.scale * rank, tensors, base))


@torch.no_grad()
def load_adapters(folder: Path, model: nn.Module) -> float:
    """Replace the adapters in place; in shards this rank's part.

    Args:
        folder: written by `save_adapters`.
        model: with the same adapters.

    Returns:
        the sum of all their elements, to compare ranks by one number.

    Raises:
        CheckpointError: the folder holds no adapter, or those of other layers.
    """
    saved, parameters = read_adapter(folder), adapter_parameters(model)
    problems = _differences(parameters, saved.tensors)
    scale = next(iter(adapted_layers(model).values())).scale
    if not problems and not math.isclose(saved.scale, scale):
        problems = [f"its scale is {saved.scale:g} instead of {scale:g}"]
    if problems:
        raise CheckpointError(
            f"{folder} does not fit the run: {problems[0]}; resume with the same "
            f"{_MODEL}.path, lora_rank, lora_alpha, target_modules and exclude_modules"
        )
    for name, parameter in parameters.items():
        assign(parameter, saved.tensors[name])
    return sum(float(one.double().sum()) for one in saved.tensors.values())
