"""`sluice simulate`: estimate what a strategy, a fleet and a staleness bound cost, before they
are paid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from sluice.algorithm.sampling.rules import StrategyName
from sluice.cli.arguments import AsJson
from sluice.cli.simulate.subject import Given, Subject, described_subject
from sluice.cli.terminal import counted, output_console, print_json, print_table
from sluice.simulate.result import SimulationResult
from sluice.simulate.result import simulate as simulate_run
from sluice.simulate.settings import SimulationSettings
from sluice.simulate.strategies import Compared, compare, simulate_fill_times


def print_result(console: Console, result: SimulationResult, fill: SimulationResult) -> None:
    """Print one simulation's figures and accounts."""
    rows = [
        ("generated / trained tokens", f"{result.gen_per_trained:.2f}"),
        ("seconds to fill a batch *", _seconds(fill.step_s)),
        ("  median, p99", f"{_seconds(fill.step_s_p50)}, {_seconds(fill.step_s_p99)}"),
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
    """Print strategies side by side."""
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
            _seconds(one.fill.step_s),
            _seconds(one.fill.step_s_p99),
            f"{one.fill_speedup:.2f}x",
            f"{one.result.steps_per_hour:.1f}",
            f"{one.step_speedup:.2f}x",
            f"{one.result.trainer_idle_share:.0%}",
            f"{one.result.fleet_idle_share:.0%}",
            _staleness(one.result),
            str(one.result.num_staleness_exceeded + one.fill.num_staleness_exceeded),
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


def result_as_json(result: SimulationResult, fill: SimulationResult) -> dict[str, object]:
    """Return one simulation without single steps' times, and the times to fill a batch."""
    figures = {name: value for name, value in asdict(result).items() if name != "step_times_s"}
    return {
        **figures,
        "fill_s_mean": fill.step_s,
        "fill_s_p50": fill.step_s_p50,
        "fill_s_p99": fill.step_s_p99,
    }


def comparison_as_json(compared: Sequence[Compared]) -> dict[str, object]:
    """Return strategies by name."""
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


def _staleness(result: SimulationResult) -> str:
    mean, p99 = result.staleness_mean, result.staleness_p99
    return f"{mean:.2f} / {p99:.0f} / {result.staleness_max}"


def _discarded(result: SimulationResult) -> str:
    return f"{result.num_kept_discarded} ({result.discarded_share:.1%})"


def _seconds(value: float) -> str:
    """Return three digits at least: batches fill in a second or in an hour."""
    return f"{value:.0f}" if value >= 100.0 else f"{value:#.3g}"


Mixture = Annotated[
    Literal["early", "mid", "late"] | None,
    typer.Option(help="Workload; none: mid. Not with --workload."),
]
WorkloadFile = Annotated[
    Path | None,
    typer.Option("--workload", help="YAML file with distributions of pass rates and lengths."),
]
Strategy = Annotated[StrategyName | None, typer.Option(help="Strategy; none: stream.")]
Replicas = Annotated[int | None, typer.Option(min=1, help="Rollout replicas; none: 8.")]
Slots = Annotated[
    int | None,
    typer.Option(min=1, help="Sequences a replica generates at once; none: 128."),
]
StepMs = Annotated[
    float | None,
    typer.Option(min=0, help="Milliseconds of a decoding step without sequences; none: 20."),
]
SequenceMs = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Milliseconds that each running sequence adds to a decoding step; none: 0.1.",
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(min=2, help="Batches; the first third warms up. none: 240."),
]
MaxStaleness = Annotated[int | None, typer.Option(min=0, help="S, versions; none: 4. rounds: 0.")]
AheadShare = Annotated[
    float | None,
    typer.Option(
        min=0.01, max=1.0, help="Share of S batches that may be generated ahead; none: 1."
    ),
]
OnPolicyFill = Annotated[
    Literal["exact", "expected"] | None,
    typer.Option(
        help="At S = 0: how a batch fills; see sluice.sampling.on_policy_fill. none: expected."
    ),
]
WhenStale = Annotated[Literal["wait", "drop"] | None, typer.Option(help="none: wait.")]
GroupSize = Annotated[int | None, typer.Option(min=2, help="Samples of a group; none: 16.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Groups of a batch; none: 64.")]
GenBatchSize = Annotated[
    int | None, typer.Option(min=1, help="rounds: prompts of a wave; none: as many as a batch.")
]
TrainerSeconds = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds to train a batch; none: 60."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")]
Compare = Annotated[bool, typer.Option("--compare", help="Compare all strategies.")]


def simulate(  # noqa: PLR0913 - one parameter an option
    *,
    mixture: Mixture = None,
    workload: WorkloadFile = None,
    strategy: Strategy = None,
    replicas: Replicas = None,
    slots: Slots = None,
    step_ms: StepMs = None,
    sequence_ms: SequenceMs = None,
    steps: Steps = None,
    max_staleness: MaxStaleness = None,
    ahead_share: AheadShare = None,
    on_policy_fill: OnPolicyFill = None,
    on_stale: WhenStale = None,
    group_size: GroupSize = None,
    batch_size: BatchSize = None,
    gen_batch_size: GenBatchSize = None,
    trainer_s: TrainerSeconds = None,
    seed: Seed = 0,
    compare_all: Compare = False,
    as_json: AsJson = False,
) -> None:
    """Simulate over-generation, staleness and fleet with the functions that drive a run.

    \b
    Examples:
      sluice simulate --compare --mixture early
      sluice simulate --workload workload.yaml --step-ms 12 --sequence-ms 0.05
      sluice simulate --strategy stream --replicas 1024 --slots 64 --batch-size 512 --steps 60

    \b
    A workload's file (all but pass_rates may be left out; docs/simulator.md has the fields):
      pass_rates: [{alpha: 0.25, beta: 5, weight: 0.6}, {alpha: 6, beta: 0.25, weight: 0.4}]
      lengths: {median_tokens_solved: 1500, median_tokens_unsolved: 3500, max_tokens: 16384}
      num_prompts: 8192
    """
    given = Given(
        *(mixture, workload, replicas, slots, step_ms, sequence_ms),
        *(group_size, batch_size, gen_batch_size, trainer_s),
        strategy=strategy,
        max_staleness=max_staleness,
        ahead_share=ahead_share,
        on_policy_fill=on_policy_fill,
        on_stale=on_stale,
    )
    found = described_subject(given, steps, seed)
    if compare_all:
        compare_strategies(found, as_json=as_json)
    else:
        simulate_one(found, as_json=as_json)


def compare_strategies(found: Subject, *, as_json: bool) -> list[Compared]:
    """Simulate every strategy, and print them side by side."""
    settings = found.settings
    with progress("comparing", 2 * len(StrategyName) * settings.num_steps) as on_step:
        compared = compare(settings, found.open_workload, on_step=on_step)
    if as_json:
        print_json(comparison_as_json(compared))
    else:
        print_comparison(output_console(), f"{found.name}: {_described(settings)}", compared)
    return list(compared)


def simulate_one(found: Subject, *, as_json: bool) -> tuple[SimulationResult, SimulationResult]:
    """Simulate one strategy, and print its figures and accounts."""
    settings = found.settings
    with progress("simulating", 2 * settings.num_steps) as on_step:
        result = simulate_run(settings, found.open_workload(), on_step=on_step)
        fill = simulate_fill_times(settings, found.open_workload(), on_step)
    if as_json:
        print_json(result_as_json(result, fill))
    else:
        print_result(output_console(), result, fill)
    return result, fill


def _described(settings: SimulationSettings) -> str:
    rules, fleet = settings.rules, settings.fleet
    ahead = f", {rules.ahead_share:g} of it ahead" if rules.num_ahead is not None else ""
    if rules.preempts:
        ahead = " with as many groups as are expected to fill a batch"
    return (
        f"{rules.train_batch_size} groups of {rules.samples_per_group}, "
        f"S = {rules.max_staleness}{ahead}, "
        f"{fleet.num_replicas} replicas with {fleet.slots} slots, "
        f"{1000 * fleet.base_step_s:.3g} + {1000 * fleet.per_sequence_s:.3g} n ms a decoding step "
        "of n sequences, "
        f"{settings.trainer.train_s:g} s to train, "
        f"{settings.num_steps} steps, the first {settings.num_warmup} left out"
    )


@contextmanager
def progress(task: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error; each call advances it by one step."""
    with counted(task, total) as advance:
        yield lambda _num_leased: advance(1)
