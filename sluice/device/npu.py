"""A Huawei Ascend NPU. The only file that loads torch_npu, and only when an NPU is requested.

Importing torch_npu without CANN fails in more than one way (``ImportError`` for its own
libraries, ``OSError`` for the driver's, ``RuntimeError`` from torch's autoloading of backends).
Nothing here was ever run on an NPU; ``docs/npu.md`` lists what a stand-in has shown.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from sluice.device.ascend_environment import VISIBLE_VARIABLE
from sluice.device.cuda import Accelerator
from sluice.device.protocol import local_index
from sluice.errors import ConfigError

_PACKAGE = "torch_npu"

# Dense float16, which is also the rate of bfloat16; what a name of torch_npu contains, longer parts
# first. An Atlas A3 shows each of its two dies as a device, under a number in place of B2, B3, B4.
# Of B1, and its number 939, no figure is published.
_PEAK_FLOPS = {
    "910B2C": 354e12,
    "910B2": 376e12,
    "910B3": 313e12,
    "910B4": 280e12,
    "910_938": 376e12,
    "910_937": 313e12,
    "910_936": 280e12,
}


def hccl_options(config: Mapping[str, int]) -> object | None:
    """Return HCCL's options for one group, the second argument of its creator.

    Args:
        config: HCCL's own names, such as ``hccl_buffer_size`` (MB); see `hccl_group_config`.

    Returns:
        ``None`` for an empty `config`, or if torch_npu has no such options: its defaults hold.
    """
    if not config:
        return None
    extension: Any = getattr(sys.modules.get(_PACKAGE), "_C", None)
    backend: Any = getattr(getattr(extension, "_distributed_c10d", None), "ProcessGroupHCCL", None)
    if not hasattr(getattr(backend, "Options", None), "hccl_config"):
        return None
    options: object = backend.Options()
    options.hccl_config = dict(config)  # type: ignore[attr-defined]  # torch_npu has no stubs
    return options


class NpuDevice(Accelerator):
    """The NPU of the given index among the visible ones; collectives over HCCL.

    Args:
        index: ``None`` takes this process's own, see `local_index`.

    Raises:
        ConfigError: torch_npu cannot be loaded, or there is no NPU of this index.
    """

    visible_devices_variable: str | None = VISIBLE_VARIABLE

    def __init__(self, index: int | None = None) -> None:
        runtime = _load_runtime()
        count = runtime.device_count() if runtime.is_available() else 0
        index = local_index(count) if index is None else index
        if index >= count:
            visible = os.environ.get(VISIBLE_VARIABLE)
            raise ConfigError(
                f'device "npu:{index}": {count} NPU(s) visible '
                f"({VISIBLE_VARIABLE} is {'not set' if visible is None else repr(visible)}); check "
                "`npu-smi info`, that this user may open /dev/davinci*, the index and that "
                'variable, or set the device to "cpu"'
            )
        super().__init__("npu", index, runtime, _PEAK_FLOPS)


def _load_runtime() -> ModuleType:
    try:
        module = importlib.import_module(_PACKAGE)
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f'device "npu": {_PACKAGE} cannot be loaded ({error}); install the torch-npu '
            f"wheel made for torch {torch.__version__} and source CANN's set_env.sh (usually "
            "/usr/local/Ascend/ascend-toolkit/set_env.sh) in the shell that starts the process, "
            'or set the device to "cpu"'
        ) from error
    runtime: ModuleType = module.npu
    return runtime
