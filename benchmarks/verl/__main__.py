"""Train the quickstart's job by verl itself, on the CPU; `make bench-verl`.

For each seed, in turn: `sluice quickstart`, and verl's `main_ppo` on the same model, data, batch
sizes, learning rate and group filter, in an environment of its own, with vLLM, FSDP2 and Ray. Both
validate every 5 batches: verl between steps, off their clock, and sluice beside them. verl has no
CPU platform: `on_cpu.py` has what it lacks. A model of 0.1M parameters shows what each system adds
around a model, and nothing of a GPU. The last line printed is one JSON object; its lists are in the
order of the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.reporting import ROOT, print_line, print_report, quickstart
from sluice.config.loading.overrides import expand_overrides
from sluice.report.run_record import accuracy_of, read_progress
from tools.phases import tool_parser

Row = Mapping[str, float | None]
# Batch, seconds of training until then, held-out accuracy.
Point = tuple[int, float, float]
JOB = Path(__file__).with_name("job.overrides")
PHASES = ("gen", "old_log_prob", "update_actor", "update_weights")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "VERL_USE_EXTERNAL_MODULES": "benchmarks.verl.on_cpu",
    "VERL_PLATFORM": "cpu",
    # Chooses the FSDP engine, which is registered for CUDA's name alone.
    "VERL_ENGINE_DEVICE": "cuda",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    parsed = _parse(arguments)
    parsed.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, object]]] = {"sluice": [], "verl": []}
    for seed in parsed.seeds:
        run_dir = parsed.output / f"seed-{seed}"
        print_line(f"seed {seed}: sluice")
        quickstart(run_dir, seed, [f"trainer.total_training_steps={parsed.steps}"])
        record = read_progress(run_dir)
        found["sluice"].append(_figures([*record.validations, *record.steps], parsed.target))
        print_line(f"seed {seed}: verl, with its log in {run_dir / 'verl.log'}")
        found["verl"].append(_figures(_run_verl(seed, run_dir, parsed), parsed.target))
    return print_report(_report(found, parsed), parsed.output)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = tool_parser(__doc__, "python -m benchmarks.verl --verl-python .venv-verl/bin/python")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20, help="train batches of each run")
    parser.add_argument("--target", type=float, default=0.88, help="held-out accuracy to reach")
    parser.add_argument("--ranks", type=int, default=2, help="verl's trainer ranks and replicas")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "bench-verl")
    parser.add_argument("--verl-python", required=True, help="of an environment with verl")
    parsed = parser.parse_args(arguments)
    if shutil.which(parsed.verl_python) is None:
        parser.error(
            f"--verl-python {parsed.verl_python}: no such program; `make bench-verl` makes one"
        )
    return parsed


def _run_verl(seed: int, run_dir: Path, parsed: argparse.Namespace) -> list[Row]:
    """Train by verl from a run's model and data; return what it logs of each step."""
    assets, ranks = run_dir.resolve() / "assets", parsed.ranks
    metrics, log = run_dir.resolve() / "verl.jsonl", run_dir / "verl.log"
    settings = [
        *(one.text for one in expand_overrides([f"@{JOB}"], [])),
        f"data.train_files={assets}/data/train.parquet",
        f"data.val_files={assets}/data/test.parquet",
        f"actor_rollout_ref.model.path={assets}/model",
        f"data.seed={seed}",
        f"actor_rollout_ref.actor.fsdp_config.seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"actor_rollout_ref.rollout.agent.num_workers={ranks}",
        f"trainer.n_gpus_per_node={ranks}",
        f"+ray_kwargs.ray_init.num_gpus={ranks}",
        f"trainer.total_training_steps={parsed.steps}",
        f"hydra.run.dir={run_dir.resolve()}/verl",
    ]
    with log.open("wb") as output:
        ended = subprocess.run(
            [parsed.verl_python, "-m", "verl.trainer.main_ppo", *settings],
            cwd=run_dir,
            env=os.environ | ENVIRONMENT | {"VERL_FILE_LOGGER_PATH": str(metrics)},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if ended.returncode != 0:
        raise SystemExit(f"verl ended with code {ended.returncode}; see {log}")
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [{"step": line["step"], **line["data"]} for line in lines]


def _figures(rows: Sequence[Row], target: float) -> dict[str, object]:
    """Return what one run took, from the metrics' names that sluice and verl share."""
    until, curve = 0.0, list[Point]()
    # Of a batch its seconds come before its validation.
    for row in sorted(rows, key=lambda row: (row["step"] or 0, "timing_s/step" not in row)):
        until += row.get("timing_s/step") or 0.0
        if (accuracy := accuracy_of(row)) is not None:
            curve.append((int(row["step"] or 0), round(until, 1), accuracy))
    return {
        "seconds_training": round(until, 1),
        "seconds_to_target": next((at for _, at, found in curve if found >= target), None),
        "curve": curve,
        "phases": {
            name: round(sum(row.get(f"timing_s/{name}") or 0.0 for row in rows), 1)
            for name in PHASES
        },
    }


def _report(
    found: Mapping[str, Sequence[Mapping[str, object]]], parsed: argparse.Namespace
) -> dict[str, object]:
    report: dict[str, object] = {"seeds": parsed.seeds, "steps": parsed.steps}
    for name, runs in found.items():
        for figure in runs[0]:
            report[f"{figure}_{name}"] = [run[figure] for run in runs]
    for figure in ("seconds_training", "seconds_to_target"):
        ratios = [
            round(float(theirs[figure]) / float(ours[figure]), 2)  # type: ignore[arg-type]
            for ours, theirs in zip(found["sluice"], found["verl"], strict=True)
            if ours[figure] and theirs[figure]
        ]
        report[f"{figure}_ratios"] = ratios
        report[f"{figure}_ratio"] = median(ratios) if ratios else None
    return report


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
