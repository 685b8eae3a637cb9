"""Runs beside each other: by steps, by generated tokens and by wall-clock time; and where their
configurations differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.config.loading.yaml_files import read_document
from sluice.config.loading.yaml_text import flat_settings, flat_tree
from sluice.config.run import RunConfig
from sluice.dashboard.curves import MIN_POINTS, accuracy_points, bucket_edges, metric_points
from sluice.dashboard.step_history import StepHistory
from sluice.errors import ConfigError
from sluice.safe_text import without_secrets
from sluice.service_contract import CONFIG_NAME
from sluice.telemetry import metric_names

Values = npt.NDArray[np.float64]

_RECENT_STEPS = 10
_WALL = "accounts/trainer_wall_s"
# Name, metric, and how to write it; each is the mean over the last steps.
_RECENT = (
    ("Reward", metric_names.REWARD, "number"),
    ("Entropy", "actor/entropy", "number"),
    ("KL per step", "actor/ppo_kl", "number"),
    ("Gradient norm", "actor/grad_norm", "number"),
    ("Clip fraction", "actor/pg_clipfrac", "number"),
    ("Response length", "response_length/mean", "number"),
    ("Learning rate", "actor/lr", "number"),
    ("Tokens/s", metric_names.TOKENS_PER_S, "count"),
    ("Seconds per step", metric_names.STEP_S, "number"),
    ("Trainer idle", metric_names.TRAINER_IDLE, "share"),
    ("Rollout idle", metric_names.ROLLOUT_IDLE, "share"),
    ("Generated per trained token", "train/generated_per_trained_tokens", "number"),
)
_RUN = "RUN"
_RUN_DIR = "sluice.run_dir"
# Of a start, not of a run: the ports are chosen at each.
_OF_A_START = (_RUN_DIR, ".port")


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run with the numbers of its steps."""

    run_dir: Path
    history: StepHistory

    @property
    def axes(self) -> dict[str, Values]:
        """The step, the generated tokens and the seconds at the end of each step, all rising.

        Seconds are the trainer's wall-clock time, over all of its starts; a record without it has
        the durations of the steps.
        """
        column = self.history.column
        tokens = np.cumsum(np.nan_to_num(column(metric_names.GENERATED_TOKENS)))
        steps = self.history.steps.astype(np.float64)
        return {"step": steps, "tokens": tokens, "seconds": self._seconds()}

    def _seconds(self) -> Values:
        wall = self.history.column(_WALL)
        if not wall.size or np.isnan(wall).any():
            return np.cumsum(np.nan_to_num(self.history.column(metric_names.STEP_S)))
        since = np.diff(wall, prepend=0.0)
        # A trainer that was started again counts from 0.
        return np.cumsum(np.where(since < 0, wall, since))


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return a short name of each run; the whole path where two would be the same."""
    names = [folder.absolute().name for folder in folders]
    return [
        str(folder) if names.count(name) > 1 else name
        for folder, name in zip(folders, names, strict=True)
    ]


def side_by_side(runs: Sequence[ComparedRun], max_points: int) -> dict[str, Any]:
    """Return the runs beside each other, as the page and `sluice compare` show them.

    Args:
        runs: the first is the one that the others are compared with.
        max_points: the maximum of points of an axis.

    Returns:
        ``runs``: name, thinned ``axes`` and held-out ``accuracy`` of each; ``figures``: name, kind,
        and a value of each run (null: it has none); ``progress``: accuracy and reward of each run
        at an equal step, number of tokens, and second; ``differences``: keys of the configuration
        with their values.
    """
    names = run_names([run.run_dir for run in runs])
    axes = [run.axes for run in runs]
    return {
        "runs": [
            {
                "name": name,
                "axes": _thin(run_axes, max_points),
                "accuracy": accuracy_points(run.history, max(max_points, MIN_POINTS)),
            }
            for name, run_axes, run in zip(names, axes, runs, strict=True)
        ],
        "figures": list(_figures(runs, axes)),
        "progress": _progress(runs, axes),
        "differences": differences([run_settings(run.run_dir) for run in runs]),
    }


def metric_of_runs(runs: Sequence[ComparedRun], name: str, max_points: int) -> dict[str, Any]:
    """Return ``name``, and the points of this metric of each run; no points: it has none."""
    return {"name": name, "runs": [metric_points(run.history, name, max_points) for run in runs]}


def _thin(axes: dict[str, Values], max_points: int) -> dict[str, list[float]]:
    edges = bucket_edges(axes["step"].size, max_points)[1:] - 1
    if not axes["step"].size:
        return {name: [] for name in axes}
    return {name: [float(f"{v:.8g}") for v in values[edges]] for name, values in axes.items()}


def _figures(
    runs: Sequence[ComparedRun], axes: Sequence[dict[str, Values]]
) -> list[dict[str, Any]]:
    def of_runs(
        name: str, kind: str, value: Callable[[ComparedRun], float | None]
    ) -> dict[str, Any]:
        return {"name": name, "kind": kind, "values": [_round(value(run)) for run in runs]}

    ends = [
        {"name": name, "kind": kind, "values": [_last_value(run_axes[axis]) for run_axes in axes]}
        for name, axis, kind in (
            ("Steps", "step", "count"),
            ("Generated tokens", "tokens", "count"),
            ("Wall-clock time", "seconds", "seconds"),
        )
    ]
    accuracy = [
        of_runs("Held-out accuracy, first", "number", lambda run: _accuracy(run, 0)),
        of_runs("Held-out accuracy, last", "number", lambda run: _accuracy(run, -1)),
        of_runs("Held-out accuracy, best", "number", _best_accuracy),
    ]
    recent = [
        of_runs(name, kind, lambda run, metric=metric: _recent_mean(run.history.column(metric)))  # type: ignore[misc]
        for name, metric, kind in _RECENT
    ]
    return [row for row in ends + accuracy + recent if any(v is not None for v in row["values"])]


def _progress(
    runs: Sequence[ComparedRun], axes: Sequence[dict[str, Values]]
) -> list[dict[str, Any]]:
    """Compare at the end of the run that is the shortest by this measure, and half-way there."""
    rows = []
    for by in ("step", "tokens", "seconds"):
        ends = [_last_value(run_axes[by]) for run_axes in axes]
        if not all(ends):
            continue
        end = min(value for value in ends if value is not None)
        for limit in (end / 2, end):
            step_counts = [
                int(np.searchsorted(run_axes[by], limit, side="right")) for run_axes in axes
            ]
            rows.append(
                {
                    "by": by,
                    "at": round(limit),
                    "accuracy": [
                        _accuracy_at(run, run_axes["step"], count)
                        for run, run_axes, count in zip(runs, axes, step_counts, strict=True)
                    ],
                    "reward": [
                        _round(_recent_mean(run.history.column(metric_names.REWARD)[:count]))
                        for run, count in zip(runs, step_counts, strict=True)
                    ],
                }
            )
    return rows


def _accuracy_at(run: ComparedRun, steps: Values, count: int) -> float | None:
    """Return the accuracy of the last validation within the first `count` steps."""
    step = steps[count - 1] if count else 0
    values = [value for validated_step, value in run.history.accuracies() if validated_step <= step]
    return _round(values[-1]) if values else None


def _accuracy(run: ComparedRun, place: int) -> float | None:
    accuracies = run.history.accuracies()
    return accuracies[place][1] if accuracies else None


def _best_accuracy(run: ComparedRun) -> float | None:
    return max((value for _, value in run.history.accuracies()), default=None)


def _recent_mean(values: Values) -> float | None:
    recent = values[-_RECENT_STEPS:]
    return None if np.isnan(recent).all() else float(np.nanmean(recent))


def _last_value(values: Values) -> float | None:
    return float(values[-1]) if values.size else None


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def run_settings(run_dir: Path) -> dict[str, str]:
    """Return every value of the run's configuration by its dotted key, as text.

    The run's own folder is written as ``RUN``. Without a readable file there are no settings.
    """
    try:
        document = read_document(run_dir / CONFIG_NAME)
    except (ConfigError, OSError):
        return {}
    flat = flat_tree(document)
    # Where it is, and where it was when it started: a run may be copied.
    folders = [str(run_dir.absolute()), str(flat.get(_RUN_DIR, run_dir))]
    return {key: _setting_text(value, folders) for key, value in without_secrets(flat).items()}


def settings_object(run_dir: Path) -> dict[str, Any]:
    """Return the settings, each with its default (null: it has none), and whether it differs."""
    defaults = {key: _setting_text(value) for key, value in flat_settings(RunConfig()).items()}
    return {
        "settings": [
            {
                "key": key,
                "value": value,
                "default": defaults.get(key),
                "is_changed": value != defaults.get(key) and not key.endswith(_OF_A_START),
            }
            for key, value in run_settings(run_dir).items()
        ]
    }


def differences(settings: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Return the keys whose values differ: ``key``, and ``values`` of each run (null: not set)."""
    keys = dict.fromkeys(key for run_settings in settings for key in run_settings)
    rows = ((key, [run_settings.get(key) for run_settings in settings]) for key in keys)
    return [
        {"key": key, "values": values}
        for key, values in rows
        if len(set(values)) > 1 and not key.endswith(_OF_A_START)
    ]


def _setting_text(value: object, folders: Sequence[str] = ()) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_setting_text(item, folders) for item in value)}]"
    text = str(value)
    for folder in folders:
        if text.startswith(f"{folder}/"):
            return f"{_RUN}{text.removeprefix(folder)}"
    return text
