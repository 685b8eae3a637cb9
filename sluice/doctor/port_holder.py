"""Which process listens on a port of this machine, as far as this user may know. Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROCESSES = Path("/proc")
_LISTENS = "0A"


def port_holder(port: int, processes: Path = _PROCESSES) -> str | None:
    """Name and number of a process that listens on it; ``None`` if it is not to be found."""
    sockets = set(_sockets(port, processes))
    if not sockets:
        return None
    for folder in processes.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if any(os.readlink(file) in sockets for file in (folder / "fd").iterdir()):
                name = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"{name}, process {folder.name}"
    return None


def _sockets(port: int, processes: Path) -> Iterator[str]:
    """As /proc names them among the files of a process."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (processes / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    yield f"socket:[{rest[5]}]"
