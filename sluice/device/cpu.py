"""The host as a device, and its allocator's settings."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

from sluice.device.host import available_memory
from sluice.device.protocol import BACKENDS

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGEST_TRIM_THRESHOLD = 2**31 - 1
_LARGEST_MMAP_THRESHOLD = 2**25
"""glibc's upper bound on 64-bit machines; it maps larger blocks afresh in any case."""


def keep_freed_memory() -> None:
    """Make this process keep freed memory: its first heap, while at most 2 GiB are free there.

    Only glibc can do so; with another C library nothing changes.
    """
    # glibc returns free memory at the top of its heap to the kernel, and maps each large block
    # afresh; the next tensor then takes its pages one fault at a time, each of them zeroed. A
    # training pass over 2,600 tokens of the quickstart's model took 900 to 1,400 such faults; with
    # these limits it takes 25 to 50, and 3 to 7 % less time (2026-11-23). Threads other than the
    # first have heaps of 64 MiB each, and glibc always keeps one of them.
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "mallopt"):
        return
    library.mallopt(_M_TRIM_THRESHOLD, _LARGEST_TRIM_THRESHOLD)
    library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


class CpuDevice:
    """The host's memory and cores; collectives over Gloo."""

    name = "cpu"
    collective_backend = BACKENDS["cpu"]
    visible_devices_variable: str | None = None

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def set_device(self) -> None:
        """Keep the memory of freed tensors. Every thread is on the one CPU device already."""
        keep_freed_memory()

    def leave_stream(self) -> None:
        """Do nothing: threads run beside each other."""

    def synchronize(self) -> None:
        """Do nothing: CPU kernels are finished when they return."""

    def take_peak_memory(self) -> None:
        """Return nothing: torch does not count host memory."""

    def empty_cache(self) -> None:
        """Keep everything: the next tensors would take as many pages, one fault at a time."""

    def supports_bfloat16(self) -> bool:
        """Return true: always, if slowly on old processors."""
        return True

    def peak_flops(self) -> None:
        """Return nothing: it depends on cores, clock and instructions."""


def used_memory_bytes() -> int:
    """Return the host's memory that is not available, without regard to a container's limits."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = available_memory()
    return total - (total if available is None else available)
