"""CPU seconds of a process and of all that it started, from the kernel's accounts (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
# Of the fields after the command's name: parent, own time and that of ended children (proc(5)).
_PARENT, _TIMES = 1, slice(11, 15)


def cpu_seconds(pid: int) -> float:
    """CPU seconds of process `pid` and its descendants so far, ended ones included where their
    parent has waited for them."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue  # it has ended meanwhile
        children.setdefault(int(fields[_PARENT]), []).append(int(entry.name))
        seconds[int(entry.name)] = sum(map(int, fields[_TIMES])) / _TICKS
    found, total = [pid], 0.0
    for member in found:
        total += seconds.get(member, 0.0)
        found += children.get(member, [])
    return total
