"""What the run is doing, for status calls, watchers and control calls."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

_STEPS_KEPT = 1024


class RunPhase(StrEnum):
    """What the trainer does at the moment."""

    STARTING = "starting"
    WAITING_FOR_REPLICAS = "waiting_for_replicas"
    WAITING_FOR_BATCH = "waiting_for_batch"
    TRAINING = "training"
    PUBLISHING = "publishing"
    EVALUATING = "evaluating"
    SAVING = "saving"
    PAUSED = "paused"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Metrics of one finished step, from 1."""

    step: int
    metrics: Mapping[str, float]


class RunState:
    """Progress and control flags of one run; used from one event loop.

    Args:
        incarnation: UUID of this start of the trainer.
        total_steps: steps of the whole run.
        step: finished steps (above 0 after a resume).
    """

    def __init__(self, incarnation: str, total_steps: int, step: int) -> None:
        self.incarnation, self.total_steps, self.step = incarnation, total_steps, step
        self.version: int | None = None
        self.phase = RunPhase.STARTING
        self._phase_since_s = time.monotonic()
        self._seconds_by_phase: dict[RunPhase, float] = {}
        self._records: deque[StepRecord] = deque(maxlen=_STEPS_KEPT)
        self._advanced = asyncio.Condition()
        self.running = asyncio.Event()
        self.running.set()
        self.stop_reason: str | None = None
        self.save_requests: list[asyncio.Future[tuple[int, str]]] = []

    def enter(self, phase: RunPhase) -> None:
        """Notes a change of phase."""
        now_s = time.monotonic()
        spent_s = now_s - self._phase_since_s
        self._seconds_by_phase[self.phase] = self._seconds_by_phase.get(self.phase, 0.0) + spent_s
        self.phase, self._phase_since_s = phase, now_s

    @property
    def phase_seconds(self) -> float:
        """Seconds in the present phase."""
        return time.monotonic() - self._phase_since_s

    def seconds_by_phase(self) -> Mapping[RunPhase, float]:
        """Seconds spent in each phase so far, the present one included."""
        totals = dict(self._seconds_by_phase)
        totals[self.phase] = totals.get(self.phase, 0.0) + self.phase_seconds
        return totals

    @property
    def last_metrics(self) -> Mapping[str, float]:
        """Metrics of the last finished step; empty before the first."""
        return self._records[-1].metrics if self._records else {}

    async def record(self, record: StepRecord) -> None:
        """Adds a finished step and wakes watchers."""
        async with self._advanced:
            self._records.append(record)
            self.step = record.step
            self._advanced.notify_all()

    async def finish(self) -> None:
        """Marks the run as finished and wakes watchers, whose streams end."""
        async with self._advanced:
            self.enter(RunPhase.FINISHED)
            self._advanced.notify_all()

    async def records_from(self, step: int) -> tuple[StepRecord, ...]:
        """Waits for finished steps numbered `step` or above; empty once the run has finished."""
        async with self._advanced:
            await self._advanced.wait_for(
                lambda: self.phase is RunPhase.FINISHED or self.step >= step
            )
            return tuple(record for record in self._records if record.step >= step)
