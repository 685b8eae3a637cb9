"""The most memory that tensors took on a device: since the start, and in each phase of a step."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.device.protocol import Device

_GIB = float(1 << 30)


class MemoryPeaks:
    """Peaks of one rank's device; empty where torch counts none (the CPU).

    The owner's thread ends phases; nothing waits for the device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._allocated = self._reserved = 0
        self._phases: dict[str, int] = {}

    def end_phase(self, name: str | None) -> None:
        """Count the peak since the last call for phase `name`; ``None``: for no phase."""
        peak = self._device.take_peak_memory()
        if peak is None:
            return
        self._allocated = max(self._allocated, peak.allocated_bytes)
        self._reserved = max(self._reserved, peak.reserved_bytes)
        if name is not None:
            self._phases[name] = max(self._phases.get(name, 0), peak.allocated_bytes)

    def give_back(self) -> None:
        """Give blocks that torch holds for later tensors back to the device's driver."""
        self._device.empty_cache()

    def take_metrics(self) -> Mapping[str, float]:
        """Return ``perf/max_memory_*_gb`` since the start and ``memory_gb/<phase>`` since the last
        call, in GiB; empty before a phase has ended.
        """
        if not self._allocated:
            return {}
        phases, self._phases = self._phases, {}
        return {
            **{f"memory_gb/{name}": size / _GIB for name, size in phases.items()},
            "perf/max_memory_allocated_gb": self._allocated / _GIB,
            "perf/max_memory_reserved_gb": self._reserved / _GIB,
        }
