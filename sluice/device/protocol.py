"""What sluice needs of an accelerator, and which collectives its kind has. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of one device in bytes. `free_bytes` is what a new allocation could still get."""

    free_bytes: int
    total_bytes: int


class Device(Protocol):
    """One device of one kind. Constructing it checks that the hardware can be used.

    What `set_device` makes current is so for the calling thread only: a thread that starts
    collectives or kernels calls it first. What the CPU sets beside it holds for the process.
    """

    @property
    def name(self) -> str:
        """``cpu``, ``cuda:N`` or ``npu:N``."""
        ...

    @property
    def collective_backend(self) -> str:
        """The torch.distributed backend for tensors on it: ``gloo``, ``nccl`` or ``hccl``."""
        ...

    @property
    def visible_devices_variable(self) -> str | None:
        """The environment variable that says which ones a process sees, if the kind has one."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where tensors are put."""
        ...

    def set_device(self) -> None:
        """Make it the calling thread's current device."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued on it is done."""
        ...

    def memory_info(self) -> MemoryInfo:
        """Free and total memory, as the driver (or the kernel) reports it now."""
        ...

    def empty_cache(self) -> None:
        """Give memory that torch keeps but nobody uses back to the driver; none of the host's."""
        ...

    def supports_bfloat16(self) -> bool:
        """Whether its kernels compute with bfloat16."""
        ...


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
