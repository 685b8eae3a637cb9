"""Choose a device by name, or the best one that the host has."""

from __future__ import annotations

import logging
import re

import torch

from sluice.device.cpu import CpuDevice
from sluice.device.cuda import CudaDevice
from sluice.device.host import has_torch_npu
from sluice.device.npu import NpuDevice
from sluice.device.protocol import Device
from sluice.errors import ConfigError

_log = logging.getLogger(__name__)
_NAME = re.compile(r"(?P<kind>cpu|cuda|npu)(?::(?P<index>\d+))?")


def select_device(name: str | None = None) -> Device:
    """Return the device called `name`; for ``None`` or ``auto`` the first NPU, else GPU, else CPU.

    Args:
        name: ``auto``, ``cpu``, ``cuda``, ``cuda:N``, ``npu`` or ``npu:N``; N counts the visible
            devices from 0. Without N it is the first, or the device of LOCAL_RANK (`local_index`).

    Raises:
        ConfigError: the name is unknown, or the device cannot be used here.
    """
    if name is None or name == "auto":
        return _detect()
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f'device "{name}": unknown; use "auto", "cpu", "cuda", "cuda:N", "npu" or "npu:N"'
        )
    index = None if match["index"] is None else int(match["index"])
    if match["kind"] == "cuda":
        return CudaDevice(index)
    if match["kind"] == "npu":
        return NpuDevice(index)
    return CpuDevice()


def _detect() -> Device:
    if has_torch_npu():
        try:
            return NpuDevice()
        except ConfigError as error:
            _log.warning("torch_npu is installed but not used: %s", error)
    if torch.cuda.is_available():
        return CudaDevice()
    return CpuDevice()


def transfer_device(name: str | None, backend: str | None) -> Device:
    """Return the device that weights are sent from: the trainer's own, or the CPU for ``gloo``.

    Args:
        backend: ``sluice.weights.backend``; ``None`` is the device's own.

    Raises:
        ConfigError: the device has no such backend.
    """
    if backend == "gloo":
        return CpuDevice()
    device = select_device(name)
    if backend is not None and backend != device.collective_backend:
        raise ConfigError(
            f"sluice.weights.backend={backend}: {device.name} uses {device.collective_backend}; "
            "use that, gloo, or leave it out"
        )
    return device
