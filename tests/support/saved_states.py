"""The tensors of a checkpoint's model, whole, whatever ranks wrote it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from services.trainer.learner.sharded_state import StateFiles

Weights = dict[str, torch.Tensor]


def model_tensors(role: Path) -> Weights:
    """By published name, from all files."""
    files = (role / "huggingface").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def optimizer_tensors(role: Path) -> Weights:
    """Whole, by name."""
    files = StateFiles(role, "optimizer")
    found: Weights = {}
    for name in files.names:
        shape, dtype = files.spec(name)
        found[name] = torch.full(shape or (1,), torch.nan, dtype=dtype)
        files.fill(found[name], name, (0,) * max(1, len(shape)))
    return found


def are_equal(ours: Path, theirs: Path) -> bool:
    """Whether weights and moments of two checkpoints have the same names and bits."""
    for read in (model_tensors, optimizer_tensors):
        one, other = read(ours), read(theirs)
        if not one or one.keys() != other.keys():
            return False
        if not all(torch.equal(one[name], other[name]) for name in one):
            return False
    return True
