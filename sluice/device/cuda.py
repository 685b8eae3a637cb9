"""An NVIDIA GPU (or an AMD one under ROCm, which torch also calls ``cuda``)."""

from __future__ import annotations

import torch

from sluice.device.host import CUDA_VISIBLE_VARIABLE
from sluice.device.protocol import BACKENDS, PeakMemory, local_index
from sluice.errors import ConfigError

# Dense bfloat16; what a name contains, longer parts first.
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "A40": 150e12,
    "L20": 120e12,
    "RTX 4090": 165e12,
}


class CudaDevice:
    """The GPU of the given index among the visible ones; collectives over NCCL.

    Args:
        index: ``None`` takes this process's own, see `local_index`.

    Raises:
        ConfigError: torch finds no GPU, or none of this index.
    """

    collective_backend = BACKENDS["cuda"]
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
        self._index = index

    @property
    def name(self) -> str:
        return f"cuda:{self._index}"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self._index)

    def set_device(self) -> None:
        torch.cuda.set_device(self._index)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)

    def take_peak_memory(self) -> PeakMemory:
        found = PeakMemory(
            torch.cuda.max_memory_allocated(self._index),
            torch.cuda.max_memory_reserved(self._index),
        )
        torch.cuda.reset_peak_memory_stats(self._index)
        return found

    def empty_cache(self) -> None:
        with torch.cuda.device(self._index):
            torch.cuda.empty_cache()

    def supports_bfloat16(self) -> bool:
        """Return whether the GPU supports it; below compute capability 8.0 torch emulates it."""
        with torch.cuda.device(self._index):
            return bool(torch.cuda.is_bf16_supported())

    def peak_flops(self) -> float | None:
        """Return what NVIDIA's data sheet says of a GPU of this name."""
        name = torch.cuda.get_device_name(self._index)
        return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)
