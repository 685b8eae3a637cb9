"""Devices by memory size: operations, memory and link rates from data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sluice.config.memory.rollout import GIB
from sluice.errors import ConfigError

_TEXT = re.compile(r"^(\d+(?:\.\d+)?)\s*(?:gb|gib|g)?$", re.IGNORECASE)
USABLE = 0.9
"""Share of the memory that a plan may fill; kernels, fragmentation and the driver take the rest."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """One kind of device.

    Args:
        name: an example.
        gib: memory, GiB; makers write GB.
        flops: dense bfloat16 floating-point operations a second.
        memory_rate: bytes a second from its memory.
        link_rate: bytes a second to the devices beside it.
    """

    name: str
    gib: float
    flops: float
    memory_rate: float
    link_rate: float

    @property
    def size(self) -> float:
        """The memory, bytes."""
        return self.gib * GIB

    @property
    def usable_bytes(self) -> float:
        """Bytes that a trainer's plan may fill."""
        return self.size * USABLE


_KINDS = (
    DeviceKind("RTX 4090", 24, 165e12, 1.0e12, 25e9),
    DeviceKind("Ascend 910B", 64, 313e12, 1.6e12, 56e9),
    DeviceKind("A100", 80, 312e12, 2.0e12, 300e9),
)


def device_kind(text: str) -> DeviceKind:
    """Return the device that ``80GB`` means; of another size, as fast as the nearest known one.

    Raises:
        ConfigError: the text is no size.
    """
    matched = _TEXT.match(text.strip())
    if matched is None or float(matched[1]) <= 0:
        raise ConfigError(f"--device {text!r} is no size of memory; give one such as 80GB")
    gib = float(matched[1])
    nearest = min(_KINDS, key=lambda kind: abs(kind.gib - gib))
    return DeviceKind(nearest.name, gib, nearest.flops, nearest.memory_rate, nearest.link_rate)
