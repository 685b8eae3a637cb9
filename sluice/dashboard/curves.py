"""Curves of all steps, thinned to a maximum of points such that no peak and no gap is lost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.dashboard.step_history import StepHistory
from sluice.telemetry import metric_names

MIN_POINTS = 4
Values = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]
# Metrics by the name that `static/curves.js` has for the curve in its charts. The part "Any metric"
# shows all others without a row here.
_CURVES = {
    "reward": metric_names.REWARD,
    "staleness_mean": metric_names.STALENESS_MEAN,
    "staleness_max": metric_names.STALENESS_MAX,
    "tokens_per_s": metric_names.TOKENS_PER_S,
    "trainer_idle": metric_names.TRAINER_IDLE,
    "rollout_idle": metric_names.ROLLOUT_IDLE,
    "step_s": metric_names.STEP_S,
    "entropy": "actor/entropy",
    "policy_kl": "actor/ppo_kl",
    "rollout_kl": "rollout_corr/kl",
    "reference_kl": "actor/kl_loss",
    "grad_norm": "actor/grad_norm",
    "clip_fraction": "actor/pg_clipfrac",
    "clip_fraction_lower": "actor/pg_clipfrac_lower",
    "length_mean": "response_length/mean",
    "length_max": "response_length/max",
    "length_clipped": "response_length/clip_ratio",  # only in the answer: no chart has it
    "lr": "actor/lr",
    "weight_mean": "rollout_corr/rollout_is_mean",
    "weight_min": "rollout_corr/rollout_is_min",
    "weight_max": "rollout_corr/rollout_is_max",
    "weight_samples": "rollout_corr/rollout_is_eff_sample_size",
}
_TIMING = {
    "batch": ("wait_batch",),
    "logprobs": ("old_log_prob", "ref", "values"),
    "update": ("adv", "update_critic", "update_actor"),
    "weights": ("update_weights",),
    "checkpoint": ("save_checkpoint",),
}
"""Parts of a step, each with the metrics ``timing_s/<name>`` that it sums; the rest is `other`."""
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


def choose_points(values: Values, max_points: int) -> Indexes:
    """Choose the points of a curve to show: at most `max_points`, in order.

    They include the first and the last point. The points between are cut into equal intervals;
    each keeps its smallest and its largest value. An interval without a number (all NaN) keeps one
    point, so that the gap stays visible.

    Args:
        values: [points], in the order of the curve; NaN where there is no value.
        max_points: the maximum, at least `MIN_POINTS`.

    Returns:
        [kept] indexes into `values`, rising.

    Raises:
        ValueError: `max_points` is too small.
    """
    if max_points < MIN_POINTS:
        raise ValueError(f"{max_points} points are too few for a curve; at least {MIN_POINTS}")
    if values.size <= max_points:
        return np.arange(values.size)
    edges = bucket_edges(values.size - 2, (max_points - 2) // 2) + 1
    indexes = [0, values.size - 1]
    for begin, end in pairwise(edges):
        stretch = values[begin:end]
        if np.isnan(stretch).all():
            indexes.append(int(begin))
        else:
            indexes += [int(begin + np.nanargmin(stretch)), int(begin + np.nanargmax(stretch))]
    return np.unique(np.asarray(indexes, dtype=np.int64))


def bucket_edges(num_points: int, max_buckets: int) -> Indexes:
    """Cut `num_points` into at most `max_buckets` intervals, equal to within a point.

    Returns:
        [intervals + 1] from 0 to `num_points`; no interval is empty.
    """
    num_buckets = max(min(num_points, max_buckets), 1)
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


def curve_points(history: StepHistory, max_points: int) -> dict[str, Any]:
    """Return the curves, and the groups of all steps by kind.

    Args:
        history: all steps.
        max_points: the maximum of points in a curve, and of columns of groups; at least 4.

    Returns:
        ``num_steps``; each curve as ``x`` (steps) and ``y`` (null: no value); ``composition`` with
        the first and last step of each column (``from``, ``to``) and its groups by kind; ``timing``
        likewise with the seconds of each part of a step.
    """
    steps = history.steps
    curves = {
        name: _curve(steps, history.column(metric), max_points) for name, metric in _CURVES.items()
    }
    totals = {
        name: _curve(steps, np.cumsum(np.nan_to_num(history.column(f"train/{name}"))), max_points)
        for name in _TOTALS
    }
    return {
        "num_steps": int(steps.size),
        "curves": {**curves, **totals, "accuracy": accuracy_points(history, max_points)},
        "composition": _columns(steps, _group_columns(history), max_points),
        "timing": _columns(steps, _second_columns(history), max_points),
    }


def accuracy_points(history: StepHistory, max_points: int) -> dict[str, list[Any]]:
    """Return held-out accuracy as ``x`` (steps) and ``y``."""
    validations = history.accuracies()
    return _curve(
        np.array([step for step, _ in validations], dtype=np.int64),
        np.array([value for _, value in validations], dtype=np.float64),
        max_points,
    )


def metric_points(history: StepHistory, name: str, max_points: int) -> dict[str, list[Any]]:
    """Return any metric of the run as ``x`` (steps) and ``y``, without steps that lack it."""
    steps, values = history.series(name)
    has_value = ~np.isnan(values)
    return _curve(steps[has_value], values[has_value], max_points)


def _group_columns(history: StepHistory) -> dict[str, Values]:
    return {
        kind: _sum_of(history, [f"train/groups_{part}" for part in parts])
        for kind, parts in COMPOSITION.items()
    }


def _second_columns(history: StepHistory) -> dict[str, Values]:
    parts = {
        part: _sum_of(history, [f"timing_s/{name}" for name in names])
        for part, names in _TIMING.items()
    }
    unaccounted = _sum_of(history, [metric_names.STEP_S]) - np.sum(list(parts.values()), axis=0)
    return {**parts, "other": np.maximum(unaccounted, 0.0)}


def _sum_of(history: StepHistory, names: list[str]) -> Values:
    total: Values = np.sum([np.nan_to_num(history.column(name)) for name in names], axis=0)
    return total


def _curve(
    steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64], max_points: int
) -> dict[str, list[Any]]:
    shown = choose_points(values, max_points)
    return {"x": steps[shown].tolist(), "y": [_number(value) for value in values[shown].tolist()]}


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None


def _columns(
    steps: npt.NDArray[np.int64], parts: dict[str, Values], max_columns: int
) -> dict[str, list[Any]]:
    """Return columns over intervals of steps: first and last step, and the sum of each part."""
    if steps.size == 0:
        return {"from": [], "to": [], **{part: [] for part in parts}}
    edges = bucket_edges(steps.size, max_columns)
    return {
        "from": steps[edges[:-1]].tolist(),
        "to": steps[edges[1:] - 1].tolist(),
        **{
            part: [_number(value) for value in bucket_sums(values, edges).tolist()]
            for part, values in parts.items()
        },
    }
