"""Wait in a pod's init containers; a program of the Python standard library and sluice.

`run FOLDER SECONDS`: a run has begun in the folder and has not ended.
`port HOST:PORT SECONDS`: somebody listens there.
`alone NAME SECONDS`: the name leads to this pod and to no other, as the pod before it is gone.
Exit code 0: it came true; 1: not within so many seconds.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

INTERVAL_S = 2.0
_CONNECT_S = 5.0
_REPORT_EVERY_S = 30.0
ADDRESSES_VARIABLE = "POD_IPS"


def run_is_active(folder: str) -> str:
    """Return why no run is active, or nothing."""
    from sluice.launch.shared_run import SharedRun

    run = SharedRun(Path(folder))
    if run.is_active:
        return ""
    over = run.ending()
    return f"the run of {folder} has " + ("ended" if over is not None else "not begun")


def somebody_listens(address: str) -> str:
    """Return the error of connecting, or nothing."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _CONNECT_S):
            return ""
    except OSError as error:
        return f"{address}: {error}"


def is_alone(name: str) -> str:
    """Return where the name leads besides this pod, or nothing."""
    own = set(filter(None, os.environ.get(ADDRESSES_VARIABLE, "").split(",")))
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(name, None)}
    except OSError as error:
        return f"{name}: {error}"
    if found and found <= own:
        return ""
    return f"{name} leads to {sorted(found)}, and this pod has {sorted(own)}"


CONDITIONS: dict[str, Callable[[str], str]] = {
    "run": run_is_active,
    "port": somebody_listens,
    "alone": is_alone,
}


def wait(condition: Callable[[str], str], subject: str, seconds: float) -> int:
    """Wait, and print what for at first and now and then; return the exit code."""
    began_s = reported_s = time.monotonic()
    reported = ""
    while missing := condition(subject):
        passed_s = time.monotonic() - began_s
        if passed_s >= seconds:
            sys.stderr.write(f"given up after {seconds:g} s: {missing}\n")
            return 1
        if not reported or time.monotonic() - reported_s >= _REPORT_EVERY_S:
            reported, reported_s = missing, time.monotonic()
            sys.stderr.write(f"waiting: {missing}\n")
        time.sleep(min(INTERVAL_S, seconds - passed_s))
    return 0


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    what, subject, seconds = arguments
    return wait(CONDITIONS[what], subject, float(seconds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
