"""The progress that the trainer's watchdog sees, and the peer awaited in each phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.trainer.fleet.members import Fleet
from services.trainer.loop.run_state import RunPhase, RunState, StepRecord, phase_waits
from services.trainer.servicer import TrainerServicer
from services.trainer.telemetry import trainer_work
from sluice.algorithm.accounting import ReplicaCounters
from sluice.api.trainer.v1 import trainer_pb2
from sluice.concurrency.threads import BackgroundMeasurement
from sluice.concurrency.waits import advance
from sluice.config.loading.loader import load_config
from sluice.config.schema.service import ServiceConfig
from sluice.types import ReplicaInfo

KEYS = ("sluice.trainer.replica_wait_timeout_s=11", "sluice.trainer.batch_timeout_s=22")
CONTEXT: Any = None
REPLICA = ReplicaInfo("rollout-0", "instance-0", "host:1", 8)


class Trainer:
    """A run's state, fleet and watchdog's view."""

    def __init__(self, checkpoints: Path) -> None:
        self.state, self.fleet = RunState("trainer-1", 10, 2), Fleet("layout", 6.0)
        self.fleet.register(REPLICA, "layout", 0.0)
        config = load_config(None, [*KEYS, f"trainer.default_local_dir={checkpoints}"])
        self.work_state = trainer_work(config, self.state, self.fleet)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "checkpoints")


async def test_every_step_of_the_work_is_progress(trainer: Trainer) -> None:
    seen = [trainer.work_state().progress]

    def moved() -> None:
        seen.append(trainer.work_state().progress)
        assert seen[-1] not in seen[:-1]

    trainer.state.enter(RunPhase.TRAINING)
    moved()
    advance()
    moved()
    await trainer.state.record(StepRecord(3, {}))
    moved()
    load = ReplicaCounters(slots_busy=1, queued=0, generated_tokens=40, busy_seconds=1.0)
    trainer.fleet.heartbeat("rollout-0", "instance-0", load, draining=False, now_s=1.0)
    moved()
    assert trainer.work_state().progress == seen[-1]


async def test_a_checkpoint_that_grows_is_progress_and_one_that_does_not_is_none(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = BackgroundMeasurement.latest
    monkeypatch.setattr(BackgroundMeasurement, "latest", lambda each, *_: latest(each, 60.0))
    file = tmp_path / "checkpoints" / ".global_step_3.partial" / "actor" / "optimizer.safetensors"
    file.parent.mkdir(parents=True)
    trainer.state.enter(RunPhase.SAVING)

    seen = []
    for size in (0, 10, 20_000, 20_001):
        file.write_bytes(b"x" * size)
        seen.append(trainer.work_state().progress)
        assert trainer.work_state().progress == seen[-1]
    assert len(set(seen)) == 4


def test_a_paused_or_finished_run_has_no_work(trainer: Trainer) -> None:
    for phase in RunPhase:
        trainer.state.enter(phase)
        rests = phase in {RunPhase.PAUSED, RunPhase.FINISHED}
        assert trainer.work_state().has_work is not rests


def test_waits_for_others_are_left_to_their_own_deadlines(trainer: Trainer) -> None:
    found = {}
    for phase in RunPhase:
        trainer.state.enter(phase)
        found[phase] = trainer.work_state().patience_s
    assert {phase: seconds for phase, seconds in found.items() if seconds} == {
        RunPhase.WAITING_FOR_REPLICAS: 11.0,
        RunPhase.WAITING_FOR_BATCH: 22.0,
        RunPhase.EVALUATING: 22.0,
    }


def test_each_phase_but_the_first_and_the_last_names_whom_it_waits_for(trainer: Trainer) -> None:
    silent = set()
    for phase in RunPhase:
        trainer.state.enter(phase)
        silent |= set() if phase_waits(trainer.state) else {phase}
    assert silent == {RunPhase.STARTING, RunPhase.FINISHED}


async def test_status_tells_whom_the_run_waits_for(trainer: Trainer) -> None:
    trainer.state.enter(RunPhase.WAITING_FOR_BATCH)
    servicer = TrainerServicer(trainer.fleet, trainer.state, ServiceConfig())
    status = await servicer.GetStatus(trainer_pb2.GetStatusRequest(), CONTEXT)
    (wait,) = (w for w in status.wait_report.waits if w.phase == "filling a batch")
    assert (wait.peer, wait.count) == ("reward service", 1)
    assert not status.wait_report.HasField("still_seconds")
