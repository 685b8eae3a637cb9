"""Run the quickstart's harder task for real, and simulate those runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.reporting import empty_run_folder, quickstart
from benchmarks.simulator.fit import fitted_simulation
from benchmarks.simulator.twin import twin
from sluice.report.run_record import AccuracyPoint, RunRecord, read_progress

TASK = "stretch"
GROUP_OF_16 = "actor_rollout_ref.rollout.n=16"  # as in the simulated figures
STRATEGIES = ("rounds", "stream", "staged_memory")
# One thread on each side: a replica and a trainer of one rank.
ONE_EACH = ("sluice.rollout.replicas=1", "trainer.n_gpus_per_node=1")
WARM_UP_STEPS = 4
PAIR_VALIDATION_EVERY = 8
# All ahead, which is the default, and as much as this task's trainer leaves time for.
AHEAD_SHARES = (1.0, 0.25)


@dataclass(frozen=True, slots=True)
class RealRun:
    """One run; `step_s` is the mean of all steps but the first `WARM_UP_STEPS`.

    A step that follows a validation does not count: the validation has held its batch up.
    """

    name: str
    folder: Path
    record: RunRecord
    step_s: float
    gen_per_trained: float
    surplus_discarded: float
    prompts_skipped: float
    hard_share_ratio: float | None


def measure_strategies(output: Path, *, steps: int) -> list[RealRun]:
    """Run each strategy once, with the same seed, in groups of 16."""
    common = [GROUP_OF_16, f"trainer.total_training_steps={steps}", f"trainer.test_freq={steps}"]
    return [measure(output, name, [_file(name), *common], seed=0) for name in STRATEGIES]


def measure_synchrony(output: Path, *, steps: int, seed: int) -> dict[float, RealRun]:
    """Run the same job with one thread on each side, by `ahead_share`; 0: synchronously."""
    common = [*ONE_EACH, f"trainer.total_training_steps={steps}"]
    common.append(f"trainer.test_freq={PAIR_VALIDATION_EVERY}")
    synchronous = [*common, "sluice.asynchrony.max_staleness=0"]
    runs = {0.0: measure(output, f"sync-{seed}", synchronous, seed=seed)}
    for share in AHEAD_SHARES:
        overlapped = [*common, "sluice.asynchrony.max_staleness=1"]
        overlapped.append(f"sluice.asynchrony.ahead_share={share:g}")
        runs[share] = measure(output, f"async-{share:g}-{seed}", overlapped, seed=seed)
    return runs


def measure(output: Path, name: str, overrides: Sequence[str], *, seed: int) -> RealRun:
    """Run `sluice quickstart` once."""
    folder = output / name
    empty_run_folder(folder, output / f"assets-{seed}", TASK, seed)
    summary = quickstart(folder, seed, ["--task", TASK, _file("common"), *overrides])
    record = read_progress(folder)
    validated = {point.step for point in record.accuracies()}
    timed = [
        row.get("timing_s/step") or 0.0
        for step, row in enumerate(record.steps, start=1)
        if step > WARM_UP_STEPS and step - 1 not in validated
    ]
    return RealRun(
        name,
        folder,
        record,
        step_s=fmean(timed),
        gen_per_trained=round(summary["generated_tokens"] / summary["trained_tokens"], 3),
        surplus_discarded=record.total("train/groups_surplus"),
        prompts_skipped=record.total("train/prompts_skipped"),
        hard_share_ratio=record.steps[-1].get("sampling/hard_share_ratio"),
    )


def _file(name: str) -> str:
    """Name a file of overrides."""
    return f"@{Path(__file__).with_name(f'{name}.overrides')}"


def accuracy_of_end(run: RealRun) -> float:
    """Return the held-out accuracy after the last batch."""
    return run.record.accuracies()[-1].accuracy


def steps_to_accuracy(run: RealRun, accuracy: float) -> float:
    """Return the steps until the accuracy, interpolated between validations; else all steps.

    Where it never was, the steps of the whole run.
    """
    before = AccuracyPoint(0, 0.0)
    for point in run.record.accuracies():
        if point.accuracy >= accuracy:
            share = (accuracy - before.accuracy) / (point.accuracy - before.accuracy)
            return before.step + share * (point.step - before.step)
        before = point
    return float(before.step)


def twin_errors(run: RealRun) -> dict[str, object]:
    """Set a run beside its simulation; return absolute errors.

    `twin_error` has relative ones for times and waste, and the larger one of the idle shares;
    `twin_idle_error` has both idle shares, errors in points, and over the run's share.
    """
    figures = twin(*fitted_simulation(run.folder))
    idle = {"trainer": figures["trainer_idle"], "fleet": figures["fleet_idle"]}
    errors = {name: round(abs(figures[name].error), 4) for name in ("step_time", "waste")}
    errors["idle"] = round(max(abs(figure.error) for figure in idle.values()), 4)
    return {
        "twin_error": errors,
        "twin_idle_error": {
            owner: {
                "run": round(figure.real, 4),
                "simulated": round(figure.simulated, 4),
                "points": round(100 * abs(figure.difference), 2),
                "relative": figure.relative_error and round(abs(figure.relative_error), 4),
            }
            for owner, figure in idle.items()
        },
    }
