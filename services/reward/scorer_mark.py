"""The mark that a scorer process and all it starts carry in their environment.

``RUN:SERVICE:SCORER``: a digest of the run's folder, the reward service as process id and start
time, and a number that no other scorer has. The first two are the family of a pool's scorers.
"""

from __future__ import annotations

import os
import re
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

MARK_VARIABLE = "SLUICE_SCORER_MARK"
_MARK = re.compile(
    rb"(?:^|\0)" + MARK_VARIABLE.encode() + rb"=([0-9a-f]{16}:\d+-\d+:[0-9a-f]{32})(?:\0|$)"
)
_PROC = Path("/proc")
_RUN_DIGITS = 16
_STATE_FIELD, _START_FIELD = 0, 19  # after the command's name in /proc/PID/stat
_ENDED = frozenset("ZXx")


def family_of(run_dir: Path | None = None) -> str:
    """The family of the scorers that this process starts for a run; ``None``: for no run.

    Without a run every call makes a family of its own. Services in other containers are other
    runs' even in the same folder: their process ids mean nothing here.
    """
    if run_dir is None:
        run = uuid4().hex[:_RUN_DIGITS]
    else:
        named = f"{_process_namespace()}\0{run_dir.resolve()}"
        run = sha256(named.encode()).hexdigest()[:_RUN_DIGITS]
    return f"{run}:{os.getpid()}-{_start_of(os.getpid()) or 0}"


def new_mark(family: str | None = None) -> str:
    """A value of `MARK_VARIABLE` that no other scorer has; of a family of its own by default."""
    return f"{family or family_of()}:{uuid4().hex}"


def mark_in(environment: bytes) -> str | None:
    """The mark in what /proc/PID/environ holds."""
    match = _MARK.search(environment)
    return None if match is None else match[1].decode()


def is_left_behind(mark: str, family: str) -> bool:
    """Whether it is of the same run, and of another service, which has ended."""
    run, service, _ = mark.split(":")
    own_run, own_service = family.split(":")
    if run != own_run or service == own_service:
        return False
    pid, start = map(int, service.split("-"))
    return _start_of(pid) != start


def _start_of(pid: int) -> int | None:
    """In ticks since the machine's start; ``None`` for a process that has ended."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[_STATE_FIELD] in _ENDED else int(fields[_START_FIELD])


def _process_namespace() -> str:
    try:
        return str((_PROC / "self" / "ns" / "pid").readlink())
    except OSError:
        return ""
