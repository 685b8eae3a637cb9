"""The seconds until a run works again after one of its processes was killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.reporting import last_json, print_line

KEYS = ("recovery_s",)
MOST: Mapping[str, float] = {"replica": 10.0, "reward": 10.0, "trainer": 25.0}

_EACH, _SECONDS_EACH = 4, 60


def measure() -> Mapping[str, Any]:
    """Kill each of them four times, one at a time, in a small run; return the 95th percentiles.

    An upper bound in minutes ends a run whose kills are not possible.
    """
    kinds = ",".join(f"kill_{name}" for name in MOST)
    minutes = (1 + len(MOST) * _EACH) * _SECONDS_EACH / 60
    command = [sys.executable, "-m", "tools.chaos", "--single", "--size", "tiny"]
    command += ["--kinds", kinds, "--each", str(_EACH), "--minutes", f"{minutes:g}"]
    before = os.getloadavg()[0]
    found = last_json(command)
    print_line(f"load of the machine: {before:.1f} before, {os.getloadavg()[0]:.1f} at the end")
    backs = found["back_s"].items()
    return {"recovery_s": {n: None if each["not_seen"] else each["p95"] for n, each in backs}}


def missed(report: Mapping[str, Any]) -> list[str]:
    """Return the kinds that miss their bars, as one does that was not seen to recover."""
    seconds = report["recovery_s"]
    if seconds is None:
        return []
    late = (name for name, bar in MOST.items() if not (seconds.get(name) or float("nan")) <= bar)
    return [f"recovery_s.{name}" for name in late]
