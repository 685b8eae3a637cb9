"""An NVIDIA GPU (or an AMD one under ROCm, which torch also calls ``cuda``), and what NPUs share
with it: torch drives both by functions of the same names.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from types import ModuleType

import torch

from sluice.device.host import CUDA_VISIBLE_VARIABLE
from sluice.device.protocol import BACKENDS, PeakMemory, local_index
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


class Accelerator:
    """The device of the given index among the visible ones of its kind.

    Args:
        kind: torch's name of it.
        runtime: ``torch.cuda``, or a module with the same functions.
        peaks: bfloat16 operations a second by the patterns of its names, the first that fits.
    """

    def __init__(
        self, kind: str, index: int, runtime: ModuleType, peaks: Mapping[str, float]
    ) -> None:
        self.collective_backend = BACKENDS[kind]
        self._kind, self._index = kind, index
        self._runtime, self._peaks = runtime, peaks
        self._own_stream: object | None = None

    @property
    def name(self) -> str:
        return f"{self._kind}:{self._index}"

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self._kind, self._index)

    def set_device(self) -> None:
        self._runtime.set_device(self._index)

    def use_own_stream(self) -> None:
        self.set_device()
        # One for all threads: torch keeps freed memory for the stream that it was allocated on.
        # Groups of collectives take turns on torch's 32 streams of priority 0: one that got this
        # stream would hold up the others.
        self._own_stream = self._own_stream or self._runtime.Stream(self._index, priority=-1)
        self._runtime.set_stream(self._own_stream)

    def synchronize(self) -> None:
        self._runtime.synchronize(self._index)

    def take_peak_memory(self) -> PeakMemory:
        runtime, index = self._runtime, self._index
        peak = PeakMemory(runtime.max_memory_allocated(index), runtime.max_memory_reserved(index))
        runtime.reset_peak_memory_stats(index)
        return peak

    def empty_cache(self) -> None:
        self.set_device()
        self._runtime.empty_cache()

    def supports_bfloat16(self) -> bool:
        """Return what torch says: of GPUs before compute capability 8.0, whether it emulates it."""
        self.set_device()
        return bool(self._runtime.is_bf16_supported())

    def peak_flops(self) -> float | None:
        """Return what is published of a device of this name."""
        name = self._runtime.get_device_name(self._index)
        return next((flops for part, flops in self._peaks.items() if re.search(part, name)), None)


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


def pin(memory: torch.Tensor, device: torch.device) -> None:
    """Let a GPU copy from and to a tensor on the host directly, while it or a view of it lives.

    torch's own pinned memory takes the next power of two, for weights up to twice their bytes.

    Raises:
        ConfigError: CUDA refuses.
    """
    if not memory.nbytes:
        return
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    with torch.cuda.device(device):  # a thread's first call would take memory of another one
        error = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if error:
        raise ConfigError(
            f"{device}: {memory.nbytes / 2**30:.1f} GiB of host memory for weights cannot be "
            f"pinned (CUDA error {error}); give the machine or the container more memory (sluice "
            "plan says how much)"
        )
    # At the end of the process the driver may be gone already.
    storage = memory.untyped_storage()
    weakref.finalize(storage, runtime.cudaHostUnregister, address).atexit = False
