"""Train low-rank adapters beside frozen weights (LoRA, https://arxiv.org/abs/2106.09685).

A linear layer y = W x + b becomes y = W x + b + scale B A x, with A [rank, in] and B [out, rank];
scale is alpha / rank. A begins as torch initializes a linear layer, B with zeros, so that the first
policy is the model. The layers' weights keep their names; an adapter's are ``X.lora_A.weight`` and
``X.lora_B.weight``, which peft's files have behind ``base_model.model.``
(https://github.com/huggingface/peft), so that engines and peft read a checkpoint's
``lora_adapter`` folder. Each expert of a mixture is adapted like three separate linear layers; the
adapters of a block form one tensor, like its weights (`sluice.weights.adapters`).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from services.trainer.learner.model.decoder import Linear
from services.trainer.learner.model.experts import ExpertAdapter, Experts
from services.trainer.learner.model.export import Published
from services.trainer.learner.model.sharding import assign
from services.trainer.learner.tensor_layouts import TensorLayout, local_part, local_region, region
from sluice.checkpoint.adapter_files import ADAPTER_PREFIX, read_adapter, write_adapter_config
from sluice.config.derived import ALL_LINEAR, is_named
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.errors import CheckpointError, ConfigError
from sluice.weights.adapters import (
    A_SUFFIX,
    B_SUFFIX,
    EACH,
    PROJECTIONS,
    is_adapter,
    is_of_experts,
    names_in_files,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_MODEL = "actor_rollout_ref.model"
_SAVED = "sluice_saved_adapters"


class AdaptedLinear(Linear):
    """A linear layer with an adapter. It shares the weight of the layer that it replaces.

    Args:
        linear: the layer; its parameters become frozen.
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float, dtype: torch.dtype) -> None:
        # Without memory: it takes over the parameters of the layer.
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.lora_A = Linear(self.in_features, rank, bias=False, device=device, dtype=dtype)
        self.lora_B = Linear(rank, self.out_features, bias=False, device=device, dtype=dtype)
        nn.init.zeros_(self.lora_B.weight)
        self.rank, self.scale = rank, scale
        self.is_on = True

    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden)
        if not self.is_on:
            return output
        added: Tensor = self.lora_B(self.lora_A(hidden))
        return output + self.scale * added


def add_adapters(model: PreTrainedModel, config: ModelConfig, dtype: torch.dtype) -> None:
    """Freeze the model and add the adapters to train, new ones or those of `lora_adapter_path`.

    torch's global generator initializes new ones. `init_expert_adapters` initializes those of
    experts later.

    Args:
        model: not sharded yet.

    Raises:
        ConfigError: no layer is named, a named layer takes no adapter, or the adapter at
            `lora_adapter_path` belongs to another model; the error names key, value and remedy.
    """
    model.requires_grad_(requires_grad=False)
    layers = _adaptable_layers(model)
    if config.lora_adapter_path is not None:
        _add_saved(model, layers, config, dtype)
        return
    if config.lora_rank < 1:
        raise ConfigError(f"{_MODEL}.lora_rank={config.lora_rank}: give a rank of at least 1")
    scale = config.lora_alpha / config.lora_rank
    if _has_other_experts(model):
        logger.warning("the experts of this %s get no adapters", model.config.model_type)
    for name in _layers_to_adapt(model, layers, config):
        _adapt(model, name, config.lora_rank, scale, dtype)


def _add_saved(
    model: PreTrainedModel, layers: Mapping[str, int], config: ModelConfig, dtype: torch.dtype
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
    for name, experts in sorted(layers.items()):
        if saved.layers.issuperset(names_in_files(name, experts)):
            _adapt(model, name, saved.rank, saved.scale, dtype)
    parameters = adapter_parameters(model)
    problems = _differences(parameters, saved.tensors)
    if problems:
        raise ConfigError(
            f"{key} is the adapter of another model than {_MODEL}.path: {problems[0]}; give one "
            "of this model"
        )
    for name, parameter in parameters.items():
        if not is_of_experts(_layer_name(name)):
            assign(parameter.detach(), saved.tensors[name])
    setattr(model, _SAVED, saved.tensors)


@torch.no_grad()
def init_expert_adapters(model: nn.Module) -> None:
    """Initialize the experts' adapters after sharding, on each rank only its own.

    New ones are made expert by expert. Each rank reads those of `lora_adapter_path`, like those of
    a checkpoint, whole into host memory first. An expert's new A depends on the seed of torch's
    global generator and its name, so it is the same in every layout.
    """
    saved: Mapping[str, Tensor] = getattr(model, _SAVED, {})
    generator = torch.Generator()
    for name, parameter in adapter_parameters(model).items():
        if is_of_experts(_layer_name(name)) and saved:
            _fill(name, parameter, saved.__getitem__)
        elif is_of_experts(_layer_name(name)):
            shape = parameter.shape[1:]
            bound = 0.0 if name.endswith(B_SUFFIX) else 1 / math.sqrt(shape[1])

            def initial(name: str, shape: torch.Size = shape, bound: float = bound) -> Tensor:
                seed = f"{torch.initial_seed()} {name}".encode()
                generator.manual_seed(int.from_bytes(blake2b(seed, digest_size=7).digest()))
                return torch.empty(shape).uniform_(-bound, bound, generator=generator)

            _fill(name, parameter, initial)
    if saved:
        delattr(model, _SAVED)


def _fill(name: str, parameter: Tensor, read_tensor: Callable[[str], Tensor]) -> None:
    """Set this rank's part of one half (A or B) of an adapter from its tensors in files."""
    names = names_in_files(name, parameter.shape[0])
    if not is_of_experts(_layer_name(name)):
        assign(parameter, read_tensor(name))
        return
    offset = local_region(parameter)[0]
    for number, row in enumerate(local_part(parameter), offset[0]):
        row.copy_(read_tensor(names[number])[region(offset[1:], row.shape)])


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the block, to compute as the loaded model."""
    adapted = list(adapted_layers(model).values())
    for layer in adapted:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in adapted:
            layer.is_on = True


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear | ExpertAdapter]:
    """Return the layers with an adapter, by name; empty if all weights are trained."""
    kinds = (AdaptedLinear, ExpertAdapter)
    return {n: layer for n, layer in model.named_modules() if isinstance(layer, kinds)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return A and B of every adapted layer, whole or sharded, by name."""
    return select_adapters(dict(model.named_parameters()))


def select_adapters(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return those parameters that are A or B of an adapted layer."""
    return {name: parameter for name, parameter in parameters.items() if is_adapter(name)}


def scaled_for_sending(model: nn.Module, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the parameters in the form of `sluice.weights.adapters`: every B times its scale.

    A product is computed each time it is read, so that memory does not hold all products.
    """
    scales = {f"{n}{B_SUFFIX}": layer.scale for n, layer in adapted_layers(model).items()}
    return _Scaled(parameters, scales)


class _Scaled(Mapping[str, Tensor]):
    """Tensors without gradients. Those with a scale are multiplied by it when they are read."""

    def __init__(self, tensors: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
        self._tensors, self._scales = tensors, scales

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name].detach()
        return tensor * self._scales[name] if name in self._scales else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _adaptable_layers(model: PreTrainedModel) -> dict[str, int]:
    """Return the layers that take an adapter, and how many experts each represents.

    The head takes none, since logits are computed from its weight in blocks.
    """
    head = model.get_output_embeddings()
    layers: dict[str, int] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not head:
            layers[name] = 1
        elif isinstance(layer, Experts):
            experts = layer.gate_up_proj.shape[0]
            layers |= {f"{name}.{EACH}.{projection}": experts for projection in PROJECTIONS}
    return layers


def _has_other_experts(model: nn.Module) -> bool:
    """Return whether a model has experts other than the trainer's own; these take no adapter."""
    has_native = any(isinstance(module, Experts) for module in model.modules())
    return not has_native and any(".experts." in name for name, _ in model.named_parameters())


def _adapt(model: nn.Module, name: str, rank: int, scale: float, dtype: torch.dtype) -> None:
    parent, _, child = name.rpartition(".")
    if is_of_experts(name):
        experts = model.get_submodule(parent.rpartition(".")[0])
        assert isinstance(experts, Experts)
        experts.adapt(child, rank, scale, dtype)
        return
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    setattr(model.get_submodule(parent), child, AdaptedLinear(layer, rank, scale, dtype))


def _layer_name(name: str) -> str:
    return name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX)


def adapter_tensors(parameters: Mapping[str, Tensor | TensorLayout]) -> dict[str, Published]:
    """Return the tensors of a file by the half of an adapter that they belong to, in order."""
    return {
        name: [
            (ADAPTER_PREFIX + tensor_name, tuple(parameter.shape[-2:]))
            for tensor_name in names_in_files(name, parameter.shape[0])
        ]
        for name, parameter in parameters.items()
    }


def _differences(parameters: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> list[str]:
    """Return why `stored` cannot be the adapters of a model with `parameters`."""
    wanted = {
        tensor_name.removeprefix(ADAPTER_PREFIX): shape
        for tensors in adapter_tensors(parameters).values()
        for tensor_name, shape in tensors
    }
    unmatched = sorted(wanted.keys() ^ stored.keys())
    differences = [f"{n} is only in {'it' if n in stored else 'the model'}" for n in unmatched]
    return differences + [
        f"{name} has shape {tuple(stored[name].shape)} instead of {shape}"
        for name, shape in wanted.items()
        if name in stored and stored[name].shape != shape
    ]


def _layers_to_adapt(
    model: PreTrainedModel, layers: Mapping[str, int], config: ModelConfig
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
        names = list(layers)
    else:
        names = _matching("target_modules", wanted, layers)
        entries = [wanted] if isinstance(wanted, str) else [[module] for module in wanted]
        for entry in entries:
            if not any(is_named(name, entry) for n in layers for name in names_in_files(n, 1)):
                raise _no_layer_error(model, layers, entry)
    left_out = set() if excluded is None else set(_matching("exclude_modules", excluded, layers))
    chosen = [name for name in names if name not in left_out]
    if not chosen:
        raise ConfigError(
            f"{_MODEL}.exclude_modules={excluded!r} leaves no layer of target_modules={wanted!r}; "
            "exclude fewer"
        )
    return chosen


def _matching(key: str, wanted: str | Sequence[str], layers: Mapping[str, int]) -> list[str]:
    """Return the named layers; those of experts by their names in files.

    Raises:
        ConfigError: some experts of a block are named and others are not.
    """
    matching = []
    for name, experts in layers.items():
        names = names_in_files(name, experts)
        named = [tensor_name for tensor_name in names if is_named(tensor_name, wanted)]
        if 0 < len(named) < len(names):
            unnamed = next(tensor_name for tensor_name in names if tensor_name not in named)
            raise ConfigError(
                f"{_MODEL}.{key}={wanted!r} names {named[0]} and not {unnamed}; experts of a layer "
                "are adapted together: name all of them, or none"
            )
        if named:
            matching.append(name)
    return matching


def _no_layer_error(
    model: PreTrainedModel, layers: Iterable[str], entry: str | Sequence[str]
) -> ConfigError:
    shown = entry if isinstance(entry, str) else entry[0]
    ends = sorted({name.rpartition(".")[2] for name in layers})
    return ConfigError(
        f"{_MODEL}.target_modules: {shown!r} names none of the linear layers inside this "
        f"{model.config.model_type} model, which take adapters; give {ALL_LINEAR}, or some of "
        f"{', '.join(ends)}"
    )


def write_config(
    folder: Path, model: nn.Module, parameters: Mapping[str, Tensor], model_path: str
) -> None:
    """Write the configuration of a model's adapters as peft does.

    Args:
        parameters: A and B of all adapted layers, including those of other stages.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    layers = {
        layer for n, p in parameters.items() for layer in names_in_files(_layer_name(n), p.shape[0])
    }
    adapter = next(iter(adapted_layers(model).values()))
    base = str(Path(model_path).absolute())
    write_adapter_config(folder, adapter.rank, adapter.scale * adapter.rank, layers, base)


@torch.no_grad()
def load_adapters(folder: Path, model: nn.Module, outline: Mapping[str, nn.Parameter]) -> float:
    """Replace the adapters in place, or this rank's part of them.

    Args:
        outline: the parameters of all stages.

    Returns:
        the sum of all their elements, to compare ranks by one number.

    Raises:
        CheckpointError: the folder holds no adapter, or adapters of other layers.
    """
    saved, parameters = read_adapter(folder), adapter_parameters(model)
    problems = _differences(select_adapters(outline), saved.tensors)
    scale = next(iter(adapted_layers(model).values())).scale
    if not problems and not math.isclose(saved.scale, scale):
        problems = [f"its scale is {saved.scale:g} instead of {scale:g}"]
    if problems:
        raise CheckpointError(
            f"{folder} does not fit the run: {problems[0]}; resume with the same "
            f"{_MODEL}.path, lora_rank, lora_alpha, target_modules and exclude_modules"
        )
    for name, parameter in parameters.items():
        _fill(name, parameter, saved.tensors.__getitem__)
    return sum(float(tensor.double().sum()) for tensor in saved.tensors.values())
