"""Measure the quickstart over several seeds, and against TRL; `make bench-quickstart`.

For each seed, in turn and on the same machine: `sluice quickstart` as TRL would train it, that is
without a group filter; TRL's GRPOTrainer on the same model, data, reward, batch sizes and learning
rate, in an environment of its own, in two set-ups: the fastest that was found (data-parallel
processes), and one process with the library's default micro-batch; and `sluice quickstart` with
DAPO's group filter. Accuracy is measured every few batches by the same code, and its time counts
for neither: TRL's clock stops meanwhile, and sluice's checkpoints are measured after the run. The
last line printed is one JSON object; its lists are in the order of the seeds, and keys that end
with `_filtered` are of the group filter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.quickstart.checkpoint_curve import checkpoint_curve
from benchmarks.reporting import ROOT, last_json, print_line, print_report, quickstart
from sluice.config.loading.overrides import expand_overrides
from sluice.report.run_record import read_progress
from tools.phases import tool_parser

MEASURE_EVERY = 2
ON_POLICY, UNFILTERED = (
    f"@{Path(__file__).with_name(f'{name}.overrides')}" for name in ("as_trl", "unfiltered")
)
MEASURED_AFTERWARDS = [
    "trainer.val_before_train=false",
    "trainer.test_freq=1000",
    f"trainer.save_freq={MEASURE_EVERY}",
    "trainer.max_actor_ckpt_to_keep=null",
]
# TRL without tuning: as many threads as there are cores, and the micro-batch that transformers'
# training arguments default to.
TRL_ONE_PROCESS = (
    *("--processes", "1", "--threads", str(os.cpu_count() or 1)),
    *("--micro-batch", "8"),
)


SUMMARIES = (
    "seconds_total",
    "seconds_dapo",
    "generated_tokens",
    "trained_tokens",
    "surplus_discarded",
    "prompts_lost",
    "max_staleness_seen",
)
# Batch, seconds of training until then, held-out accuracy.
Point = tuple[int, float, float]


@dataclass(frozen=True, slots=True)
class SluiceRun:
    """A run of sluice; `curve` begins with the untrained model."""

    summary: Mapping[str, float]
    curve: Sequence[Point]
    reward_rss_mb: float


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    parsed = _parse(arguments)
    parsed.output.mkdir(parents=True, exist_ok=True)
    ours: dict[str, list[SluiceRun]] = {"": [], "_filtered": []}
    trl: dict[str, list[Mapping[str, object]]] = {"trl": [], "trl_one_process": []}
    tunings = {"trl": (), "trl_one_process": TRL_ONE_PROCESS}
    for seed in parsed.seeds:
        run_dir = parsed.output / f"seed-{seed}"
        print_line(f"seed {seed}: sluice without a group filter, as TRL trains")
        ours[""].append(_run_sluice(seed, run_dir, [ON_POLICY, UNFILTERED]))
        for name, tuning in tunings.items():
            print_line(f"seed {seed}: {name}")
            trl[name].append(_run_trl(seed, parsed, tuning) if parsed.trl_python else {})
        print_line(f"seed {seed}: sluice with DAPO's group filter")
        filtered = parsed.output / f"seed-{seed}-filtered"
        ours["_filtered"].append(_run_sluice(seed, filtered, [ON_POLICY]))
        starts = {runs[-1].curve[0][2] for runs in ours.values()}
        if len(starts) > 1:
            raise SystemExit(
                f"seed {seed}: the two runs of sluice begin with unlike models (accuracies "
                f"{sorted(starts)}); remove {parsed.output}, where models of another day may be, "
                "and run again"
            )
    return print_report(_report(ours, trl, parsed), parsed.output)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = tool_parser(__doc__, "python -m benchmarks.quickstart --seeds 0 1 2 --target 0.88")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--target", type=float, default=0.88, help="held-out accuracy to reach")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument("--trl-python", help="of an environment with TRL; none: without TRL")
    return parser.parse_args(arguments)


def _run_sluice(seed: int, run_dir: Path, overrides: Sequence[str]) -> SluiceRun:
    summary = quickstart(run_dir, seed, [*MEASURED_AFTERWARDS, *overrides])
    rss_mb = read_progress(run_dir).maximum("perf/reward_rss_mb")
    return SluiceRun(summary, list(checkpoint_curve(run_dir, seed)), rss_mb)


def _run_trl(seed: int, parsed: argparse.Namespace, tuning: Sequence[str]) -> Mapping[str, object]:
    command = [parsed.trl_python, "-m", "benchmarks.quickstart.trl_dapo", "--seed", str(seed)]
    command += ["--assets", str(parsed.output / f"seed-{seed}" / "assets")]
    command += ["--target", str(parsed.target), "--evaluate-every", str(MEASURE_EVERY), *tuning]
    return last_json(command)


def _report(
    ours: Mapping[str, Sequence[SluiceRun]],
    trl: Mapping[str, Sequence[Mapping[str, object]]],
    parsed: argparse.Namespace,
) -> dict[str, object]:
    """Return the last line; keys of our runs end with the key of `ours`."""
    report: dict[str, object] = {
        "seeds": parsed.seeds,
        "target": parsed.target,
        "overrides": [one.text for one in expand_overrides([ON_POLICY, UNFILTERED], [])],
        "overrides_filtered": [one.text for one in expand_overrides([ON_POLICY], [])],
    }
    for suffix, runs in ours.items():
        report |= _against(runs, trl, parsed.target, suffix)
    for name, found in trl.items():
        for figure in ("seconds_to_target", "seconds_per_batch", "stopped_by"):
            report[f"{figure}_{name}"] = [run.get(figure) for run in found]
        report[f"curves_{name}"] = [run.get("curve") for run in found]
    for suffix, runs in ours.items():
        report[f"accuracy_before{suffix}"] = [run.curve[0][2] for run in runs]
        report[f"accuracy_after{suffix}"] = [run.curve[-1][2] for run in runs]
        for name in SUMMARIES:
            report[f"{name}{suffix}"] = [run.summary[name] for run in runs]
    rss_mb = max(run.reward_rss_mb for runs in ours.values() for run in runs)
    return report | {"reward_rss_mb": rss_mb}


def _against(
    ours: Sequence[SluiceRun],
    trl: Mapping[str, Sequence[Mapping[str, object]]],
    target: float,
    suffix: str,
) -> dict[str, object]:
    """Return our seconds of train steps, with waits, to the target, and TRL's over them."""
    seconds = [
        next((until for _, until, accuracy in run.curve if accuracy >= target), None)
        for run in ours
    ]
    found: dict[str, object] = {
        f"seconds_to_target{suffix}": seconds,
        f"curves{suffix}": [list(run.curve) for run in ours],
    }
    for name, theirs in trl.items():
        ratios = [_ratio(mine, run) for mine, run in zip(seconds, theirs, strict=True)]
        known = [ratio for ratio in ratios if ratio is not None]
        found[f"time_to_target_ratio_{name}{suffix}"] = statistics.median(known) if known else None
        found[f"time_to_target_ratios_{name}{suffix}"] = ratios
    return found


def _ratio(ours: float | None, trl: Mapping[str, object]) -> float | None:
    """Return TRL's seconds over ours, 0 where we never reached the target.

    Where TRL never did, its seconds are a lower bound.
    """
    theirs = trl.get("seconds_to_target") or trl.get("seconds_training")
    if not isinstance(theirs, int | float):
        return None
    return 0.0 if ours is None else round(theirs / ours, 3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
