"""The seconds until a run works again after one of its processes was killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.parts import Part
from benchmarks.reporting import last_json, print_line

_NAMES = ("replica", "reward", "trainer")
_EACH, _SECONDS_EACH = 4, 60


def measure() -> Mapping[str, Any]:
    """Kill each of them four times, one at a time, in a small run; return the 95th percentiles,
    None for what was not always seen to recover.

    An upper bound in minutes ends a run whose kills are not possible.
    """
    kinds = ",".join(f"kill_{name}" for name in _NAMES)
    minutes = (1 + len(_NAMES) * _EACH) * _SECONDS_EACH / 60
    command = [sys.executable, "-m", "tools.chaos", "--single", "--size", "tiny"]
    command += ["--kinds", kinds, "--each", str(_EACH), "--minutes", f"{minutes:g}"]
    before = os.getloadavg()[0]
    found = last_json(command)
    print_line(f"load of the machine: {before:.1f} before, {os.getloadavg()[0]:.1f} at the end")
    backs = found["back_s"]
    seen = {name for name, each in backs.items() if not each["not_seen"]}
    return {"recovery_s": {name: backs[name]["p95"] if name in seen else None for name in _NAMES}}


PART = Part(
    lambda _: measure(),
    most={"recovery_s.replica": 10.0, "recovery_s.reward": 10.0, "recovery_s.trainer": 25.0},
)
