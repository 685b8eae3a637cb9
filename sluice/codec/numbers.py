"""How large the numbers of the protocol may be."""

from __future__ import annotations

__all__ = ["MAX_NUMBER"]

MAX_NUMBER = 2**53
"""Steps, versions, positions and counters end here, so that a float64 holds every one."""
