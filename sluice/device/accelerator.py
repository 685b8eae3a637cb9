"""What GPUs and NPUs share: torch drives both by functions of the same names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType

import torch

from sluice.device.protocol import BACKENDS, PeakMemory


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

    @property
    def name(self) -> str:
        return f"{self._kind}:{self._index}"

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self._kind, self._index)

    def set_device(self) -> None:
        self._runtime.set_device(self._index)

    def synchronize(self) -> None:
        self._runtime.synchronize(self._index)

    def take_peak_memory(self) -> PeakMemory:
        runtime, index = self._runtime, self._index
        found = PeakMemory(runtime.max_memory_allocated(index), runtime.max_memory_reserved(index))
        runtime.reset_peak_memory_stats(index)
        return found

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
