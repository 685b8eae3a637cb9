"""The protocol of an accelerator, and the collectives of each kind. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

BACKENDS: Mapping[str, str] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""torch.distributed's backend by kind of device."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most memory of one device in some span, bytes: of tensors, and with what torch keeps."""

    allocated_bytes: int
    reserved_bytes: int


class Device(Protocol):
    """One device of one kind. Constructing it checks that the hardware can be used.

    `set_device` makes a device current for the calling thread only: a thread that starts
    collectives or kernels calls it first. The CPU's settings hold for the whole process.
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
        """The environment variable that limits the devices a process sees, if the kind has one."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """The device of tensors."""
        ...

    def set_device(self) -> None:
        """Make it the calling thread's current device."""
        ...

    def leave_stream(self) -> None:
        """Let what this thread starts on it run beside the work of threads that compute."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued on it is done."""
        ...

    def take_peak_memory(self) -> PeakMemory | None:
        """Return this process's peak since the last call; ``None``: torch does not count it.

        Read from torch's allocator: nothing waits for the device.
        """
        ...

    def empty_cache(self) -> None:
        """Return unused memory that torch keeps to the driver; the host keeps its own."""
        ...

    def supports_bfloat16(self) -> bool:
        """Return whether its kernels compute with bfloat16."""
        ...

    def peak_flops(self) -> float | None:
        """Return dense bfloat16 operations a second by the data sheet; ``None``: not known."""
        ...


def rank_backends(kind: str) -> str:
    """Return what `init_process_group` takes for ranks whose gradients are on devices of `kind`.

    Commands and metrics travel between CPUs, so an accelerator's ranks have two backends.
    """
    backend = BACKENDS[kind]
    return backend if kind == "cpu" else f"cpu:{BACKENDS['cpu']},{kind}:{backend}"


def local_index(count: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return which of `count` visible devices is this process's own, if no index is configured.

    Ranks that torchrun starts on one machine see all devices and have different LOCAL_RANKs; a
    launcher that assigns devices makes only one visible.
    """
    rank = environment.get("LOCAL_RANK", "")
    return int(rank) if rank.isdecimal() and int(rank) < count else 0
