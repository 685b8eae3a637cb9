"""Shared memory against what collectives and engines of several processes put there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from sluice.doctor.byte_sizes import GIB, MIB, gib
from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, warning
from sluice.launch.device_share import device_share, gpu_share

FOLDER = "/dev/shm"  # noqa: S108 - its size is read; nothing is written
# The queue between vLLM's workers takes most of it, NCCL's buffers between neighbours the rest.
EACH_BYTES, LEAST_BYTES = 256 * MIB, GIB


@dataclass(frozen=True, slots=True)
class SharedMemoryFacts:
    """`total_bytes` and `free_bytes` of /dev/shm, ``None`` without it; processes on devices."""

    total_bytes: int | None
    free_bytes: int
    num_device_processes: int


def check_shared_memory(examined: Examined) -> Iterator[Finding]:
    """Containers have 64 MiB unless they are told otherwise."""
    total, free = _size()
    return shared_memory_findings(SharedMemoryFacts(total, free, device_processes(examined)))


def shared_memory_findings(facts: SharedMemoryFacts) -> Iterator[Finding]:
    """Whether it is enough."""
    count = facts.num_device_processes
    needed = max(LEAST_BYTES, count * EACH_BYTES) if count else 0
    if not needed:
        size = "none" if facts.total_bytes is None else gib(facts.total_bytes)
        yield fine(f"{FOLDER}: {size}; processes on the CPU use none of it")
        return
    there = "is missing"
    if facts.total_bytes is not None:
        there = f"has {gib(facts.free_bytes)} free of {gib(facts.total_bytes)}"
    if facts.free_bytes >= needed:
        yield fine(f"{FOLDER} {there}")
    else:
        yield warning(
            f"{FOLDER} {there}, and {count} processes on devices may take {gib(needed)}",
            "NCCL and engines of several processes end with a bus error where it is full",
            f"start the container with --shm-size={-(-needed // GIB)}g (shm_size in Compose, an "
            "emptyDir with medium Memory in Kubernetes), or enlarge it: mount -o "
            f"remount,size={-(-needed // GIB)}g {FOLDER}",
        )


def device_processes(examined: Examined) -> int:
    """Processes of the run that compute on a GPU or NPU of this machine."""
    config, replicas = examined.config, examined.config.sluice.rollout.replicas
    shares = (share(config, examined.environment) for share in (gpu_share, device_share))
    return sum(one.trainer_ranks + replicas * one.devices_per_replica for one in shares)


def _size() -> tuple[int | None, int]:
    try:
        found = os.statvfs(FOLDER)
    except OSError:
        return None, 0
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
