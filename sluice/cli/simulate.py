"""`sluice simulate`: estimate what a strategy, a fleet and a staleness bound cost, before they
are paid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from sluice.algorithm.groups.staleness import OnStale
from sluice.algorithm.sampling.rules import OnPolicyFill, SamplingRules, StrategyName
from sluice.cli.arguments import AsJson
from sluice.cli.terminal import output_console, print_json, print_table, show_count
from sluice.errors import ConfigError
from sluice.simulate.result import (
    ComparedStrategy,
    OpenWorkload,
    SimulationResult,
    compare,
    simulate_fill_times,
    with_strategy,
)
from sluice.simulate.result import simulate as simulate_run
from sluice.simulate.settings import (
    DEFAULT_STEPS,
    FleetSettings,
    SimulationSettings,
    TrainerSettings,
)
from sluice.simulate.workload import DescribedWorkload, mixture_workload, read_workload

_MS = 1000


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


def print_comparison(console: Console, title: str, compared: Sequence[ComparedStrategy]) -> None:
    """Print strategies side by side."""
    columns = (
        *("strategy", "gen/trained", "to rounds", "fill s", "p99", "faster", "steps/h", "faster "),
        *("trainer idle", "fleet idle", "staleness", "over S", "discarded", "restarted"),
        *("long ratio", "hard share", "to stream"),
    )
    rows = [
        (
            strategy.result.strategy,
            f"{strategy.result.gen_per_trained:.2f}",
            f"{strategy.gen_ratio:.2f}x",
            _seconds(strategy.fill.step_s),
            _seconds(strategy.fill.step_s_p99),
            f"{strategy.fill_speedup:.2f}x",
            f"{strategy.result.steps_per_hour:.1f}",
            f"{strategy.step_speedup:.2f}x",
            f"{strategy.result.trainer_idle_share:.0%}",
            f"{strategy.result.fleet_idle_share:.0%}",
            _staleness(strategy.result),
            str(strategy.result.num_staleness_exceeded + strategy.fill.num_staleness_exceeded),
            _discarded(strategy.result),
            str(strategy.result.num_restarted),
            f"{strategy.result.long_prompt_ratio:.3f}",
            f"{strategy.result.hard_share:.1%}",
            f"{strategy.hard_share_ratio:.2f}x",
        )
        for strategy in compared
    ]
    print_table(console, title, columns, rows, right=columns[1:])
    console.print(
        "fill: with a trainer that takes no time. staleness: mean, p99, max.", soft_wrap=True
    )


def result_as_json(result: SimulationResult, fill: SimulationResult) -> dict[str, object]:
    """Return one simulation, and the times to fill a batch."""
    return {
        **asdict(result),
        "fill_s_mean": fill.step_s,
        "fill_s_p50": fill.step_s_p50,
        "fill_s_p99": fill.step_s_p99,
    }


def comparison_as_json(compared: Sequence[ComparedStrategy]) -> dict[str, object]:
    """Return strategies by name."""
    return {
        strategy.result.strategy: {
            **result_as_json(strategy.result, strategy.fill),
            "fill_speedup": strategy.fill_speedup,
            "gen_ratio": strategy.gen_ratio,
            "step_speedup": strategy.step_speedup,
            "hard_share_ratio": strategy.hard_share_ratio,
        }
        for strategy in compared
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
StepMs = Annotated[
    float, typer.Option(min=0, help="Milliseconds of a decoding step without sequences.")
]
SequenceMs = Annotated[
    float,
    typer.Option(min=0, help="Milliseconds that each running sequence adds to a decoding step."),
]
AheadShare = Annotated[
    float,
    typer.Option(min=0.01, max=1.0, help="Share of S batches that may be generated ahead."),
]
Fill = Annotated[
    OnPolicyFill,
    typer.Option(help="At S = 0: how a batch fills; see sluice.sampling.on_policy_fill."),
]
Stale = Annotated[OnStale, typer.Option(help="What a batch does about groups that grow too old.")]
GenBatchSize = Annotated[
    int | None, typer.Option(min=1, help="rounds: prompts of a wave; none: as many as a batch.")
]


def simulate(  # noqa: PLR0913 - one parameter an option
    *,
    mixture: Mixture = None,
    workload: WorkloadFile = None,
    strategy: Annotated[StrategyName, typer.Option(help="Strategy.")] = StrategyName.STREAM,
    replicas: Annotated[int, typer.Option(min=1, help="Rollout replicas.")] = 8,
    slots: Annotated[int, typer.Option(min=1, help="Sequences a replica generates at once.")] = 128,
    step_ms: StepMs = 20.0,
    sequence_ms: SequenceMs = 0.1,
    steps: Annotated[
        int, typer.Option(min=2, help="Batches; the first third warms up.")
    ] = DEFAULT_STEPS,
    max_staleness: Annotated[int, typer.Option(min=0, help="S, versions. rounds: 0.")] = 4,
    ahead_share: AheadShare = 1.0,
    on_policy_fill: Fill = "expected",
    on_stale: Stale = "wait",
    group_size: Annotated[int, typer.Option(min=2, help="Samples of a group.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Groups of a batch.")] = 64,
    gen_batch_size: GenBatchSize = None,
    trainer_s: Annotated[float, typer.Option(min=0, help="Seconds to train a batch.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")] = 0,
    compare_all: Annotated[bool, typer.Option("--compare", help="Compare all strategies.")] = False,
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
    rules = SamplingRules(
        StrategyName.STREAM,
        batch_size,
        max_staleness,
        group_size,
        gen_batch_size=gen_batch_size or batch_size,
        probe_samples=min(4, group_size - 1),
        seed=seed,
        ahead_share=ahead_share,
        on_policy_fill=on_policy_fill,
    )
    fleet = FleetSettings(
        replicas, slots, base_step_s=step_ms / _MS, per_sequence_s=sequence_ms / _MS
    )
    trainer = TrainerSettings(trainer_s)
    settings = SimulationSettings(rules, on_stale, fleet, trainer, num_steps=steps, seed=seed)
    name, open_workload = _load_workload(mixture, workload, seed)
    if compare_all:
        _compare(name, settings, open_workload, as_json=as_json)
    else:
        _simulate_one(with_strategy(settings, strategy), open_workload, as_json=as_json)


def _load_workload(mixture: str | None, file: Path | None, seed: int) -> tuple[str, OpenWorkload]:
    """Return its name, for titles, and what opens the same data set at each call.

    Raises:
        ConfigError: both are given, or the file is wrong.
    """
    if file is None:
        mixture = mixture or "mid"
        return mixture, partial(mixture_workload, mixture, seed)
    if mixture is not None:
        raise ConfigError(
            f"--workload: {file} and --mixture {mixture} both name the workload; leave one out"
        )
    return str(file), partial(DescribedWorkload, read_workload(file), seed)


def _compare(
    name: str, settings: SimulationSettings, open_workload: OpenWorkload, *, as_json: bool
) -> None:
    """Simulate every strategy, and print them side by side."""
    with show_count("comparing", 2 * len(StrategyName) * settings.num_steps) as advance:
        compared = compare(settings, open_workload, on_step=lambda _num_leased: advance(1))
    if as_json:
        print_json(comparison_as_json(compared))
    else:
        print_comparison(output_console(), f"{name}: {_describe(settings)}", compared)


def _simulate_one(
    settings: SimulationSettings, open_workload: OpenWorkload, *, as_json: bool
) -> None:
    """Simulate one strategy, and print its figures and accounts."""
    with show_count("simulating", 2 * settings.num_steps) as advance:
        result = simulate_run(settings, open_workload(), on_step=lambda _num_leased: advance(1))
        fill = simulate_fill_times(settings, open_workload(), lambda _num_leased: advance(1))
    if as_json:
        print_json(result_as_json(result, fill))
    else:
        print_result(output_console(), result, fill)


def _describe(settings: SimulationSettings) -> str:
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
