"""The jar game from nothing, and the trained policy among jars that it cannot see into."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.parts import Part
from benchmarks.reporting import quickstart, sluice, summary_of

SEEDS = (0, 1, 2)


def measure() -> Mapping[str, Any]:
    """Train three seeds; return the figures of each by its name."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            for key, figure in _seed(Path(folder) / "run", seed).items():
                found[key][f"seed {seed}"] = figure
    return found


def _seed(run_dir: Path, seed: int) -> Mapping[str, float]:
    began_s = time.monotonic()
    sighted = quickstart(run_dir, seed, ["--task", "jars"])
    seconds = time.monotonic() - began_s
    return {
        "accuracy_before": sighted["accuracy_before"],
        "accuracy_after": sighted["accuracy_after"],
        "accuracy_blind": _blind_accuracy(run_dir),
        "seconds": seconds,
    }


def _blind_accuracy(run_dir: Path) -> float:
    (checkpoint,) = (run_dir / "checkpoints").glob("global_step_*")
    sluice(
        *("up", str(run_dir / "config.yaml")),
        "trainer.val_only=true",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoint}",
        f"sluice.environment.path={Path(__file__).with_name('blind_jars.py')}",
        "sluice.environment.name=BlindJars",
        f"sluice.run_dir={run_dir / 'blind'}",
    )
    return float(summary_of(run_dir / "blind")["accuracy_after"])


PART = Part(
    lambda _: measure(),
    most={
        f"{key}.seed {seed}": bar
        for key, bar in {"accuracy_before": 0.45, "accuracy_blind": 0.15, "seconds": 150.0}.items()
        for seed in SEEDS
    },
    least={f"accuracy_after.seed {seed}": 0.93 for seed in SEEDS},
)
