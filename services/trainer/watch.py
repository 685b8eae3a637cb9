"""The trainer's work as its watchdog and its status calls see it."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path

from services.trainer.fleet import Fleet
from services.trainer.run_state import RunPhase, RunState
from sluice.concurrency.advance import units_done
from sluice.concurrency.stall import WorkState
from sluice.concurrency.waits import WAITS, Waiting, merged_waits
from sluice.concurrency.watchdog import watched_service
from sluice.config.derived import checkpoint_folder
from sluice.config.endpoints import advertised_address
from sluice.config.run import RunConfig
from sluice.config.service import TrainerServiceConfig

_AWAITED_IN = {
    RunPhase.WAITING_FOR_REPLICAS: ("rollout fleet", "registering replicas"),
    RunPhase.WAITING_FOR_BATCH: ("reward service", "filling a batch"),
    RunPhase.TRAINING: ("learner thread", "updating the policy"),
    RunPhase.PUBLISHING: ("rollout fleet", "taking the weights"),
    RunPhase.EVALUATING: ("reward service", "validating"),
    RunPhase.SAVING: ("learner thread", "saving a checkpoint"),
    RunPhase.PAUSED: ("operator", "resuming the run"),
}
_AT_REST = (RunPhase.PAUSED, RunPhase.FINISHED)


def phase_waits(state: RunState) -> tuple[Waiting, ...]:
    """Whom the run as a whole waits for, since the present phase began."""
    awaited = _AWAITED_IN.get(state.phase)
    return () if awaited is None else (Waiting(*awaited, state.phase_seconds),)


def watching(config: RunConfig, state: RunState, fleet: Fleet) -> AbstractContextManager[None]:
    """The trainer's watchdog."""
    service = config.sluice.trainer
    work = TrainerWork(service, state, fleet, Path(checkpoint_folder(config)))
    address = advertised_address(service.endpoint, service.endpoint.port)
    return watched_service(
        "trainer", config.sluice, work.work_state, address=address, waits=work.waits
    )


class TrainerWork:
    """What the watchdog asks.

    Progress are steps, changes of phase, forward passes, buckets of weights, bytes of a checkpoint
    under way, and tokens of the fleet, which is what a wait for a batch waits for. A paused or
    finished run has no work.

    Args:
        service: the deadlines of the waits that have one of their own.
        state: what the run does.
        fleet: who generates.
        checkpoints: the folder of the run's checkpoints.
    """

    def __init__(
        self, service: TrainerServiceConfig, state: RunState, fleet: Fleet, checkpoints: Path
    ) -> None:
        self._state, self._fleet = state, fleet
        self._unfinished = UnfinishedCheckpoint(checkpoints)
        self._patience_s = {
            RunPhase.WAITING_FOR_REPLICAS: service.replica_wait_timeout_s,
            RunPhase.WAITING_FOR_BATCH: service.batch_timeout_s,
            RunPhase.EVALUATING: service.batch_timeout_s,
        }

    def work_state(self) -> WorkState:
        """In the event loop."""
        phase = self._state.phase
        written = self._unfinished.latest() if phase is RunPhase.SAVING else None
        progress = (phase, self._state.step, units_done(), written, self._fleet.totals())
        return WorkState(progress, phase not in _AT_REST, self._patience_s.get(phase, 0.0))

    def waits(self) -> tuple[Waiting, ...]:
        """In any thread."""
        return merged_waits((*phase_waits(self._state), *WAITS.snapshot()))


class UnfinishedCheckpoint:
    """How much of a checkpoint is on the disk, measured by a thread: a disk may hang.

    Args:
        root: the folder of the run's checkpoints.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._latest: tuple[int, int] | None = None
        self._measuring: threading.Thread | None = None

    def latest(self) -> tuple[int, int] | None:
        """Bytes that files have and bytes that are allocated; starts the next measurement.

        ``None`` before the first has ended.
        """
        if self._measuring is None or not self._measuring.is_alive():
            self._measuring = threading.Thread(
                target=self._measure, name="unfinished checkpoint", daemon=True
            )
            self._measuring.start()
        return self._latest

    def _measure(self) -> None:
        try:
            files = [file.stat() for file in self._root.glob(".*/**/*")]
        except OSError:  # renamed meanwhile: the next look sees what came of it
            return
        self._latest = sum(s.st_size for s in files), sum(s.st_blocks for s in files) * 512
