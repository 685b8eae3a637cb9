"""An NVIDIA GPU (or an AMD one under ROCm, which torch also calls ``cuda``)."""

from __future__ import annotations

import torch

from sluice.device.accelerator import Accelerator
from sluice.device.host import CUDA_VISIBLE_VARIABLE
from sluice.device.protocol import local_index
from sluice.errors import ConfigError

# Dense bfloat16, by words of a name, more words first: an RTX A4000 is no A40.
_PEAK_FLOPS = {
    rf"\b{words}\b": flops
    for words, flops in {
        "B200": 2250e12,
        "GB200": 2500e12,
        "H100 PCIe": 756e12,
        "H100": 989e12,
        "H200": 989e12,
        "GH200": 989e12,
        "H800": 989e12,
        "H20": 148e12,
        "A100": 312e12,
        "A800": 312e12,
        "L40S": 362e12,
        "L40": 181e12,
        "A40": 150e12,
        "L20": 120e12,
        "RTX 4090": 165e12,
    }.items()
}


class CudaDevice(Accelerator):
    """The GPU of the given index among the visible ones; collectives over NCCL.

    Args:
        index: ``None`` takes this process's own, see `local_index`.

    Raises:
        ConfigError: torch finds no GPU, or none of this index.
    """

    visible_devices_variable: str | None = CUDA_VISIBLE_VARIABLE

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f'device "cuda:{index or 0}": torch {torch.__version__} finds no GPU; install a '
                'CUDA build of torch and a driver it supports, or set the device to "cpu"'
            )
        count = torch.cuda.device_count()
        index = local_index(count) if index is None else index
        if index >= count:
            raise ConfigError(
                f'device "cuda:{index}": {count} GPU(s) visible, so the highest is '
                f'"cuda:{count - 1}"; correct the index or {self.visible_devices_variable}'
            )
        super().__init__("cuda", index, torch.cuda, _PEAK_FLOPS)
