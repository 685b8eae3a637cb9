"""Plan every launch of tests/data/launches on the devices of its devices.json.

``python -m benchmarks.plans`` prints a line for each and, last, one JSON object: ``plans``, by name
{fits, fits_with, peak_gib, seconds, most_gb}. ``fits`` is true also with the overrides that
`sluice plan` prints; ``most_gb`` is the largest process, as the system counted it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

from benchmarks.reporting import ROOT, print_line, print_report
from sluice.config.memory.rollout import GIB

_LAUNCHES = ROOT / "tests" / "data" / "launches"


def planned(name: str, model: str, gib: int) -> dict[str, Any]:
    """Return the figures of one launch."""
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "sluice", "plan", str(_LAUNCHES / f"{name}.overrides")),
            *("--device", f"{gib}GB", "--model", model, "--json"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if not ended.stdout:
        raise SystemExit(ended.stderr)
    found = json.loads(ended.stdout.splitlines()[-1])
    fits_with = found["fits_with"]
    return {
        "fits": fits_with is not None,
        "fits_with": fits_with,
        "split": f"{found['split']['trainer']}+{found['split']['rollout']}",
        "peak_gib": round(max(found["peaks"]["trainer"].values()) / GIB, 1),
        "engine_gib": round(max(found["peaks"]["rollout"].values()) / GIB, 1),
        "seconds": found["seconds"],
        "most_gb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6, 2),
    }


def main() -> int:
    """Print all plans."""
    devices = json.loads((_LAUNCHES / "devices.json").read_text(encoding="utf-8"))
    plans: dict[str, Any] = {}
    for name, row in devices.items():
        for gib in dict.fromkeys((row["device_gib"], row.get("also_gib", row["device_gib"]))):
            key = name if gib == row["device_gib"] else f"{name}@{gib}"
            plans[key] = planned(name, row["model"], gib)
            print_line(f"{key}: {plans[key]}")
    return print_report({"plans": plans})


if __name__ == "__main__":
    sys.exit(main())
