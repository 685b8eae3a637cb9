"""Memory of the trainer's machine and of its rank 0 device."""

from __future__ import annotations

import torch

from sluice.device.cpu import CpuDevice

_GIB = float(1 << 30)


def memory_metrics(device: torch.device) -> dict[str, float]:
    """``perf/cpu_memory_used_gb`` and, of an accelerator, ``perf/max_memory_*_gb``; GiB.

    Args:
        device: rank 0's; its peaks are those of this process since its start.
    """
    host = CpuDevice().memory_info()
    metrics = {"perf/cpu_memory_used_gb": (host.total_bytes - host.free_bytes) / _GIB}
    if device.type != "cpu":
        peaks = torch.get_device_module(device)
        metrics["perf/max_memory_allocated_gb"] = peaks.max_memory_allocated(device) / _GIB
        metrics["perf/max_memory_reserved_gb"] = peaks.max_memory_reserved(device) / _GIB
    return metrics
