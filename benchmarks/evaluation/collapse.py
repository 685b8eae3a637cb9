"""A policy that collapses, because its learning rate is a hundred times too high, and its guard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.reporting import empty_run_folder, print_line, quickstart, sluice

MOST: Mapping[str, float] = {"validations_until_rollback": 1.0, "rollback_points": 1.0}

_GOOD_STEPS, _STEPS, _EVERY = 15, 24, 5
_RATE = 1e-3
_RULES = "[{action: rollback, deviations: 4.0, learning_rate_factor: 0.01}]"
_SETTINGS = (
    f"trainer.test_freq={_EVERY}",
    f"trainer.save_freq={_EVERY}",
    "trainer.max_actor_ckpt_to_keep=2",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
    "actor_rollout_ref.rollout.val_kwargs.n=4",
)


def measure(folder: Path) -> Mapping[str, Any]:
    """Train until it is good, continue a hundred times too fast, and see what the guard does."""
    run_dir = folder / "collapse"
    empty_run_folder(run_dir, folder / "assets", "quickstart", 0)
    quickstart(run_dir, 0, [*_SETTINGS, f"trainer.total_training_steps={_GOOD_STEPS}"])
    best = max(value for _, value, _ in _validations(run_dir))
    sluice(
        *("up", str(run_dir / "config.yaml"), "--quiet", "trainer.resume_mode=auto"),
        f"trainer.total_training_steps={_STEPS}",
        "trainer.test_freq=1",  # a policy that is always wrong fills no batch of a later step
        f"actor_rollout_ref.actor.optim.lr={100 * _RATE}",
        f"sluice.guards.rules={_RULES}",
    )
    later = [one for one in _validations(run_dir) if one[0] > _GOOD_STEPS]
    print_line(f"best {best:.4f}; step, accuracy, rollbacks: {later}")
    before = [value for _, value, rollbacks in later if not rollbacks]
    after = [value for _, value, rollbacks in later if rollbacks]
    if not after:
        raise SystemExit("the guard did not roll back")
    return {
        "validations_until_rollback": float(len(before)),
        "rollback_points": 100 * (best - after[0]),
    }


def _validations(run_dir: Path) -> list[tuple[int, float, int]]:
    """Return step, accuracy, and the rollbacks before it, of each validation, void ones too."""
    found, rollbacks = list[tuple[int, float, int]](), 0
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        for name, value in row.items():
            if name.startswith("val-core/") and "/acc/mean@" in name:
                found.append((int(row["step"]), float(value), rollbacks))
        rollbacks = int(row.get("guards/rollbacks", rollbacks))
    return found
