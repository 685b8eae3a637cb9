"""A run in containers that is scaled and whose processes are killed while it trains."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from tools.compose_test.project import ContainerState, Project
from tools.phases import PhaseError, Phases, until

RUN = "/runs/run"
# What the quickstart comes to in its 20 steps; docs/benchmarks.md.
TARGET_ACCURACY = 0.88
_INTERVAL_S = 2.0
_KILLED = 137


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run has written so far.

    `replicas` are those that served, step by step; `accuracy` is the last held-out accuracy.
    """

    step: int
    replicas: tuple[int, ...]
    accuracy: float | None


def _read_metrics(file: Path) -> RunRecord:
    """Read metrics.jsonl; a line that is being written is passed over."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    rows = [json.loads(line) for line in text.split("\n")[:-1]]
    steps = [row for row in rows if "training/global_step" in row]
    found = [value for row in rows if (value := _accuracy(row)) is not None]
    return RunRecord(
        int(steps[-1]["step"]) if steps else 0,
        tuple(int(row.get("rollout/replicas") or 0) for row in steps),
        found[-1] if found else None,
    )


def _accuracy(row: Mapping[str, float | None]) -> float | None:
    values = [
        value
        for name, value in row.items()
        if name.startswith("val-core/") and "/acc/mean@" in name and value is not None
    ]
    return fmean(values) if values else None


@dataclass(slots=True)
class Outcome:
    """What was seen. `recovered` holds services whose first process was killed."""

    scaled: list[int] = field(default_factory=list)
    recovered: list[str] = field(default_factory=list)
    accuracy: float | None = None
    prompts_lost: int | None = None
    steps: int = 0
    exit_codes: dict[str, list[int]] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """Return what is wrong at the end; a scaling or a kill that fails raises before."""
        found = []
        if self.accuracy is None or self.accuracy < TARGET_ACCURACY:
            found.append(f"held-out accuracy {self.accuracy} is below {TARGET_ACCURACY}")
        if self.prompts_lost != 0:
            found.append(f"{self.prompts_lost} prompts are lost")
        if any(code for codes in self.exit_codes.values() for code in codes):
            found.append(f"exit codes: {self.exit_codes}")
        return found

    def report(self) -> dict[str, object]:
        """Return the outcome by the keys of the last line."""
        return {
            "target_reached": self.accuracy is not None and self.accuracy >= TARGET_ACCURACY,
            "scaled": self.scaled,
            "killed_and_recovered": self.recovered,
            "prompts_lost": self.prompts_lost,
            "final_accuracy": self.accuracy,
            "steps": self.steps,
            "exit_codes": self.exit_codes,
        }


class Scenario:
    """Drives one project.

    Args:
        project: built.
        phases: take the seconds.
        patience_s: most seconds for each wait.
        prefix: of the names of the phases of `start`.
    """

    def __init__(
        self, project: Project, phases: Phases, patience_s: float, prefix: str = ""
    ) -> None:
        self._project, self._phases, self._patience_s = project, phases, patience_s
        self._prefix = prefix
        self.outcome = Outcome()

    def start(self, replicas: int, *services: str) -> None:
        """Make the model and start these services, or all; return after the first step."""
        with self._phases.phase(f"{self._prefix}prepare and up"):
            self._up(replicas, *services)
        with self._phases.phase(f"{self._prefix}first step"):
            self._until("the first step", lambda: self.record().step > 0)
        self._until_served_by(replicas)

    def _up(self, replicas: int, *further: str) -> None:
        scale = ("--scale", f"rollout={replicas}")
        self._project.run("up", "-d", "--no-build", *scale, *further, timeout_s=self._patience_s)

    def scale(self, replicas: int) -> None:
        """Change the number of replicas, and wait for a step that so many served."""
        with self._phases.phase(f"scale to {replicas}"):
            self._up(replicas, "--no-recreate")
            self._until_served_by(replicas)

    def kill(self, service: str, replicas: int) -> None:
        """Kill a service's first process; return when it is healthy again and a step followed."""
        with self._phases.phase(f"kill {service}"):
            container, before = next(iter(self._project.containers(service).items()))
            self._project.kill(container)
            self._until(
                f"{service} running again and healthy",
                lambda: self._is_back(container, before),
            )
            steps = len(self.record().replicas)
            self._until(
                f"a step after {service} came back, served by {replicas} replicas",
                lambda: replicas in self.record().replicas[steps:],
            )
        self.outcome.recovered.append(service)

    def finish(self) -> None:
        """Wait until all containers have ended, as they do with their run."""
        with self._phases.phase("training to the end"):
            steps, ends_s = -1, 0.0
            while not self._has_ended():
                # A slow run that makes progress is not given up.
                if (now := len(self.record().replicas)) > steps:
                    steps, ends_s = now, time.monotonic() + self._patience_s
                if time.monotonic() > ends_s:
                    raise PhaseError(f"no step within {self._patience_s:g} s, and no end")
                time.sleep(_INTERVAL_S)
        record = self.record()
        self.outcome.accuracy, self.outcome.steps = record.accuracy, record.step
        for state in self._project.containers().values():
            self.outcome.exit_codes.setdefault(state.service, []).append(state.exit_code)
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "accounts.json"
            if self._project.copy_out(f"{RUN}/accounts.json", file):
                self.outcome.prompts_lost = int(json.loads(file.read_text("utf-8"))["prompts_lost"])

    def _has_ended(self) -> bool:
        return all(state.status == "exited" for state in self._project.containers().values())

    def record(self) -> RunRecord:
        """Return what the run has written so far."""
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "metrics.jsonl"
            self._project.copy_out(f"{RUN}/metrics.jsonl", file)
            return _read_metrics(file)

    def _is_back(self, container: str, before: ContainerState) -> bool:
        state = self._project.containers().get(container)
        return state is not None and state.is_healthy and state.restarts > before.restarts

    def _until_served_by(self, replicas: int) -> None:
        steps = len(self.record().replicas)
        self._until(
            f"a step served by {replicas} replicas",
            lambda: replicas in self.record().replicas[steps:],
        )
        self.outcome.scaled.append(replicas)

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        def holds_or_ended() -> bool:
            if holds():
                return True
            trainer = next(iter(self._project.containers("trainer").values()), None)
            ended = trainer is not None and trainer.status == "exited"
            if trainer is not None and ended and trainer.exit_code != _KILLED:
                raise PhaseError(
                    f"{what}: the trainer ended first with code {trainer.exit_code}; if that is 0, "
                    "give it more --steps"
                )
            return False

        until(what, holds_or_ended, timeout_s=self._patience_s, interval_s=_INTERVAL_S)
