"""What the page draws of all steps, in at most so many points."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.dashboard.downsampling import bucket_edges, bucket_sums, kept_points
from sluice.dashboard.step_history import StepHistory

__all__ = ["COMPOSITION", "curve_points"]

_CURVES = {
    "reward": "critic/rewards/mean",
    "staleness_mean": "train/staleness_mean",
    "staleness_max": "train/staleness_max",
    "tokens_per_s": "rollout/tokens_per_s",
    "trainer_idle": "trainer/idle_share",
    "rollout_idle": "rollout/idle_share",
    "step_s": "timing_s/step",
}
COMPOSITION = {
    "kept": ("kept",),
    "all_right": ("all_right",),
    "all_wrong": ("all_wrong",),
    "stale": ("stale",),
    "failed": ("failed",),
    "other": ("uniform", "surplus"),
}
"""Parts of a column of groups, and the metrics ``train/groups_<name>`` that add up to each."""


def curve_points(history: StepHistory, most: int) -> dict[str, Any]:
    """Curves, and groups by what they were.

    Args:
        history: all steps.
        most: points of a curve, and columns of groups; at least 4.

    Returns:
        ``num_steps``; each curve as ``x`` (steps) and ``y`` (null: no value); ``composition`` with
        first and last step of each column (``from``, ``to``) and the groups in it by kind.
    """
    steps = history.steps
    curves = {name: _curve(steps, history.column(metric), most) for name, metric in _CURVES.items()}
    validations = history.accuracies()
    accuracy = _curve(
        np.array([step for step, _ in validations], dtype=np.int64),
        np.array([value for _, value in validations], dtype=np.float64),
        most,
    )
    return {
        "num_steps": int(steps.size),
        "curves": {**curves, "accuracy": accuracy},
        "composition": _composition(history, steps, most),
    }


def _curve(
    steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64], most: int
) -> dict[str, list[Any]]:
    kept = kept_points(values, most)
    return {"x": steps[kept].tolist(), "y": [_number(value) for value in values[kept].tolist()]}


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None


def _composition(
    history: StepHistory, steps: npt.NDArray[np.int64], most: int
) -> dict[str, list[Any]]:
    if steps.size == 0:
        return {"from": [], "to": [], **{kind: [] for kind in COMPOSITION}}
    edges = bucket_edges(steps.size, most)
    columns: dict[str, list[Any]] = {
        "from": steps[edges[:-1]].tolist(),
        "to": steps[edges[1:] - 1].tolist(),
    }
    for kind, parts in COMPOSITION.items():
        sums = sum(bucket_sums(history.column(f"train/groups_{part}"), edges) for part in parts)
        columns[kind] = np.asarray(sums).tolist()
    return columns
