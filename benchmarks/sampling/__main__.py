"""Measure costs and gains of the strategies of over-generation; `make bench-sampling`.

Simulated: every strategy on the three mixtures of docs/simulator.md, G = 16, 64 groups a batch.
Real: the quickstart's harder task on the embedded engine, one run a strategy, then synchronous
against asynchronous training with one thread on each side, and the run of `stream` against its
simulation. The last line printed is one JSON object; docs/benchmarks.md explains the figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reporting import ROOT, print_report
from benchmarks.sampling import simulated
from benchmarks.sampling.real import (
    AHEAD_SHARES,
    RealRun,
    accuracy_of_end,
    measure_strategies,
    measure_synchrony,
    steps_to_accuracy,
    twin_errors,
)
from tools.phases import tool_parser


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    parsed = _parse(arguments)
    parsed.output.mkdir(parents=True, exist_ok=True)
    report: dict[str, object] = {}
    if parsed.simulated:
        seeds, steps = parsed.seeds, parsed.simulated_steps
        pacing = simulated.by_mixture(simulated.pacing, seeds, steps)
        report |= simulated.strategies(seeds, steps)
        report["pacing_speedup"] = {name: figures["speedup"] for name, figures in pacing.items()}
        report["on_policy"] = simulated.by_mixture(simulated.on_policy, seeds, steps)
    if parsed.real:
        report |= _real(parsed)
    return print_report(report, parsed.output)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = tool_parser(__doc__, "python -m benchmarks.sampling --seeds 0 1 2 --no-real")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="simulated")
    parser.add_argument("--simulated-steps", type=int, default=180)
    parser.add_argument("--simulated", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--real", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=24, help="batches of a strategy's run")
    parser.add_argument("--pair-steps", type=int, default=40, help="batches of each of a pair")
    parser.add_argument("--pairs", type=int, default=3, help="synchronous/asynchronous pairs")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "sampling")
    return parser.parse_args(arguments)


def _real(parsed: argparse.Namespace) -> dict[str, object]:
    strategies = measure_strategies(parsed.output, steps=parsed.steps)
    by_seed = [
        measure_synchrony(parsed.output, steps=parsed.pair_steps, seed=seed)
        for seed in range(parsed.pairs)
    ]
    overlapped = {
        share: _overlapped([(runs[0.0], runs[share]) for runs in by_seed], parsed.pair_steps)
        for share in AHEAD_SHARES
    }
    all_ahead = overlapped[1.0]
    stream = next(run for run in strategies if run.name == "stream")
    return {
        "real_gen_per_trained": {run.name: run.gen_per_trained for run in strategies},
        "real_surplus_discarded": {run.name: run.surplus_discarded for run in strategies},
        "real_hard_share_ratio": {run.name: run.hard_share_ratio for run in strategies},
        "real_prompts_skipped": {run.name: run.prompts_skipped for run in strategies},
        "real_step_s": {run.name: round(run.step_s, 2) for run in strategies},
        "async_speedup": all_ahead["speedup"],
        "accuracy_sync": _median([accuracy_of_end(runs[0.0]) for runs in by_seed]),
        "accuracy_async": all_ahead["accuracy"],
        "accuracies_sync": [round(accuracy_of_end(runs[0.0]), 4) for runs in by_seed],
        "async_by_ahead_share": {f"{share:g}": found for share, found in overlapped.items()},
        # The pairs' validations hold steps up, and no simulation knows of them.
        **twin_errors(stream),
    }


def _overlapped(pairs: Sequence[tuple[RealRun, RealRun]], steps: int) -> dict[str, object]:
    """Return ratios of synchronous over asynchronous seconds: a step, and until equal accuracy."""
    speedups = [sync.step_s / overlapped.step_s for sync, overlapped in pairs]
    equally_good = [
        speedup * steps_to_accuracy(sync, accuracy_of_end(overlapped)) / steps
        for speedup, (sync, overlapped) in zip(speedups, pairs, strict=True)
    ]
    accuracies = [accuracy_of_end(overlapped) for _, overlapped in pairs]
    return {
        "speedup": _median(speedups),
        "speedups": [round(each, 3) for each in speedups],
        "accuracy": _median(accuracies),
        "accuracies": [round(each, 4) for each in accuracies],
        "speedup_equal_accuracy": _median(equally_good),
    }


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
