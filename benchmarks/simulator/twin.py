"""A run and its simulation, figure by figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.simulator.fit import FittedRun, FittedWorkload, as_issued
from sluice.cli.simulate.command import result_as_json
from sluice.cli.terminal import print_table
from sluice.report.run_record import RunRecord
from sluice.simulate.recorder import SimulationRecorder
from sluice.simulate.result import SimulationResult, simulate
from sluice.simulate.settings import SimulationSettings
from sluice.simulate.strategies import simulate_fill_times

if TYPE_CHECKING:
    from rich.console import Console


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
    def is_share(self) -> bool:
        """Whether the figure is a share of time."""
        return self.name.endswith("_idle")

    @property
    def error(self) -> float:
        """Of a share the difference, of others the relative error; 0 where there is none."""
        return self.difference if self.is_share else self.relative_error or 0.0


@dataclass(frozen=True, slots=True)
class Twin:
    """A run's figures beside its simulation's; the simulation, and its times to fill a batch."""

    figures: dict[str, TwinFigure]
    result: SimulationResult
    fill: SimulationResult


def twin(
    fitted: FittedRun,
    settings: SimulationSettings,
    on_step: Callable[[int], None] | None = None,
) -> Twin:
    """Simulate a run and set its figures beside the real ones.

    Args:
        fitted: the run.
        settings: the run's rules with the fitted fleet and trainer, and as many steps.
        on_step: called after each step, of two simulations: the second finds the times to fill.

    Raises:
        BatchUnfillableError: the workload is hopeless.
    """
    settings, recorder = as_issued(settings), SimulationRecorder()
    trainer = replace(settings.trainer, recorded_s=_training_times(fitted.record))
    settings = replace(settings, trainer=trainer)
    workload = FittedWorkload(fitted.groups, settings.seed)
    result = simulate(settings, workload, recorder, on_step)
    workload = FittedWorkload(fitted.groups, settings.seed)
    fill = simulate_fill_times(settings, workload, on_step)
    real = _real(fitted.record, settings)
    simulated = {**_times(recorder, settings), "waste": result.gen_per_trained}
    figures = {name: TwinFigure(name, value, simulated[name]) for name, value in real.items()}
    return Twin(figures, result, fill)


def print_twin(console: Console, title: str, found: Twin) -> None:
    """Print a run's figures beside its simulation's."""
    columns = ("figure", "run", "simulated", "difference", "relative error")
    rows = []
    for figure in found.figures.values():
        if figure.is_share:
            values = (f"{figure.real:.1%}", f"{figure.simulated:.1%}")
            difference = f"{100 * figure.difference:+.1f} points"
        else:
            values = (f"{figure.real:.3f}", f"{figure.simulated:.3f}")
            difference = f"{figure.difference:+.3f}"
        relative = "" if figure.relative_error is None else f"{figure.relative_error:+.1%}"
        rows.append((figure.name.replace("_", " "), *values, difference, relative))
    print_table(console, title, columns, rows, right=columns[1:])
    console.print(
        "difference: simulated less run, in points of idle shares; relative error: that over the "
        "run's figure",
        soft_wrap=True,
    )


def twin_as_json(found: Twin) -> dict[str, object]:
    """Return figures by name, and the simulation."""
    return {
        "twin_error": {name: figure.error for name, figure in found.figures.items()},
        "figures": [
            {
                **asdict(figure),
                "error": figure.error,
                "difference": figure.difference,
                "relative_error": figure.relative_error,
            }
            for figure in found.figures.values()
        ],
        "simulated": result_as_json(found.result, found.fill),
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
