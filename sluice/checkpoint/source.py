"""Find out which kind of checkpoint a folder holds, from the names in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sluice.checkpoint.adapter_files import ADAPTER_CONFIG, ADAPTER_FOLDER
from sluice.errors import CheckpointError

HUGGINGFACE_FOLDER = "huggingface"
SHARD_NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_ROLES = ("actor", "critic")
_MEGATRON_NAMES = ("dist_ckpt", "transformer_config.json", "ckpt_contents.json")


class CheckpointFormat(StrEnum):
    """How the weights are stored."""

    HUGGING_FACE = "hugging_face"  # safetensors: sluice's own, and verl's hf_model
    VERL_FSDP = "verl_fsdp"  # a torch file a rank
    ADAPTER = "adapter"  # low-rank, beside the files of another model


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A model's files.

    `role` is the folder that was found (``global_step_N/actor``), in the format `ADAPTER` that of
    the adapter; `huggingface` holds configuration and tokenizer, and in the format `HUGGING_FACE`
    the weights.
    """

    role: Path
    huggingface: Path
    format: CheckpointFormat


def find_source(directory: Path, role: str = "actor") -> CheckpointSource:
    """Look at ``global_step_N``, a role's folder in it, or the ``huggingface`` folder itself.

    Args:
        role: ``actor`` or ``critic``; which to take where both are there.

    Raises:
        CheckpointError: no checkpoint is there, or one of a kind that cannot be read.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such folder; give a folder global_step_N")
    if role not in _ROLES:
        raise CheckpointError(f"role={role}: choose one of {', '.join(_ROLES)}")
    folder = directory / role if (directory / role).is_dir() else directory
    _refuse_megatron(folder)
    huggingface = folder / HUGGINGFACE_FOLDER
    for candidate in (huggingface, folder / ADAPTER_FOLDER, folder):
        if (candidate / ADAPTER_CONFIG).is_file():
            return CheckpointSource(candidate, huggingface, CheckpointFormat.ADAPTER)
    for candidate in (huggingface, folder):
        if any(candidate.glob("*.safetensors")):  # verl's hf_model is next to its shards
            return CheckpointSource(folder, candidate, CheckpointFormat.HUGGING_FACE)
    if any(SHARD_NAME.fullmatch(file.name) for file in folder.iterdir()):
        return CheckpointSource(folder, huggingface, CheckpointFormat.VERL_FSDP)
    raise CheckpointError(
        f"{directory} holds no model: neither {HUGGINGFACE_FOLDER}/*.safetensors nor "
        f"model_world_size_W_rank_R.pt; give a folder global_step_N or its {role} folder"
    )


def _refuse_megatron(folder: Path) -> None:
    names = [name for name in _MEGATRON_NAMES if (folder / name).exists()]
    if (folder / "model" / HUGGINGFACE_FOLDER).is_dir():
        raise CheckpointError(
            f"{folder} is a Megatron checkpoint of verl with Hugging Face weights; give "
            f"{folder / 'model' / HUGGINGFACE_FOLDER}"
        )
    if names:
        raise CheckpointError(
            f"{folder} is a Megatron checkpoint of verl ({names[0]}): its shards follow Megatron's "
            "own layers and need Megatron-Core to be read; merge it where verl is installed with "
            "`python -m verl.model_merger merge --backend megatron --local_dir "
            f"{folder} --target_dir OUT`"
        )
