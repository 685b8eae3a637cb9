"""The folder of a small run, written by hand as the trainer would write it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ACCURACY = "val-core/math_dapo/acc/mean@2"

STEPS: tuple[Mapping[str, Any], ...] = (
    {
        "step": 1,
        "training/global_step": 1.0,
        "critic/rewards/mean": -0.5,
        "timing_s/step": 2.25,
        "train/generated_tokens": 1000.0,
        "train/trained_tokens": 600.0,
        "train/groups_kept": 4.0,
        "train/groups_all_right": 1.0,
        "train/groups_all_wrong": 2.0,
        "train/staleness_max": 0.0,
        "train/surplus_discarded": 0.0,
        "train/generated_per_trained_tokens": 1.67,
        "trainer/idle_share": 0.4,
        "rollout/idle_share": 0.1,
        "rollout/tokens_per_s": 12345.6,
    },
    {
        "step": 2,
        "training/global_step": 2.0,
        "critic/rewards/mean": None,
        "timing_s/step": 1.5,
        "train/generated_tokens": 900.0,
        "train/trained_tokens": 700.0,
        "train/groups_kept": 4.0,
        "train/groups_all_right": 2.0,
        "train/groups_all_wrong": 0.0,
        "train/staleness_max": 1.0,
        "train/surplus_discarded": 0.0,
    },
)
VALIDATIONS: tuple[Mapping[str, Any], ...] = (
    {"step": 0, ACCURACY: 0.25, "val-aux/num_prompts": 16.0, "val/generated_tokens": 300.0},
    {"step": 2, ACCURACY: 0.75, "val-aux/num_prompts": 16.0, "val/generated_tokens": 200.0},
)
# 20 = 8 trained + 3 + 2 + 1 filtered + 1 + 1 dropped + 4 pending
ACCOUNTS: Mapping[str, float] = {
    "submitted": 20,
    "trained": 8,
    "filtered_all_right": 3,
    "filtered_all_wrong": 2,
    "filtered_uniform": 1,
    "dropped_stale": 1,
    "dropped_failed": 1,
    "pending": 4,
    "generated_tokens": 3000,
    "rollout_busy_s": 4.5,
    "trainer_s/training": 2.0,
    "trainer_s/waiting_for_batch": 1.5,
}
# The rest of 4 trainer seconds is residual.
ACCOUNTING: Mapping[str, float] = {
    "tokens/trained": 1800.0,
    "tokens/filtered_all_right": 750.0,
    "tokens/pending": 450.0,
    "tokens/surplus": 0.0,
    "tokens_residual": 0.0,
    "tokens_residual_share": 0.0,
    "trainer_wall_s": 4.0,
    "trainer_seconds_residual": 0.5,
    "trainer_seconds_residual_share": 0.125,
    "rollout_s/idle": 1.0,
    "rollout_s/generating": 9.0,
    "rollout_wall_s": 10.0,
    "rollout_seconds_residual": 0.0,
    "rollout_seconds_residual_share": 0.0,
}


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_folder(
    folder: Path,
    *,
    steps: Sequence[Mapping[str, Any]] = STEPS,
    validations: Sequence[Mapping[str, Any]] = VALIDATIONS,
    accounts: Mapping[str, float] | None = ACCOUNTS,
) -> Path:
    """Writes the record; without accounts the run has not reached its end."""
    write_rows(folder / "metrics.jsonl", [*validations[:1], *steps, *validations[1:]])
    if accounts is not None:
        (folder / "accounts.json").write_text(json.dumps(accounts), encoding="utf-8")
    return folder


def write_examples(folder: Path, step: int, *outputs: str) -> None:
    """Example responses to the prompts ``p0``, ``p1``, ... of one validation."""
    rows = [
        {
            "input": f"p{i}",
            "output": output,
            "gts": str(i),
            "score": 1.0 if i else -1.0,
            "step": step,
        }
        for i, output in enumerate(outputs)
    ]
    write_rows(folder / "validation" / f"{step}.jsonl", rows)
