"""Which collectives a kind of device has. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

BACKENDS: Mapping[str, str] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""torch.distributed's backend by kind of device."""

WITHOUT_GATHER = frozenset({"hccl"})
"""Backends that refuse `gather`; an all-gather that all but one rank forget takes its place."""


def rank_backends(kind: str) -> str:
    """What `init_process_group` takes for ranks whose gradients are on devices of `kind`.

    Commands and metrics travel between CPUs, so that an accelerator's ranks have two backends.
    """
    backend = BACKENDS[kind]
    return backend if kind == "cpu" else f"cpu:{BACKENDS['cpu']},{kind}:{backend}"


def local_index(count: int, environment: Mapping[str, str] = os.environ) -> int:
    """Which of `count` visible devices is this process's own, if nobody says.

    Ranks that torchrun starts on one machine all see all devices, and are told apart by LOCAL_RANK;
    a launcher that hands out devices leaves one to be seen.
    """
    rank = environment.get("LOCAL_RANK", "")
    return int(rank) if rank.isdecimal() and int(rank) < count else 0
