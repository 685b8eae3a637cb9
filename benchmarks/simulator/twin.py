"""A run and its simulation, figure by figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from benchmarks.simulator.fit import FittedRun, FittedWorkload, as_issued
from sluice.report.run_record import RunRecord
from sluice.simulate.recorder import SimulationRecorder
from sluice.simulate.result import simulate
from sluice.simulate.settings import SimulationSettings


@dataclass(frozen=True, slots=True)
class TwinFigure:
    """One figure, real and simulated.

    Args:
        name: step_time (seconds), trainer_idle and fleet_idle (shares), waste (generated over
            trained tokens).
        real: of the run.
        simulated: of its twin.
    """

    name: str
    real: float
    simulated: float

    @property
    def difference(self) -> float:
        """Simulated less real: of shares, a hundredth is a point."""
        return self.simulated - self.real

    @property
    def relative_error(self) -> float | None:
        """The difference over the real figure; ``None``: that is 0."""
        return self.difference / self.real if self.real else None

    @property
    def error(self) -> float:
        """Of a share the difference, of others the relative error; 0 where there is none."""
        is_share = self.name.endswith("_idle")
        return self.difference if is_share else self.relative_error or 0.0


def twin(fitted: FittedRun, settings: SimulationSettings) -> dict[str, TwinFigure]:
    """Simulate a run; return its figures beside the real ones, by name.

    Args:
        fitted: the run.
        settings: the run's rules with the fitted fleet and trainer, and at most as many steps.

    Raises:
        BatchUnfillableError: the workload is hopeless.
    """
    settings, recorder = as_issued(settings), SimulationRecorder()
    trainer = replace(settings.trainer, recorded_s=_training_times(fitted.record))
    settings = replace(settings, trainer=trainer)
    result = simulate(settings, FittedWorkload(fitted.groups, settings.seed), recorder)
    simulated = {**_times(recorder, settings), "waste": result.gen_per_trained}
    real = _real(fitted.record, settings)
    return {name: TwinFigure(name, value, simulated[name]) for name, value in real.items()}


def twin_as_json(figures: Mapping[str, TwinFigure]) -> dict[str, object]:
    """Return the error of each figure by name, and all values."""
    return {
        "twin_error": {name: figure.error for name, figure in figures.items()},
        "figures": [
            {
                **asdict(figure),
                "error": figure.error,
                "difference": figure.difference,
                "relative_error": figure.relative_error,
            }
            for figure in figures.values()
        ],
    }


def _training_times(record: RunRecord) -> tuple[float, ...]:
    """Of each step; none if the record lacks one."""
    times = [row.get("timing_s/train") for row in record.steps]
    return tuple(seconds for seconds in times if seconds is not None) if None not in times else ()


def _times(recorder: SimulationRecorder, settings: SimulationSettings) -> dict[str, float]:
    """Simulated figures of the steps that `_real` has."""
    before, *steps = recorder.steps[settings.num_warmup :]
    total_s = max(steps[-1].published_s - before.published_s, 1e-12)
    busy_s = steps[-1].busy_s - before.busy_s
    return {
        "step_time": total_s / len(steps),
        "trainer_idle": sum(step.leased_s - step.asked_s for step in steps) / total_s,
        "fleet_idle": 1.0 - busy_s / (total_s * settings.fleet.num_replicas),
    }


def _real(record: RunRecord, settings: SimulationSettings) -> dict[str, float]:
    """Means of the simulated steps after the warm-up; idle shares over time, waste over tokens."""
    rows = record.steps[settings.num_warmup + 1 : settings.num_steps] or record.steps
    seconds = [row.get("timing_s/step") or 0.0 for row in rows]
    total_s = max(sum(seconds), 1e-12)
    fleet_idle = [row.get("rollout/idle_share") or 0.0 for row in rows]
    generated = sum(row.get("train/generated_tokens") or 0.0 for row in rows)
    trained = sum(row.get("train/trained_tokens") or 0.0 for row in rows)
    return {
        "step_time": total_s / len(rows),
        "trainer_idle": sum(row.get("timing_s/wait_batch") or 0.0 for row in rows) / total_s,
        "fleet_idle": sum(i * s for i, s in zip(fleet_idle, seconds, strict=True)) / total_s,
        "waste": generated / trained if trained else 0.0,
    }
