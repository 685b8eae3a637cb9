"""Pictures of simulations, as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sluice.errors import ConfigError
from sluice.simulate.result import SimulationResult
from sluice.simulate.strategies import Compared

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Okabe and Ito's palette, which colour-blind people can tell apart.
_COLOURS = ("#999999", "#0072B2", "#E69F00", "#009E73", "#CC79A7")
_SIZE_INCHES = (6.4, 3.6)


def plot_comparison(folder: Path, compared: Sequence[Compared]) -> tuple[Path, ...]:
    """Write bars of waste and fill time, curves of fill times, and a histogram of staleness.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plans: tuple[tuple[str, Callable[[Axes], None]], ...] = (
        ("generated-per-trained", lambda axes: _draw_bars(axes, compared, waste=True)),
        ("fill-time", lambda axes: _draw_bars(axes, compared, waste=False)),
        ("fill-time-curves", lambda axes: _draw_fills(axes, [one.fill for one in compared])),
        ("staleness", lambda axes: _draw_staleness(axes, [one.result for one in compared])),
    )
    return tuple(_draw(folder / f"{name}.png", draw) for name, draw in plans)


def plot_result(folder: Path, result: SimulationResult, fill: SimulationResult) -> tuple[Path, ...]:
    """Write one simulation's curves of fill and step times and its staleness; errors likewise."""
    return (
        _draw(folder / "fill-time-curves.png", lambda axes: _draw_fills(axes, [fill])),
        _draw(folder / "step-time-curves.png", lambda axes: _draw_steps(axes, [result])),
        _draw(folder / "staleness.png", lambda axes: _draw_staleness(axes, [result])),
    )


def _draw(file: Path, draw: Callable[[Axes], None]) -> Path:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; install sluice[plot]") from error
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    draw(figure.add_subplot())
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    return file


def _draw_bars(axes: Axes, compared: Sequence[Compared], *, waste: bool) -> None:
    names = [one.result.strategy for one in compared]
    values = [one.result.gen_per_trained if waste else one.fill.step_s for one in compared]
    bars = axes.bar(names, values, color=_COLOURS[: len(names)])
    axes.bar_label(bars, fmt="%.2f" if waste else "%.0f")
    axes.set_ylabel("generated / trained tokens" if waste else "seconds to fill a batch")


def _draw_fills(axes: Axes, fills: Sequence[SimulationResult]) -> None:
    _draw_steps(axes, fills)
    axes.set_xlabel("seconds to fill a batch (a trainer that takes no time)")


def _draw_steps(axes: Axes, results: Sequence[SimulationResult]) -> None:
    for result, colour in zip(results, _COLOURS, strict=False):
        times = np.sort(result.step_times_s)
        shares = np.arange(1, len(times) + 1) / len(times)
        axes.step(times, shares, where="post", color=colour, label=result.strategy)
    axes.set_xlabel("seconds of a step, the trainer's part included")
    axes.set_ylabel("share of batches")
    axes.legend(frameon=False)


def _draw_staleness(axes: Axes, results: Sequence[SimulationResult]) -> None:
    width = 0.8 / len(results)
    for number, (result, colour) in enumerate(zip(results, _COLOURS, strict=False)):
        total = sum(result.staleness_counts.values())
        places = [value + (number + 0.5) * width - 0.4 for value in result.staleness_counts]
        shares = [count / total for count in result.staleness_counts.values()]
        axes.bar(places, shares, width, color=colour, label=result.strategy)
    axes.set_xticks(range(max(max(result.staleness_counts) for result in results) + 1))
    axes.set_xlabel("versions behind")
    axes.set_ylabel("share of trained samples")
    axes.legend(frameon=False)
