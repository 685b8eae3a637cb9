"""Facts about this host's GPUs, for whoever hands them out. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sluice.device.ascend_host import wants_npu

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/dev")
_DEVICE_FILE = re.compile(r"nvidia\d+")


def gpu_numbers(environment: Mapping[str, str], devices: Path = _DEVICES) -> tuple[str, ...]:
    """GPUs that a process started from here may use, by CUDA's numbers or by name.

    CUDA numbers what it sees from 0, whatever the driver calls the files: a container with the
    host's third GPU alone has a file nvidia2 and a GPU 0.

    Args:
        devices: where the driver puts one file for each.
    """
    visible = environment.get(VISIBLE_VARIABLE)
    if visible is not None:
        return tuple(one.strip() for one in visible.split(",") if one.strip())
    files = [file for file in devices.glob("nvidia*") if _DEVICE_FILE.fullmatch(file.name)]
    return tuple(str(number) for number in range(len(files)))


def wants_gpu(name: str | None, environment: Mapping[str, str], devices: Path = _DEVICES) -> bool:
    """Whether a process with this ``device`` key will compute on any GPU that there is.

    Args:
        name: as configured; ``None`` takes what is there. ``cuda:N`` has chosen already.
    """
    if name is None or name == "auto":
        there = bool(gpu_numbers(environment, devices))
        return there and not wants_npu(name, environment, devices)
    return name == "cuda"
