"""What sluice needs to know of an accelerator, and nothing more."""

from __future__ import annotations

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
