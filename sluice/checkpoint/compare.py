"""Compares the weights of two Hugging Face directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sluice.checkpoint.safetensors_files import read_tensor, tensor_names

TOLERANCE = 1e-6  # verl's, absolute and relative


def compare_weights(
    found: Path,
    wanted: Path,
    on_tensor: Callable[[int, int], None],
    tolerance: float = TOLERANCE,
) -> list[str]:
    """A sentence for every tensor that differs in presence, shape, dtype or value.

    Values are close if ``|found - wanted| <= tolerance * (1 + |wanted|)``, in float64; two
    not-a-numbers are equal.

    Raises:
        CheckpointError: a file of either directory is damaged.
    """
    ours, theirs = tensor_names(found), tensor_names(wanted)
    differences = [f"{name}: only in {found}" for name in sorted(ours.keys() - theirs.keys())]
    differences += [f"{name}: only in {wanted}" for name in sorted(theirs.keys() - ours.keys())]
    shared = sorted(ours.keys() & theirs.keys())
    for number, name in enumerate(shared, 1):
        one, other = read_tensor(ours[name], name), read_tensor(theirs[name], name)
        difference = _difference(one, other, tolerance)
        if difference is not None:
            differences.append(f"{name}: {difference}")
        on_tensor(number, len(shared))
    return differences


def _difference(found: Tensor, wanted: Tensor, tolerance: float) -> str | None:
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    if found.dtype != wanted.dtype:
        return f"dtype {_name(found)} instead of {_name(wanted)}"
    close = torch.isclose(
        found.double(), wanted.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )
    if bool(close.all()):
        return None
    gap = (found.double() - wanted.double()).abs().max()
    return f"{int((~close).sum())} of {close.numel()} values differ, by up to {float(gap):.3g}"


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
