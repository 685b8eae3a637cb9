"""Sizes as people read them."""

from __future__ import annotations

MIB, GIB = 1 << 20, 1 << 30


def gib(size: float) -> str:
    """``1.5 GiB``, or MiB below one tenth."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB"
