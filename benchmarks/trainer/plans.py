"""Plans of every launch of tests/data/launches on its devices, and plans against real ranks."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

from benchmarks.reporting import ROOT, print_line
from sluice.config.memory.rollout import GIB
from tests.support.plan_parity import DENSE, EXPERTS, counted_and_planned

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


def plans() -> dict[str, Any]:
    """Return figures of all plans by name.

    ``fits`` is true also with the overrides that `sluice plan` prints; ``most_gb`` is the largest
    process, as the system counted it.
    """
    devices = json.loads((_LAUNCHES / "devices.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for name, row in devices.items():
        for gib in dict.fromkeys((row["device_gib"], row.get("also_gib", row["device_gib"]))):
            key = name if gib == row["device_gib"] else f"{name}@{gib}"
            found[key] = planned(name, row["model"], gib)
            print_line(f"{key}: {found[key]}")
    return {"plans": found}


# Model, ranks, recompute, FSDP's keys.
_AGAINST_RANKS: tuple[tuple[dict[str, Any], int, bool, dict[str, int]], ...] = (
    (DENSE, 4, False, {}),
    (DENSE, 8, True, {"fsdp_size": 4}),
    (DENSE, 8, False, {"ulysses_sequence_parallel_size": 4}),
    (EXPERTS, 4, False, {"expert_parallel_size": 4}),
    (EXPERTS, 8, False, {"expert_parallel_size": 8}),
    (EXPERTS, 8, True, {"expert_parallel_size": 4, "ulysses_sequence_parallel_size": 2}),
    (
        EXPERTS,
        8,
        False,
        {"fsdp_size": 4, "expert_parallel_size": 2, "ulysses_sequence_parallel_size": 2},
    ),
)


def plan_errors() -> dict[str, Any]:
    """Return the largest relative error of a plan's bytes: state, peaks, kept, moved."""
    worst = 0.0
    for model, ranks, recompute, keys in _AGAINST_RANKS:
        real, plan = counted_and_planned(model, ranks, recompute=recompute, **keys)
        ours, theirs = ({**one, **one["moved"], "moved": 0} for one in (plan, real))
        if ours.keys() != theirs.keys():
            raise SystemExit(f"the plan counts {sorted(ours)}, the ranks {sorted(theirs)}")
        error = max(abs(ours[key] - size) / max(1, size) for key, size in theirs.items())
        print_line(f"{model['model_type']}, {ranks} ranks, {keys}: plan's error {error:.2g}")
        worst = max(worst, error)
    return {"plan_error_worst": worst}
