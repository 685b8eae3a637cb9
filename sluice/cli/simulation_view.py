"""What `sluice simulate` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from sluice.cli.plain_table import print_table
from sluice.simulate.comparison import Compared
from sluice.simulate.result import SimulationResult
from sluice.simulate.sweep import TOLERANCE, Sweep
from sluice.simulate.twin import Twin


def print_result(console: Console, result: SimulationResult) -> None:
    """Prints one simulation's figures and accounts."""
    rows = [
        ("generated / trained tokens", f"{result.gen_per_trained:.2f}"),
        ("seconds from batch to batch", f"{result.fill_s_mean:.1f}"),
        ("  median, p99", f"{result.fill_s_p50:.1f}, {result.fill_s_p99:.1f}"),
        ("steps per hour", f"{result.steps_per_hour:.2f}"),
        ("trainer idle", f"{result.trainer_idle_share:.1%}"),
        ("fleet idle", f"{result.fleet_idle_share:.1%}"),
        ("slots used", f"{result.slots_used_share:.1%}"),
        ("staleness mean, p99, max", _staleness(result)),
        ("samples beyond the bound", str(result.num_staleness_exceeded)),
        ("kept groups discarded", str(result.num_kept_discarded)),
        ("running groups restarted", str(result.num_restarted)),
        ("long prompts, trained to issued", f"{result.long_prompt_ratio:.3f}"),
        ("hard prompts among trained", f"{result.hard_share:.1%}"),
        ("samples", str(result.num_samples)),
    ]
    title = f"{result.strategy}: {result.num_steps} steps"
    print_table(console, title, ("figure", "value"), rows, right=("value",))
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
            f"{one.ideal.fill_s_mean:.0f}",
            f"{one.ideal.fill_s_p99:.0f}",
            f"{one.fill_speedup:.2f}x",
            f"{one.result.steps_per_hour:.1f}",
            f"{one.step_speedup:.2f}x",
            f"{one.result.trainer_idle_share:.0%}",
            f"{one.result.fleet_idle_share:.0%}",
            _staleness(one.result),
            str(one.result.num_staleness_exceeded + one.ideal.num_staleness_exceeded),
            str(one.result.num_kept_discarded),
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
    columns = ("figure", "run", "simulated", "error")
    rows = [
        (f.name.replace("_", " "), f"{f.real:.3f}", f"{f.simulated:.3f}", f"{f.error:+.1%}")
        for f in found.figures
    ]
    print_table(console, title, columns, rows, right=columns[1:])
    console.print("error: relative; of idle shares the difference", soft_wrap=True)


def result_as_json(result: SimulationResult) -> dict[str, object]:
    """One simulation as an object, without the single fill times."""
    return {name: value for name, value in asdict(result).items() if name != "fill_times_s"}


def comparison_as_json(compared: Sequence[Compared]) -> dict[str, object]:
    """Strategies by name."""
    return {
        one.result.strategy: {
            **result_as_json(one.result),
            "fill_s_mean": one.ideal.fill_s_mean,
            "fill_s_p50": one.ideal.fill_s_p50,
            "fill_s_p99": one.ideal.fill_s_p99,
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
        "figures": [asdict(figure) for figure in found.figures],
        "simulated": result_as_json(found.result),
    }


def _staleness(result: SimulationResult) -> str:
    mean, p99 = result.staleness_mean, result.staleness_p99
    return f"{mean:.2f} / {p99:.0f} / {result.staleness_max}"
