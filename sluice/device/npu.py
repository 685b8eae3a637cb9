"""A Huawei Ascend NPU. The only file that loads torch_npu, and only when an NPU is asked for.

Importing torch_npu without CANN fails in more than one way (``ImportError`` for its own
libraries, ``OSError`` for the driver's, ``RuntimeError`` from torch's autoloading of backends).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Protocol, cast

import torch

from sluice.device.protocol import MemoryInfo
from sluice.errors import ConfigError

_PACKAGE = "torch_npu"


class _NpuRuntime(Protocol):
    """The part of ``torch_npu.npu`` that is used here."""

    def is_available(self) -> bool: ...

    def device_count(self) -> int: ...

    def set_device(self, device: int) -> None: ...

    def synchronize(self, device: int) -> None: ...

    def mem_get_info(self, device: int) -> tuple[int, int]: ...


def is_installed() -> bool:
    """Whether the package is there; says nothing about hardware. Imports nothing."""
    return importlib.util.find_spec(_PACKAGE) is not None


class NpuDevice:
    """The NPU of the given index among the visible ones; collectives over HCCL.

    Raises:
        ConfigError: torch_npu cannot be loaded, or there is no NPU of this index.
    """

    collective_backend = "hccl"
    visible_devices_variable: str | None = "ASCEND_RT_VISIBLE_DEVICES"

    def __init__(self, index: int = 0) -> None:
        self._runtime = _load_runtime(index)
        count = self._runtime.device_count() if self._runtime.is_available() else 0
        if index >= count:
            raise ConfigError(
                f'device "npu:{index}": {count} NPU(s) visible; check `npu-smi info`, the index '
                f'and {self.visible_devices_variable}, or set the device to "cpu"'
            )
        self._index = index

    @property
    def name(self) -> str:
        """``npu:N``."""
        return f"npu:{self._index}"

    @property
    def torch_device(self) -> torch.device:
        """``torch.device("npu", N)``; the kind is known to torch once torch_npu is loaded."""
        return torch.device("npu", self._index)

    def set_device(self) -> None:
        """Make it the calling thread's current device."""
        self._runtime.set_device(self._index)

    def synchronize(self) -> None:
        """Wait for all streams of the NPU."""
        self._runtime.synchronize(self._index)

    def memory_info(self) -> MemoryInfo:
        """As the driver reports it: other processes' memory counts as used."""
        free, total = self._runtime.mem_get_info(self._index)
        return MemoryInfo(free_bytes=free, total_bytes=total)


def _load_runtime(index: int) -> _NpuRuntime:
    try:
        module = importlib.import_module(_PACKAGE)
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f'device "npu:{index}": {_PACKAGE} cannot be loaded ({error}); install the torch-npu '
            f"wheel made for torch {torch.__version__} and source CANN's set_env.sh, or set the "
            'device to "cpu"'
        ) from error
    return cast("_NpuRuntime", module.npu)
