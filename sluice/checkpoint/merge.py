"""Write the model of a checkpoint as one Hugging Face directory."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from sluice.checkpoint.adapter_files import ADAPTER_CONFIG, AdapterMerge, read_adapter
from sluice.checkpoint.safetensors_files import copy_weights, is_weight_file, tensor_names
from sluice.checkpoint.source import CheckpointFormat, CheckpointSource
from sluice.checkpoint.verl_shards import assemble_model, refuse_adapters
from sluice.errors import CheckpointError

CONFIG_FILE = "config.json"
EMBEDDING_OUTPUT = "lm_head.weight"
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "keep": None,
}

OnTensor = Callable[[int, int], None]
DtypeName = Literal["bfloat16", "float16", "float32", "keep"]

_HEAD = re.compile(r"(For\w+|LMHeadModel)$")


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """How the directory is written.

    Args:
        dtype: of the weights; ``keep`` leaves them as saved.
        is_value_model: the model has a value head (a critic), even if its configuration names none.
        tie_word_embeddings: leave out ``lm_head.weight``, which must equal the input embedding.
        trust_remote_code: run model code that ships with the checkpoint.
    """

    dtype: DtypeName = "bfloat16"
    is_value_model: bool = False
    tie_word_embeddings: bool = False
    trust_remote_code: bool = False


def merge_checkpoint(
    source: CheckpointSource, target: Path, options: MergeOptions, on_tensor: OnTensor
) -> None:
    """Write weights, configuration and tokenizer; `target` appears when it is complete.

    Args:
        target: new, or an empty folder.
        on_tensor: called with (tensors done, tensors in all).

    Raises:
        CheckpointError: `target` holds something, or the checkpoint cannot be read or is none of
            the model its configuration describes.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not empty; name a new folder for the model")
    is_adapter = source.format is CheckpointFormat.ADAPTER
    if not is_adapter and not (source.huggingface / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{source.huggingface / CONFIG_FILE} is missing, and the model cannot be built without "
            "it; copy the configuration and tokenizer of the base model there"
        )
    partial = target.absolute().with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write(source, partial, options, on_tensor)
        if target.exists():
            target.rmdir()
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(
    source: CheckpointSource, target: Path, options: MergeOptions, on_tensor: OnTensor
) -> None:
    if source.format is CheckpointFormat.ADAPTER:
        _write_adapted(source, target, options, on_tensor)
        return
    _copy_others(source.huggingface, target)
    _edit_config(target, options)
    dtype = _DTYPES[options.dtype]
    dropped = {EMBEDDING_OUTPUT} if options.tie_word_embeddings else set()
    if source.format is CheckpointFormat.HUGGING_FACE:
        refuse_adapters(source.huggingface, tensor_names(source.huggingface))
        copy_weights(source.huggingface, target, dtype, dropped, on_tensor)
    else:
        assemble_model(
            source.role,
            target,
            dtype,
            dropped,
            trust_remote_code=options.trust_remote_code,
            on_tensor=on_tensor,
        )


def _write_adapted(
    source: CheckpointSource, target: Path, options: MergeOptions, on_tensor: OnTensor
) -> None:
    """Write the base model with the adapter added to its weights."""
    adapter = read_adapter(source.role)
    if not adapter.base and (source.role.parent / CONFIG_FILE).is_file():
        # verl's merger writes the adapter below its model, and does not name it.
        adapter = replace(adapter, base=str(source.role.parent))
    base = Path(adapter.base)
    if not adapter.base or not (base / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{source.role} adapts the model in '{adapter.base}', which holds no {CONFIG_FILE}; "
            f"write its folder as base_model_name_or_path into {source.role / ADAPTER_CONFIG}"
        )
    for folder in (base, source.huggingface):
        _copy_others(folder, target)
    _edit_config(target, options)
    dropped = {EMBEDDING_OUTPUT} if options.tie_word_embeddings else set()
    change = AdapterMerge(adapter, tensor_names(base))
    copy_weights(base, target, _DTYPES[options.dtype], dropped, on_tensor, change)


def _copy_others(folder: Path, target: Path) -> None:
    """Copy all files but weights."""
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.is_file() and not is_weight_file(file):
            shutil.copyfile(file, target / file.name)


def _edit_config(target: Path, options: MergeOptions) -> None:
    file = target / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        architecture = str((config.get("architectures") or [""])[0])
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{CONFIG_FILE} of the checkpoint cannot be read ({error}); copy the base model's there"
        ) from error
    if options.dtype != "keep":
        config.pop("torch_dtype", None)  # the former spelling
        config["dtype"] = options.dtype
    if options.tie_word_embeddings:
        config["tie_word_embeddings"] = True
    if options.is_value_model and "ForTokenClassification" not in architecture:
        family = _HEAD.sub("", architecture)
        config["architectures"] = [f"{family}ForTokenClassification"]
        config["id2label"], config["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
