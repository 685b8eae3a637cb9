"""The run's curves as SVG text, drawn with matplotlib."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sluice.errors import ConfigError
from sluice.report.run_record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (6.4, 3.2)
_COMPOSITION = (
    ("train/groups_kept", "kept (mixed)", "#c8961e"),
    ("train/groups_all_right", "all right", "#4c8c4a"),
    ("train/groups_all_wrong", "all wrong", "#a23b3b"),
)


def accuracy_curve(record: RunRecord) -> str:
    """Held-out accuracy and mean training reward by step."""

    def draw(axes: Axes) -> None:
        points = record.accuracies()
        axes.plot(
            [p.step for p in points], [p.accuracy for p in points], "o-", label="held-out accuracy"
        )
        axes.set_ylim(0, 1)
        axes.set_xlabel("step")
        axes.set_ylabel("accuracy")
        reward = axes.twinx()
        reward.plot(*_series(record, "critic/rewards/mean"), color="#999999", linewidth=1)
        reward.set_ylabel("mean reward of trained groups (grey)")

    return _svg("Held-out accuracy", draw)


def composition_chart(record: RunRecord) -> str:
    """Share of kept, all-right and all-wrong groups by step."""

    def draw(axes: Axes) -> None:
        rows = [[row.get(name) or 0.0 for name, _, _ in _COMPOSITION] for row in record.steps]
        shares = [[value / max(sum(row), 1.0) for value in row] for row in rows]
        axes.stackplot(
            _steps(record),
            *zip(*shares, strict=True),
            labels=[label for _, label, _ in _COMPOSITION],
            colors=[colour for _, _, colour in _COMPOSITION],
        )
        axes.set_ylim(0, 1)
        axes.set_xlabel("step")
        axes.set_ylabel("share of sampled groups")
        axes.legend(loc="lower left")

    return _svg("What the sampled groups were", draw)


def token_curve(record: RunRecord) -> str:
    """Response tokens generated and trained, summed up."""

    def draw(axes: Axes) -> None:
        for name, label in (
            ("train/generated_tokens", "generated"),
            ("train/trained_tokens", "trained"),
        ):
            steps, values = _series(record, name)
            axes.plot(steps, [v / 1e6 for v in itertools.accumulate(values)], label=label)
        axes.set_xlabel("step")
        axes.set_ylabel("million response tokens")
        axes.legend()

    return _svg("Tokens", draw)


def time_split(record: RunRecord) -> str:
    """Where the trainer's seconds went, by phase."""

    def draw(axes: Axes) -> None:
        phases = {
            name.removeprefix("trainer_s/").replace("_", " "): seconds
            for name, seconds in record.accounts.items()
            if name.startswith("trainer_s/") and seconds > 0
        }
        axes.barh(list(phases), list(phases.values()), color="#4a6d8c")
        axes.set_xlabel("seconds of the trainer")

    return _svg("Time", draw)


def _steps(record: RunRecord) -> list[int]:
    return [int(row["step"] or 0) for row in record.steps]


def _series(record: RunRecord, name: str) -> tuple[list[int], Sequence[float]]:
    return _steps(record), [row.get(name) or 0.0 for row in record.steps]


def _svg(title: str, draw: Callable[[Axes], None]) -> str:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("reports need matplotlib; install sluice[train]") from error
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    draw(axes)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
