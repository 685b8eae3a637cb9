"""Where tests and benchmarks for accelerators run: on GPUs, or, as a rehearsal, on the CPU.

A rehearsal shows that a test or a script works, with Gloo in place of NCCL; it proves nothing about
a GPU.
"""

from __future__ import annotations

import os

import torch

REHEARSAL_VARIABLE = "SLUICE_REHEARSE"
_PRETENDED = 4


def is_rehearsal() -> bool:
    """Return whether the CPU stands in for GPUs."""
    return os.environ.get(REHEARSAL_VARIABLE) == "1"


def accelerator() -> str:
    """Return the device key: ``cuda``, in a rehearsal ``cpu``."""
    return "cpu" if is_rehearsal() else "cuda"


def numbered(index: int) -> str:
    """Return the device key of one GPU; in a rehearsal ``cpu``."""
    return "cpu" if is_rehearsal() else f"cuda:{index}"


def num_accelerators() -> int:
    """Return the number of GPUs; a rehearsal pretends to have some."""
    return _PRETENDED if is_rehearsal() else torch.cuda.device_count()
