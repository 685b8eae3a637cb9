"""Curves of all steps, thinned to a maximum of points such that no peak and no gap is lost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.dashboard.step_history import StepHistory
from sluice.telemetry import metric_names

FEWEST_POINTS = 4
Values = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]
_CURVES = {
    "reward": metric_names.REWARD,
    "staleness_mean": metric_names.STALENESS_MEAN,
    "staleness_max": metric_names.STALENESS_MAX,
    "tokens_per_s": metric_names.TOKENS_PER_S,
    "trainer_idle": metric_names.TRAINER_IDLE,
    "rollout_idle": metric_names.ROLLOUT_IDLE,
    "step_s": metric_names.STEP_S,
}
# Summed over the steps so far.
_TOTALS = ("generated_tokens", "trained_tokens")
COMPOSITION = {
    "kept": ("kept",),
    "all_right": ("all_right",),
    "all_wrong": ("all_wrong",),
    "stale": ("stale",),
    "failed": ("failed",),
    "other": ("uniform", "surplus"),
}
"""Parts of a column of groups, each with the metrics ``train/groups_<name>`` that it sums."""


def kept_points(values: Values, most: int) -> Indexes:
    """Choose the points of a curve to show: at most `most`, in order.

    They include the first and the last point. The points between are cut into equal intervals;
    each keeps its smallest and its largest value. An interval without a number (all NaN) keeps one
    point, so that the gap stays visible.

    Args:
        values: [points], in the order of the curve; NaN where there is no value.
        most: the maximum, at least `FEWEST_POINTS`.

    Returns:
        [kept] indexes into `values`, rising.

    Raises:
        ValueError: `most` is too small.
    """
    if most < FEWEST_POINTS:
        raise ValueError(f"{most} points are too few for a curve; at least {FEWEST_POINTS}")
    if values.size <= most:
        return np.arange(values.size)
    edges = bucket_edges(values.size - 2, (most - 2) // 2) + 1
    kept = [0, values.size - 1]
    for begin, end in pairwise(edges):
        stretch = values[begin:end]
        if np.isnan(stretch).all():
            kept.append(int(begin))
        else:
            kept += [int(begin + np.nanargmin(stretch)), int(begin + np.nanargmax(stretch))]
    return np.unique(np.asarray(kept, dtype=np.int64))


def bucket_edges(num_points: int, most: int) -> Indexes:
    """Cut `num_points` into at most `most` intervals whose sizes differ by at most one point.

    Returns:
        [intervals + 1] from 0 to `num_points`; no interval is empty.
    """
    num_buckets = max(min(num_points, most), 1)
    return np.linspace(0, num_points, num_buckets + 1).round().astype(np.int64)


def bucket_sums(values: Values, edges: Indexes) -> Values:
    """Return [intervals] sums of `values`; NaN counts as 0.

    Args:
        values: [points].
        edges: [intervals + 1], from `bucket_edges`.
    """
    running = np.concatenate([[0.0], np.cumsum(np.nan_to_num(values))])
    sums: Values = running[edges[1:]] - running[edges[:-1]]
    return sums


def curve_points(history: StepHistory, most: int) -> dict[str, Any]:
    """Return the curves, and the groups of all steps by kind.

    Args:
        history: all steps.
        most: the maximum of points in a curve, and of columns of groups; at least 4.

    Returns:
        ``num_steps``; each curve as ``x`` (steps) and ``y`` (null: no value); ``composition`` with
        the first and last step of each column (``from``, ``to``) and its groups by kind.
    """
    steps = history.steps
    curves = {name: _curve(steps, history.column(metric), most) for name, metric in _CURVES.items()}
    totals = {
        name: _curve(steps, np.cumsum(np.nan_to_num(history.column(f"train/{name}"))), most)
        for name in _TOTALS
    }
    validations = history.accuracies()
    accuracy = _curve(
        np.array([step for step, _ in validations], dtype=np.int64),
        np.array([value for _, value in validations], dtype=np.float64),
        most,
    )
    return {
        "num_steps": int(steps.size),
        "curves": {**curves, **totals, "accuracy": accuracy},
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
