"""What `sluice simulate` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from sluice.cli.plain_table import print_table
from sluice.simulate.comparison import Compared
from sluice.simulate.fill_time import FillTimes
from sluice.simulate.result import SimulationResult
from sluice.simulate.sweep import TOLERANCE, Sweep
from sluice.simulate.twin import Twin, TwinFigure


def print_result(console: Console, result: SimulationResult, fill: FillTimes) -> None:
    """Prints one simulation's figures and accounts."""
    rows = [
        ("generated / trained tokens", f"{result.gen_per_trained:.2f}"),
        ("seconds to fill a batch *", _seconds(fill.mean_s)),
        ("  median, p99", f"{_seconds(fill.p50_s)}, {_seconds(fill.p99_s)}"),
        ("seconds a step", _seconds(result.step_s)),
        ("  median, p99", f"{_seconds(result.step_s_p50)}, {_seconds(result.step_s_p99)}"),
        ("steps per hour", f"{result.steps_per_hour:.2f}"),
        ("trainer idle", f"{result.trainer_idle_share:.1%}"),
        ("fleet idle", f"{result.fleet_idle_share:.1%}"),
        ("slots used", f"{result.slots_used_share:.1%}"),
        ("staleness mean, p99, max", _staleness(result)),
        ("samples beyond the bound", str(result.num_staleness_exceeded)),
        ("kept groups discarded", _discarded(result)),
        ("running groups restarted", str(result.num_restarted)),
        ("long prompts, trained to issued", f"{result.long_prompt_ratio:.3f}"),
        ("hard prompts among trained", f"{result.hard_share:.1%}"),
        ("samples", str(result.num_samples)),
    ]
    title = f"{result.strategy}: {result.num_steps} steps"
    print_table(console, title, ("figure", "value"), rows, right=("value",))
    console.print("* simulated with a trainer that takes no time", soft_wrap=True)
    console.print()
    total = result.accounts["generated"]
    accounts = [(n, f"{v:.0f}", f"{v / total:.1%}") for n, v in result.accounts.items()]
    columns = ("response tokens", "number", "share")
    print_table(console, "accounts", columns, accounts, right=columns[1:])


def print_comparison(console: Console, title: str, compared: Sequence[Compared]) -> None:
    """Prints strategies side by side."""
    columns = (
        *("strategy", "gen/trained", "to rounds", "fill s", "p99", "faster", "steps/h", "faster "),
        *("trainer idle", "fleet idle", "staleness", "over S", "discarded", "restarted"),
        *("long ratio", "hard share", "to stream"),
    )
    rows = [
        (
            one.result.strategy,
            f"{one.result.gen_per_trained:.2f}",
            f"{one.gen_ratio:.2f}x",
            _seconds(one.fill.mean_s),
            _seconds(one.fill.p99_s),
            f"{one.fill_speedup:.2f}x",
            f"{one.result.steps_per_hour:.1f}",
            f"{one.step_speedup:.2f}x",
            f"{one.result.trainer_idle_share:.0%}",
            f"{one.result.fleet_idle_share:.0%}",
            _staleness(one.result),
            str(one.result.num_staleness_exceeded + one.fill.ideal.num_staleness_exceeded),
            _discarded(one.result),
            str(one.result.num_restarted),
            f"{one.result.long_prompt_ratio:.3f}",
            f"{one.result.hard_share:.1%}",
            f"{one.hard_share_ratio:.2f}x",
        )
        for one in compared
    ]
    print_table(console, title, columns, rows, right=columns[1:])
    console.print(
        "fill: with a trainer that takes no time. staleness: mean, p99, max.", soft_wrap=True
    )


def print_sweep(console: Console, title: str, found: Sweep) -> None:
    """Prints all points, and the one to take."""
    columns = ("replicas", "S", "steps/h", "trainer idle", "fleet idle", "staleness", "")
    rows = [
        (
            str(point.num_replicas),
            str(point.max_staleness),
            f"{point.result.steps_per_hour:.2f}",
            f"{point.result.trainer_idle_share:.0%}",
            f"{point.result.fleet_idle_share:.0%}",
            _staleness(point.result),
            "<- recommended" if point is found.recommended else "",
        )
        for point in found.points
    ]
    print_table(console, title, columns, rows, right=columns[:-1])
    best = found.recommended
    console.print(
        f"{best.num_replicas} replicas and max_staleness {best.max_staleness}: the fewest "
        f"replicas, then the least staleness, within {TOLERANCE:.0%} of the best step rate",
        soft_wrap=True,
    )
    if found.is_at_edge:
        console.print(
            "That is at the edge of the grid: more may be better. The grid is laid around "
            "--replicas (or the run's) and --max-staleness; give larger ones.",
            soft_wrap=True,
        )


def print_twin(console: Console, title: str, found: Twin) -> None:
    """Prints a run's figures beside its simulation's."""
    columns = ("figure", "run", "simulated", "difference", "relative error")
    rows = [twin_row(figure) for figure in found.figures]
    print_table(console, title, columns, rows, right=columns[1:])
    console.print(
        "difference: simulated less run, in points of idle shares; relative error: that over the "
        "run's figure",
        soft_wrap=True,
    )


def twin_row(figure: TwinFigure) -> tuple[str, str, str, str, str]:
    """A figure's name, both values, their difference, and that over the run's."""
    name, relative = figure.name.replace("_", " "), figure.relative_error
    of_run = "" if relative is None else f"{relative:+.1%}"
    if figure.is_share:
        points = f"{100 * figure.difference:+.1f} points"
        return name, f"{figure.real:.1%}", f"{figure.simulated:.1%}", points, of_run
    difference = f"{figure.difference:+.3f}"
    return name, f"{figure.real:.3f}", f"{figure.simulated:.3f}", difference, of_run


def result_as_json(result: SimulationResult, fill: FillTimes | None = None) -> dict[str, object]:
    """One simulation as an object, without single steps' times; with `fill` the times to fill."""
    figures = {name: value for name, value in asdict(result).items() if name != "step_times_s"}
    if fill is not None:
        figures |= {"fill_s_mean": fill.mean_s, "fill_s_p50": fill.p50_s, "fill_s_p99": fill.p99_s}
    return figures


def comparison_as_json(compared: Sequence[Compared]) -> dict[str, object]:
    """Strategies by name."""
    return {
        one.result.strategy: {
            **result_as_json(one.result, one.fill),
            "fill_speedup": one.fill_speedup,
            "gen_ratio": one.gen_ratio,
            "step_speedup": one.step_speedup,
            "hard_share_ratio": one.hard_share_ratio,
        }
        for one in compared
    }


def sweep_as_json(found: Sweep) -> dict[str, object]:
    """All points, and the recommendation."""
    return {
        "points": [
            {
                "replicas": point.num_replicas,
                "max_staleness": point.max_staleness,
                **result_as_json(point.result),
            }
            for point in found.points
        ],
        "recommended": {
            "replicas": found.recommended.num_replicas,
            "max_staleness": found.recommended.max_staleness,
            "is_at_edge": found.is_at_edge,
        },
    }


def twin_as_json(found: Twin) -> dict[str, object]:
    """Figures by name, and the simulation."""
    return {
        "twin_error": {figure.name: figure.error for figure in found.figures},
        "figures": [
            {
                **asdict(figure),
                "error": figure.error,
                "difference": figure.difference,
                "relative_error": figure.relative_error,
            }
            for figure in found.figures
        ],
        "simulated": result_as_json(found.result, found.fill),
    }


def _staleness(result: SimulationResult) -> str:
    mean, p99 = result.staleness_mean, result.staleness_p99
    return f"{mean:.2f} / {p99:.0f} / {result.staleness_max}"


def _discarded(result: SimulationResult) -> str:
    return f"{result.num_kept_discarded} ({result.discarded_share:.1%})"


def _seconds(value: float) -> str:
    """Three digits at least: batches fill in a second or in an hour."""
    return f"{value:.0f}" if value >= 100.0 else f"{value:#.3g}"
