"""The mark of a service's process that has ended, and whose parent has not asked how."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from sluice.concurrency.process import (
    START_FIELD,
    ProcessMark,
    host_of_pids,
    mark_file,
    stat_fields,
)


@contextmanager
def zombie_mark(run_dir: Path, name: str) -> Iterator[None]:
    """Its process stays a zombie while the block runs."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        started = int(stat_fields(process.pid)[START_FIELD])
        mark = ProcessMark(name, process.pid, host_of_pids(), started)
        assert mark.state() == "a zombie"
        file = mark_file(run_dir, name)
        file.parent.mkdir()
        file.write_text(json.dumps(asdict(mark)), encoding="utf-8")
        yield
