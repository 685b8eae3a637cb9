"""Measure the quickstart over several seeds, and against TRL; `make bench-quickstart`.

For each seed, in turn and on the same machine: `sluice quickstart` as TRL would train it, that is
without a group filter; TRL's GRPOTrainer on the same model, data, reward, batch sizes and learning
rate, in an environment of its own, in two set-ups: the fastest that was found (data-parallel
processes), and one process with the library's default micro-batch; and `sluice quickstart` with
DAPO's group filter. Accuracy is measured every few batches by the same code, and its time counts
for neither: TRL's clock is stopped meanwhile, sluice's checkpoints are measured after the run. Then
the embedded engine against transformers `generate`. The last line printed is one JSON object; its
lists are in the order of the seeds, and keys that end with `_filtered` are of the group filter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.quickstart.training_record import AccuracyPoint
from benchmarks.quickstart.trl_environment import trl_python
from benchmarks.reporting import ROOT, print_line
from sluice.report.run_record import read_run

MEASURE_EVERY = 2
# TRL trains on-policy on two data-parallel ranks, so sluice does too. Both replicas are there
# before the first batch, as TRL's ranks are. On-policy, the behaviour logprobs are the old ones. A
# repeatable engine is not part of the comparison.
ON_POLICY = [
    "sluice.asynchrony.max_staleness=0",
    "sluice.rollout.batch_invariant=false",
    "sluice.sampling.on_policy_fill=expected",
    "sluice.trainer.min_replicas=2",
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3000",
    "actor_rollout_ref.actor.use_rollout_log_probs=true",
    "algorithm.rollout_correction.rollout_is=null",
]
# TRL trains on every group that it draws, and those without an advantage have no gradient there.
UNFILTERED = [
    "algorithm.filter_groups.enable=false",
    "sluice.trainer.skip_zero_advantage=true",
]
MEASURED_AFTERWARDS = [
    "trainer.val_before_train=false",
    "trainer.test_freq=1000",
    f"trainer.save_freq={MEASURE_EVERY}",
    "trainer.max_actor_ckpt_to_keep=null",
]
# As somebody meets it who tunes nothing: as many threads as there are cores, and the micro-batch
# that transformers' training arguments default to.
TRL_ONE_PROCESS = (
    *("--processes", "1", "--threads", str(os.cpu_count() or 1)),
    *("--micro-batch", "8"),
)


@dataclass(frozen=True, slots=True)
class SluiceRun:
    """A run of sluice; `curve` begins with the untrained model."""

    summary: Mapping[str, float]
    curve: Sequence[AccuracyPoint]
    reward_rss_mb: float


@dataclass(frozen=True, slots=True)
class SeedResult:
    """One seed under both systems. TRL's results are empty where it was left out."""

    unfiltered: SluiceRun
    filtered: SluiceRun
    trl: Mapping[str, object]
    trl_one_process: Mapping[str, object]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    parsed = _parse(arguments)
    parsed.output.mkdir(parents=True, exist_ok=True)
    if parsed.trl:
        trl_python(parsed.trl_venv)
    results = [_measure_seed(seed, parsed) for seed in parsed.seeds]
    model = parsed.output / f"seed-{parsed.seeds[0]}" / "assets" / "model"
    command = [sys.executable, "-m", "benchmarks.quickstart.generate", "--model", str(model)]
    generate = _last_json(command)
    report = _report(results, generate, parsed.seeds, parsed.target, parsed.overrides)
    line = json.dumps(report)
    (parsed.output / "bench.json").write_text(line + "\n", encoding="utf-8")
    print_line(line)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures the quickstart over seeds and against TRL.",
        epilog="example: python -m benchmarks.quickstart --seeds 0 1 2 --target 0.88",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--target", type=float, default=0.88, help="held-out accuracy to reach")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument(
        "--overrides", nargs="*", default=ON_POLICY, help="keys for sluice's quickstart"
    )
    parser.add_argument("--trl", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl")
    parser.add_argument("--trl-max-seconds", type=float, default=900.0, help="of TRL's training")
    return parser.parse_args(arguments)


def _measure_seed(seed: int, parsed: argparse.Namespace) -> SeedResult:
    run_dir = parsed.output / f"seed-{seed}"
    print_line(f"seed {seed}: sluice without a group filter, as TRL trains")
    unfiltered = _run_sluice(seed, run_dir, [*parsed.overrides, *UNFILTERED])
    trl: Mapping[str, object] = {}
    one_process: Mapping[str, object] = {}
    if parsed.trl:
        print_line(f"seed {seed}: TRL")
        trl = _run_trl(seed, run_dir / "assets", parsed)
        print_line(f"seed {seed}: TRL in one process")
        one_process = _run_trl(seed, run_dir / "assets", parsed, TRL_ONE_PROCESS)
    print_line(f"seed {seed}: sluice with DAPO's group filter")
    filtered = _run_sluice(seed, parsed.output / f"seed-{seed}-filtered", parsed.overrides)
    if (start := filtered.curve[0].accuracy) != unfiltered.curve[0].accuracy:
        raise SystemExit(
            f"seed {seed}: the two runs of sluice begin with unlike models (accuracy {start} and "
            f"{unfiltered.curve[0].accuracy}); remove {parsed.output}, where models of another day "
            "may be, and run again"
        )
    return SeedResult(unfiltered, filtered, trl, one_process)


def _run_sluice(seed: int, run_dir: Path, overrides: Sequence[str]) -> SluiceRun:
    _run(
        [
            *(sys.executable, "-m", "sluice.cli.main", "quickstart"),
            *("--seed", str(seed), "--run-dir", str(run_dir)),
            *MEASURED_AFTERWARDS,
            *overrides,
        ]
    )
    command = [sys.executable, "-m", "benchmarks.quickstart.checkpoint_curve"]
    measured = _last_json([*command, "--run-dir", str(run_dir), "--seed", str(seed)])
    curve = measured["curve"]
    assert isinstance(curve, list)
    return SluiceRun(
        json.loads((run_dir / "summary.json").read_text(encoding="utf-8")),
        [AccuracyPoint(*point) for point in curve],
        read_run(run_dir).largest("perf/reward_rss_mb"),
    )


def seconds_to_target(curve: Sequence[AccuracyPoint], target: float) -> float | None:
    """Return the seconds of train steps, with waits, until the accuracy is at least `target`."""
    return next((point.train_seconds for point in curve if point.accuracy >= target), None)


def _run_trl(
    seed: int, assets: Path, parsed: argparse.Namespace, tuning: Sequence[str] = ()
) -> Mapping[str, object]:
    limits = ["--target", str(parsed.target), "--max-seconds", str(parsed.trl_max_seconds)]
    limits += ["--max-batches", "60", "--evaluate-every", str(MEASURE_EVERY)]
    command = [str(trl_python(parsed.trl_venv)), "-m", "benchmarks.quickstart.trl_dapo"]
    command += ["--assets", str(assets), "--seed", str(seed)]
    return _last_json([*command, *limits, *tuning])


def _report(
    results: Sequence[SeedResult],
    generate: Mapping[str, object],
    seeds: Sequence[int],
    target: float,
    overrides: Sequence[str],
) -> dict[str, object]:
    unfiltered = [result.unfiltered for result in results]
    filtered = [result.filtered for result in results]
    runs = {
        "trl": [result.trl for result in results],
        "trl_one_process": [result.trl_one_process for result in results],
    }
    return {
        "seeds": list(seeds),
        "target": target,
        "overrides": [*overrides, *UNFILTERED],
        "overrides_filtered": list(overrides),
        **_against(unfiltered, runs, target, ""),
        **_against(filtered, runs, target, "_filtered"),
        **{key: value for name, of in runs.items() for key, value in _of_trl(of, name).items()},
        "generate_ratio_hf": generate["generate_ratio_hf"],
        "generate": dict(generate),
        **_of_sluice(unfiltered, ""),
        **_of_sluice(filtered, "_filtered"),
        "reward_rss_mb": max(run.reward_rss_mb for run in (*unfiltered, *filtered)),
    }


def _of_sluice(runs: Sequence[SluiceRun], suffix: str) -> dict[str, object]:
    """Return the costs and results of whole runs; keys end with `suffix`."""
    summaries = (
        "seconds_total",
        "seconds_dapo",
        "generated_tokens",
        "trained_tokens",
        "surplus_discarded",
        "prompts_lost",
        "max_staleness_seen",
    )
    return {
        f"accuracy_before{suffix}": [run.curve[0].accuracy for run in runs],
        f"accuracy_after{suffix}": [run.curve[-1].accuracy for run in runs],
        **{f"{name}{suffix}": [run.summary[name] for run in runs] for name in summaries},
    }


def _against(
    ours: Sequence[SluiceRun],
    runs: Mapping[str, Sequence[Mapping[str, object]]],
    target: float,
    suffix: str,
) -> dict[str, object]:
    """Return our seconds to the target, and TRL's over them; keys end with `suffix`."""
    seconds = [seconds_to_target(run.curve, target) for run in ours]
    found: dict[str, object] = {
        f"seconds_to_target{suffix}": seconds,
        f"curves{suffix}": [list(run.curve) for run in ours],
    }
    for name, theirs in runs.items():
        ratios = [_ratio(mine, run) for mine, run in zip(seconds, theirs, strict=True)]
        known = [ratio for ratio in ratios if ratio is not None]
        found[f"time_to_target_ratio_{name}{suffix}"] = statistics.median(known) if known else None
        found[f"time_to_target_ratios_{name}{suffix}"] = ratios
    return found


def _of_trl(runs: Sequence[Mapping[str, object]], name: str) -> dict[str, object]:
    """Return what a set-up of TRL needed; keys end with `name`."""
    return {
        f"seconds_to_target_{name}": [run.get("seconds_to_target") for run in runs],
        f"seconds_per_batch_{name}": [run.get("seconds_per_batch") for run in runs],
        f"stopped_by_{name}": [run.get("stopped_by") for run in runs],
        f"curves_{name}": [run.get("curve") for run in runs],
    }


def _ratio(ours: float | None, trl: Mapping[str, object]) -> float | None:
    """Return TRL's seconds over ours, 0 where we never reached the target.

    Where TRL never did, its seconds are a lower bound.
    """
    theirs = trl.get("seconds_to_target") or trl.get("seconds_training")
    if not isinstance(theirs, int | float):
        return None
    return 0.0 if ours is None else round(theirs / ours, 3)


def _last_json(command: Sequence[str]) -> Mapping[str, object]:
    lines = _run(command).strip().splitlines()
    parsed = json.loads(lines[-1])
    assert isinstance(parsed, dict)
    return parsed


def _run(command: Sequence[str]) -> str:
    """Run a command, show what it prints as it comes, and return it."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print_line(line.rstrip())
        lines.append(line)
    if process.wait() != 0:
        raise SystemExit(f"{command[0]} {command[1]} ended with code {process.returncode}")
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
