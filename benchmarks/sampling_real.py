"""Real runs of the quickstart's harder task, and what their simulation makes of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.cli.fitted_simulation import fitted_simulation
from sluice.launch.run_folder import claim_folder
from sluice.quickstart.prepare import PrepareProgress, prepare
from sluice.report.run_record import RunRecord, read_run
from sluice.simulate.twin import twin

ROOT = Path(__file__).resolve().parent.parent
TASK = "stretch"
COMMON = (
    "trainer.val_before_train=false",
    "trainer.test_freq=1000",  # after the last batch
    "trainer.save_freq=0",
    "actor_rollout_ref.rollout.val_kwargs.n=4",
    "sluice.rollout.batch_invariant=false",
    "data.gen_batch_size=128",
    "data.train_max_samples=768",  # so that prompts come more than once
)
STRATEGIES = {
    "rounds": ("sluice.sampling.strategy=rounds", "sluice.asynchrony.max_staleness=0"),
    "stream": ("sluice.sampling.strategy=stream", "sluice.asynchrony.max_staleness=1"),
    "staged_memory": (
        "sluice.sampling.strategy=staged_memory",
        "sluice.sampling.probe_samples=3",
        "sluice.asynchrony.max_staleness=1",
    ),
}
# One thread on each side: a replica and a trainer of one rank.
ONE_EACH = ("sluice.rollout.replicas=1", "trainer.n_gpus_per_node=1")
WARM_UP_STEPS = 4


@dataclass(frozen=True, slots=True)
class RealRun:
    """One run; `seconds` are of all steps but the first `WARM_UP_STEPS`."""

    name: str
    folder: Path
    record: RunRecord
    seconds: float
    gen_per_trained: float
    surplus_discarded: float
    prompts_skipped: float
    hard_share_ratio: float | None


def measure_strategies(output: Path, *, steps: int) -> list[RealRun]:
    """One run a strategy, same seed."""
    return [
        measure(output, name, [*overrides, f"trainer.total_training_steps={steps}"], seed=0)
        for name, overrides in STRATEGIES.items()
    ]


def measure_synchrony(output: Path, *, steps: int, seed: int) -> tuple[RealRun, RealRun]:
    """The same job synchronously and with a staleness of 1, one thread on each side."""
    common = [*ONE_EACH, f"trainer.total_training_steps={steps}"]
    synchronous = [*common, "sluice.asynchrony.max_staleness=0"]
    overlapped = [*common, "sluice.asynchrony.max_staleness=1"]
    return (
        measure(output, f"sync-{seed}", synchronous, seed=seed),
        measure(output, f"async-{seed}", overlapped, seed=seed),
    )


def measure(output: Path, name: str, overrides: Sequence[str], *, seed: int) -> RealRun:
    """One `sluice quickstart`."""
    folder = output / name
    _share_assets(output / f"assets-{seed}", folder, seed)
    command = [sys.executable, "-m", "sluice.cli.main", "quickstart", "--task", TASK]
    command += ["--seed", str(seed), "--run-dir", str(folder), *COMMON, *overrides]
    sys.stdout.write(f"{name}: {' '.join(command[3:])}\n")
    sys.stdout.flush()
    subprocess.run(command, cwd=ROOT, check=True)
    record = read_run(folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    timed = record.steps[WARM_UP_STEPS:]
    return RealRun(
        name,
        folder,
        record,
        seconds=sum(row.get("timing_s/step") or 0.0 for row in timed),
        gen_per_trained=round(summary["generated_tokens"] / summary["trained_tokens"], 3),
        surplus_discarded=record.total("train/groups_surplus"),
        prompts_skipped=record.total("train/prompts_skipped"),
        hard_share_ratio=record.steps[-1].get("sampling/hard_share_ratio"),
    )


def accuracy_of_end(run: RealRun) -> float:
    """Held-out accuracy after the last batch."""
    return run.record.accuracies()[-1].accuracy


def twin_errors(run: RealRun) -> dict[str, float]:
    """Absolute errors of a run's simulation: relative for times and waste, of shares for idle."""
    fitted = fitted_simulation(run.folder, None, 0)
    found = twin(fitted.run, fitted.settings)
    return {
        "step_time": round(found.error("step_time"), 4),
        "idle": round(max(found.error("trainer_idle"), found.error("fleet_idle")), 4),
        "waste": round(found.error("waste"), 4),
    }


def _share_assets(assets: Path, folder: Path, seed: int) -> None:
    """The model and data of a seed are made once."""
    prepare(assets, task=TASK, seed=seed, progress=_silent)
    if folder.exists():
        shutil.rmtree(folder)
    claim_folder(folder)
    shutil.copytree(assets, folder / "assets")


def _silent(_progress: PrepareProgress) -> None:
    """The making of the model takes under a minute."""
