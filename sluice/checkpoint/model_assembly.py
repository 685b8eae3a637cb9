"""Builds the model that verl's shards belong to, and lets transformers write it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
)
from transformers.utils import logging as transformers_logging

from sluice.checkpoint.safetensors_files import check_equal_embeddings, embedding_name
from sluice.checkpoint.verl_shards import Shape, read_shards
from sluice.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_READABLE = 0o644
_FAMILIES: Mapping[str, Callable[..., object]] = {
    "ForTokenClassification": AutoModelForTokenClassification.from_config,
    "ForCausalLM": AutoModelForCausalLM.from_config,
    "LMHeadModel": AutoModelForCausalLM.from_config,
    "ForConditionalGeneration": AutoModelForImageTextToText.from_config,
    "ForVision2Seq": AutoModelForImageTextToText.from_config,
}


def assemble_model(
    shards: Path,
    target: Path,
    dtype: torch.dtype | None,
    dropped: Collection[str],
    *,
    trust_remote_code: bool,
    on_tensor: Callable[[int, int], None],
) -> None:
    """Join `shards` and write weights and ``config.json`` into `target`.

    Args:
        shards: folder with ``model_world_size_W_rank_R.pt``.
        target: holds the model's configuration and gets the rest.
        dtype: what floating-point weights become; ``None`` leaves them.
        dropped: tied outputs to leave out; each must equal the input embedding.
        trust_remote_code: run model code that ships with the checkpoint.
        on_tensor: called with (tensors done, tensors in all).

    Raises:
        CheckpointError: a shard is missing or damaged, or the weights are not those of the model
            that the configuration describes.
    """
    transformers_logging.disable_progress_bar()
    model = _empty_model(target, trust_remote_code=trust_remote_code)
    shapes: dict[str, Shape] = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    weights = read_shards(shards, dtype, shapes, on_tensor)
    _refuse_adapters(shards, weights)
    for name in sorted(dropped & weights.keys()):
        embedding = embedding_name(weights)
        tied = weights[embedding] if embedding else None
        check_equal_embeddings(weights.pop(name), tied, name)
    if _fits(model, weights):
        _save(model, weights, target)
    else:
        _save_by_saved_names(model, weights, target, trust_remote_code=trust_remote_code)
    for file in target.glob("*.safetensors"):
        file.chmod(_READABLE)  # safetensors lets only the owner read it


def _empty_model(target: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(
            target, local_files_only=True, trust_remote_code=trust_remote_code
        )
        with torch.device("meta"):
            built = _builder(config)(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"config.json of the checkpoint describes no model that transformers builds ({error}); "
            "copy the base model's configuration into its huggingface folder"
        ) from error
    return cast("PreTrainedModel", built)


def _builder(config: PreTrainedConfig) -> Callable[..., object]:
    names = config.architectures or []
    for ending, build in _FAMILIES.items():
        if any(name.endswith(ending) for name in names):
            return build
    raise CheckpointError(
        f"config.json names the architectures {names}, and none of them can be merged; known "
        f"endings: {', '.join(_FAMILIES)}"
    )


def _refuse_adapters(shards: Path, names: Collection[str]) -> None:
    adapters = [name for name in names if ".lora_" in name or name.startswith("base_model.model.")]
    if adapters:
        raise CheckpointError(
            f"{shards} holds LoRA weights (first {min(adapters)}), which are not merged here; use "
            "`python -m verl.model_merger merge --backend fsdp` and then peft's merge_and_unload"
        )


def _fits(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> bool:
    wanted = model.state_dict().keys()
    tied = set(model.all_tied_weights_keys)
    return not (wanted - weights.keys() - tied) and not (weights.keys() - wanted)


def _save(model: PreTrainedModel, weights: Mapping[str, Tensor], target: Path) -> None:
    model.load_state_dict(dict(weights), strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = model.dtype
    model.save_pretrained(target)


def _save_by_saved_names(
    model: PreTrainedModel, weights: Mapping[str, Tensor], target: Path, *, trust_remote_code: bool
) -> None:
    """Weights of another version of transformers, whose names it converts while loading."""
    save_torch_state_dict(dict(weights), target)
    loading: object = type(model).from_pretrained(
        target, local_files_only=True, output_loading_info=True, trust_remote_code=trust_remote_code
    )
    _, report = cast("tuple[object, Mapping[str, Collection[str]]]", loading)
    wrong = sorted({*report["missing_keys"], *map(str, report["unexpected_keys"])})
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} weights of the shards do not fit {type(model).__name__}, first "
            f"{wrong[0]}; give the configuration of the model that was trained, or "
            "--is-value-model for a critic"
        )
