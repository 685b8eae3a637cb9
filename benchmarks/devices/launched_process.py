"""A service that only says what it was given: its variables and its node. It imports no package.

`launches` copies it to ``services/trainer.py`` and the like, ahead of the real ones on the path of
a pretended cluster. It reports into a folder, and ends when a file ``end`` is there, or on SIGTERM.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

FOLDER_VARIABLE = "SLUICE_LAUNCHES_FOLDER"
END_NAME = "end"
_VARIABLES = (
    "ASCEND_RT_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
)
_POLL_S, _MAX_WAIT_S = 0.2, 900.0


def _parent_of(pid: int) -> str:
    """Return the parent of an actor's process: the raylet; each node has one."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return status.partition("PPid:")[2].split()[0]


def main() -> None:
    """Report, and wait for the end: the run ends with the trainer's first rank."""
    folder, kind = Path(os.environ[FOLDER_VARIABLE]), Path(sys.argv[0]).stem
    report = {
        "kind": kind,
        "node": _parent_of(os.getppid()),
        **{name: os.environ.get(name, "") for name in _VARIABLES},
    }
    written = folder / f"{os.getpid()}.partial"
    written.write_text(json.dumps(report), encoding="utf-8")
    written.rename(folder / f"{os.getpid()}.json")
    ends_run = kind == "trainer" and report["RANK"] in ("", "0")
    until_s = time.monotonic() + _MAX_WAIT_S
    while not (ends_run and (folder / END_NAME).exists()) and time.monotonic() < until_s:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
