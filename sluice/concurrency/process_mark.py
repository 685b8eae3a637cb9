"""Which process is which service of a run, noted in its folder, and what the kernel says of it.

A service that does not answer cannot say why; its process's state often does.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "processes"
_STATE_FIELD, _START_FIELD = 0, 19  # of what follows the command's name in /proc/PID/stat
_STOPPED, _ENDED = frozenset("Tt"), frozenset("ZXx")


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """One process.

    Attributes:
        name: the service's.
        pid: its process id on `host`.
        host: the machine's name.
        started: ticks from the machine's start to the process's; tells it from a later one with
            the same id. 0 where it cannot be known.
        address: where it serves, host:port; empty: not at all.
    """

    name: str
    pid: int
    host: str
    started: int
    address: str = ""

    def state(self) -> str:
        """In words: alive, stopped by a signal, a zombie, gone, or out of sight."""
        if self.host != socket.gethostname():
            return f"out of sight on {self.host}"
        fields = _stat(self.pid)
        if not fields or (self.started and int(fields[_START_FIELD]) != self.started):
            return "gone" if Path("/proc/self").exists() else "unknown"
        letter = fields[_STATE_FIELD]
        if letter in _STOPPED:
            return "stopped by a signal"
        return "a zombie" if letter in _ENDED else "alive"


@contextmanager
def marked_process(run_dir: Path, name: str, address: str = "") -> Iterator[None]:
    """Notes this process in the run's folder while the block runs.

    Nothing happens where there is no such folder: a replica may run on a machine without it.
    """
    fields = _stat(os.getpid())
    started = int(fields[_START_FIELD]) if fields else 0
    mark = ProcessMark(name, os.getpid(), socket.gethostname(), started, address)
    file = run_dir / FOLDER / f"{name.replace('/', '_')}.json"
    with suppress(OSError):  # a full disk is told of by those who need it
        if run_dir.is_dir():
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(asdict(mark)), encoding="utf-8")
    try:
        yield
    finally:
        if _read(file) == mark:
            file.unlink(missing_ok=True)


def process_marks(run_dir: Path, since_s: float = 0.0) -> tuple[ProcessMark, ...]:
    """The processes noted since `since_s` (seconds of the file system's clock), by name."""
    found = []
    for file in sorted((run_dir / FOLDER).glob("*.json")):
        with suppress(OSError):
            mark = _read(file) if file.stat().st_mtime >= since_s else None
            found += [mark] if mark is not None else []
    return tuple(found)


def _read(file: Path) -> ProcessMark | None:
    try:
        return ProcessMark(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rsplit(")", 1)[1].split()
