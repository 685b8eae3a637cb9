"""Tables of the real runs, with ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.simulator.twin import Twin, twin_row
from sluice.cli.terminal import print_table

if TYPE_CHECKING:
    from benchmarks.sampling.real import RealRun

_WIDTH = 160


def print_strategies(runs: Sequence[RealRun]) -> None:
    """Print tokens and seconds of each strategy, and their ratios to those of `rounds`."""
    base = next(run for run in runs if run.name == "rounds")
    columns = ("strategy", "generated / trained", "to rounds", "seconds a step", "rounds / it")
    rows = [
        (
            run.name,
            f"{run.gen_per_trained:.2f}",
            f"{run.gen_per_trained / base.gen_per_trained:.2f}x",
            f"{run.step_s:.2f}",
            f"{base.step_s / run.step_s:.2f}x",
        )
        for run in runs
    ]
    print_table(_console(), "real runs: strategies", columns, rows, right=columns[1:])


def print_synchrony(
    by_seed: Sequence[Mapping[float, RealRun]], overlapped: Mapping[float, Mapping[str, object]]
) -> None:
    """Print synchronous against asynchronous, medians over seeds.

    Args:
        by_seed: runs of each seed by the share of batches generated ahead; 0: synchronously.
        overlapped: figures of the asynchronous runs by that share, as the report has them.
    """
    columns = (
        *("real runs", "seconds a step", "sync / it", "held-out accuracy"),
        "sync / it until that accuracy",
    )
    rows = []
    for share in by_seed[0]:
        runs = [runs[share] for runs in by_seed]
        figures = overlapped.get(share, {"speedup": 1.0, "speedup_equal_accuracy": 1.0})
        rows.append(
            (
                f"async, {share:g} generated ahead" if share else "sync",
                f"{median(run.step_s for run in runs):.2f}",
                f"{figures['speedup']:.2f}x",
                f"{median(run.record.accuracies()[-1].accuracy for run in runs):.3f}",
                f"{figures['speedup_equal_accuracy']:.2f}x",
            )
        )
    title = f"real runs: medians of {len(by_seed)} seeds"
    print_table(_console(), title, columns, rows, right=columns[1:])


def print_twin_errors(found: Twin) -> None:
    """Print a run's figures beside its simulation's."""
    columns = ("run against its simulation", "run", "simulated", "difference", "relative error")
    rows = [twin_row(figure) for figure in found.figures]
    print_table(_console(), "twin of the stream run", columns, rows, right=columns[1:])


def _console() -> Console:
    return Console(width=_WIDTH, highlight=False)
