"""Baseline of `make bench-quickstart`: the quickstart job under TRL's GRPOTrainer.

Run it in the environment of `trl_environment.py`::

    VENV/bin/python -m benchmarks.quickstart.trl_dapo --assets DIR --seed 0 --target 0.85

By default it becomes two data-parallel ranks of one thread each, TRL's fastest way on two cores.
The clock covers `Trainer.train` without the evaluations; loading and the first evaluation come
before it. The last line printed is the result as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from benchmarks.quickstart.training_record import Bounds
from benchmarks.quickstart.trl_settings import DapoJob, TrlTuning
from benchmarks.reporting import print_line

if TYPE_CHECKING:
    from benchmarks.quickstart.trl_run import TrlOutcome

REQUIRED_ASSETS = ("model/config.json", "data/train.parquet", "data/test.parquet")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exits with the usage on a wrong one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--assets", type=Path, required=True, help="the quickstart's directory")
    parser.add_argument("--output", type=Path, help="file for the result (JSON)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.85, help="accuracy that ends the run")
    parser.add_argument("--max-seconds", type=float, default=900.0, help="of training")
    parser.add_argument("--max-batches", type=int, default=60)
    parser.add_argument("--evaluate-every", type=int, default=5, help="in batches")
    tuning = parser.add_argument_group("tuning", "defaults are the fastest measured on two cores")
    for field in fields(TrlTuning):
        flag = f"--{field.name.replace('_', '-')}"
        default = field.default
        if isinstance(default, bool):
            tuning.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        else:
            tuning.add_argument(flag, type=type(default), default=default)
    parsed = parser.parse_args(arguments)
    _check(parser, parsed)
    return parsed


def _check(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    for name in REQUIRED_ASSETS:
        if not (parsed.assets / name).is_file():
            parser.error(f"--assets {parsed.assets}: {name} is missing; `make quickstart` makes it")
    for name in ("max_batches", "evaluate_every", "processes", "threads", "micro_batch"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    step, share = DapoJob().step_completions, parsed.micro_batch * parsed.processes
    if step % share:
        parser.error(
            f"--micro-batch {parsed.micro_batch} times --processes {parsed.processes} is {share}, "
            f"which does not divide {step}, the completions of an optimizer step"
        )


def tuning_of(parsed: argparse.Namespace) -> TrlTuning:
    """Return the tuning flags as settings."""
    return TrlTuning(**{field.name: getattr(parsed, field.name) for field in fields(TrlTuning)})


def make_result(
    outcome: TrlOutcome, *, seed: int, bounds: Bounds, settings: dict[str, object]
) -> dict[str, object]:
    """Return the JSON object of a run; times in seconds."""
    reached = outcome.curve.first_at(bounds.target)
    batches = max(1, outcome.batches)
    return {
        "framework": "trl",
        "seed": seed,
        "target": bounds.target,
        "seconds_to_target": reached.train_seconds if reached else None,
        "batches_to_target": reached.batch if reached else None,
        "accuracy_before": outcome.curve.points[0].accuracy,
        "accuracy_after": outcome.curve.points[-1].accuracy,
        "curve": outcome.curve.points,
        "stopped_by": outcome.stopped_by,
        "batches": outcome.batches,
        "generated_tokens": outcome.generated_tokens,
        "trained_tokens": outcome.generated_tokens,
        "seconds_training": round(outcome.training_seconds, 3),
        "seconds_evaluation": round(outcome.evaluation_seconds, 3),
        "seconds_setup": round(outcome.setup_seconds, 3),
        "seconds_per_batch": round(outcome.training_seconds / batches, 4),
        "cpu_seconds_per_batch": round(outcome.cpu_seconds / batches, 4),
        "tokens_per_second": round(outcome.generated_tokens / outcome.training_seconds),
        "settings": settings,
    }


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    parsed = parse_arguments(arguments)
    tuning = tuning_of(parsed)
    if tuning.processes > 1 and "LOCAL_RANK" not in os.environ:
        _become_ranks(tuning, arguments)
    from benchmarks.quickstart.trl_run import TrlRun, train, versions

    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    job = DapoJob()
    bounds = Bounds(parsed.target, parsed.max_batches, parsed.max_seconds)
    run = TrlRun(parsed.assets, job, tuning, bounds, parsed.evaluate_every, parsed.seed)
    outcome = train(run, report=print_line if is_first else _print_nothing)
    settings: dict[str, object] = {"job": asdict(job), "tuning": asdict(tuning)}
    result = make_result(outcome, seed=parsed.seed, bounds=bounds, settings=settings)
    if is_first:
        line = json.dumps(result | {"versions": versions()})
        if parsed.output:
            parsed.output.write_text(line + "\n")
        print_line(line)
    return 0


def _become_ranks(tuning: TrlTuning, arguments: Sequence[str]) -> NoReturn:
    """Start this script again as data-parallel ranks with their threads.

    The launcher replaces this process, so that ending this process ends the ranks.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(tuning.processes), "-m", "benchmarks.quickstart.trl_dapo"]
    environment = os.environ | {"OMP_NUM_THREADS": str(tuning.threads)}
    os.execve(sys.executable, [*command, *arguments], environment)  # noqa: S606


def _print_nothing(line: str) -> None:
    del line


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # Gloo's threads, left over by the ranks' group, can abort an interpreter that ends in order.
    os._exit(status)
