"""The host processor as a device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from sluice.device.collective import BACKENDS
from sluice.device.host_memory import keep_freed_memory
from sluice.device.protocol import MemoryInfo

_MEMINFO = Path("/proc/meminfo")


class CpuDevice:
    """The host's memory and cores; collectives over Gloo."""

    name = "cpu"
    collective_backend = BACKENDS["cpu"]
    visible_devices_variable: str | None = None

    @property
    def torch_device(self) -> torch.device:
        """``torch.device("cpu")``."""
        return torch.device("cpu")

    def set_device(self) -> None:
        """There is one CPU device; every thread is on it. Memory of freed tensors is kept."""
        keep_freed_memory()

    def synchronize(self) -> None:
        """CPU kernels are finished when they return."""

    def memory_info(self) -> MemoryInfo:
        """The host's memory; limits of a container are not taken into account."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MemoryInfo(free_bytes=_available_bytes(default=total), total_bytes=total)

    def empty_cache(self) -> None:
        """Nothing is given back: the next tensors would take as many pages, one fault at a time."""

    def supports_bfloat16(self) -> bool:
        """Always, if slowly on old processors."""
        return True


def _available_bytes(default: int) -> int:
    """Linux's estimate of what can be allocated without swapping; elsewhere `default`."""
    if not _MEMINFO.exists():
        return default
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) * 1024
    return default
