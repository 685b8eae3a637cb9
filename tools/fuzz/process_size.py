"""The size of a process: memory, open files, threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessSize:
    """Resident memory in MB, open descriptors, threads."""

    rss_mb: float
    files: int
    threads: int


def measure(pid: int) -> ProcessSize:
    """Measure a running process; raise OSError if there is none."""
    proc = Path("/proc") / str(pid)
    status = dict(
        line.split(":", 1) for line in (proc / "status").read_text(encoding="utf-8").splitlines()
    )
    files = sum(1 for _ in (proc / "fd").iterdir())
    return ProcessSize(int(status["VmRSS"].split()[0]) / 1024, files, int(status["Threads"]))
