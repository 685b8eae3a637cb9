"""Has a measured process record spans only while the file that the environment names exists.

Python imports this module at its start where this folder is on ``PYTHONPATH``; a run has no such
switch of its own. `benchmarks.telemetry` uses it to compare steps of one run.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

_LOOK_S = 0.05
_TRACING = "sluice.telemetry.tracing"


def _follow(switch: Path) -> None:
    was_on = False
    while True:
        time.sleep(_LOOK_S)
        tracing = sys.modules.get(_TRACING)
        tracer = getattr(tracing, "TRACER", None)
        # A process that was never traced stays untraced.
        was_on = was_on or bool(tracer and tracer.is_on)
        if was_on and tracer is not None:
            tracer.is_on = switch.exists()


if path := os.environ.get("SLUICE_BENCH_TRACING_SWITCH"):
    threading.Thread(target=_follow, args=(Path(path),), daemon=True).start()
