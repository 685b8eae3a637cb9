"""The trainer's Prometheus readings: its state, fleet, accounts and newest metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from services.trainer.fleet.delivery import DeliveryCounts, DeliveryPhase
from services.trainer.fleet.members import Fleet
from services.trainer.loop.run_state import RunPhase, RunState
from services.trainer.telemetry import RunHistory, TrainerMetrics
from sluice.algorithm.accounting import ReplicaCounters, run_accounts
from sluice.telemetry.metric_names import instruments
from sluice.telemetry.metrics import Distribution
from sluice.types import ReplicaInfo

STEP = {"training/global_step": 3.0, "timing_s/step": 4.0, "timing_s/wait_batch": 0.2}


def metrics() -> TrainerMetrics:
    return TrainerMetrics(
        RunState("trainer-1", 10, 2), Fleet("layout", 6.0), RunHistory(), DeliveryCounts()
    )


def reported(of: TrainerMetrics) -> Mapping[tuple[str, ...], float | Distribution]:
    readings = list(of.readings())
    assert {one.instrument for one in readings} <= set(instruments()["trainer"])
    found = {(one.instrument.name, *one.labels): one.value for one in readings}
    assert len(found) == len(readings)
    return found


def test_a_run_tells_its_phase_and_how_far_it_is() -> None:
    run = metrics()
    run.state.enter(RunPhase.TRAINING)
    run.state.version = 2
    found = reported(run)
    assert found[("sluice_trainer_steps_total",)] == 2.0
    assert found[("sluice_trainer_planned_steps",)] == 10.0
    assert found[("sluice_trainer_policy_version",)] == 2.0
    phases = {str(phase): found[("sluice_trainer_phase", str(phase))] for phase in RunPhase}
    assert phases == {str(phase): float(phase is RunPhase.TRAINING) for phase in RunPhase}


def test_tokens_are_exported_by_use_and_open_ones_are_no_counter() -> None:
    run = metrics()
    assert not [name for name, *_ in reported(run) if name.startswith("sluice_tokens")]
    received = {"trained": 60.0, "stale": 10.0, "pending": 20.0}
    fleet = ReplicaCounters(
        generated_tokens=130,
        unsent_tokens=7,
        running_tokens=6,
        wall_seconds=9.0,
        seconds_by_state={"idle": 9.0},
        direct_sent_tokens=27,
        direct_unsent_tokens=3,
    )
    accounting = run_accounts(fleet, received, {"training": 5.0}, 5.0)
    run.state.accounts = replace(accounting, tokens_age_s=30.0, tokens_moved=8).as_mapping()
    found = reported(run)
    assert found[("sluice_tokens_generated_total",)] == 130.0
    assert found[("sluice_tokens_total", "direct_clients")] == 30.0
    assert found[("sluice_tokens_total", "trained")] == 60.0
    assert found[("sluice_tokens_total", "aborted")] == 4.0
    assert found[("sluice_tokens_open", "pending")] == 20.0
    assert found[("sluice_tokens_open", "under_way")] == 6.0
    assert found[("sluice_accounting_residual", "tokens")] == 0.0
    assert found[("sluice_accounting_tokens_moved",)] == 8.0
    assert found[("sluice_accounting_tokens_age_seconds",)] == pytest.approx(30.0, abs=5.0)
    ends = [value for (name, *_), value in found.items() if name == "sluice_tokens_total"]
    assert sum(value for value in ends if isinstance(value, float)) == 130.0 - 20.0 - 6.0


def test_replicas_are_exported_by_state_and_one_by_one() -> None:
    run = metrics()
    info = ReplicaInfo("a", "a-1", "host:1", 8)
    run.fleet.register(info, "layout", 0.0)
    load = ReplicaCounters(
        slots_busy=3,
        queued=2,
        generated_tokens=50,
        busy_seconds=1.0,
        wall_seconds=5.0,
        seconds_by_state={"idle": 5.0},
    )
    run.fleet.heartbeat("a", "a-1", load, draining=False, now_s=1.0)
    run.fleet.mark_serving(info, 4)
    found = reported(run)
    states = ("pending", "serving", "draining", "stalled")
    assert [found[("sluice_fleet_replicas", state)] for state in states] == [0.0, 1.0, 0.0, 0.0]
    assert found[("sluice_fleet_slots",)] == 8.0
    assert (
        found[("sluice_fleet_slots_busy",)] == found[("sluice_fleet_replica_slots_busy", "a")] == 3
    )
    assert found[("sluice_fleet_queued_samples",)] == 2.0
    assert found[("sluice_fleet_replica_version", "a")] == 4.0
    assert found[("sluice_fleet_seconds_total", "idle")] == 5.0
    run.fleet.expel(info, "gone")
    after = reported(run)
    assert after[("sluice_fleet_tokens_total",)] == 50.0
    assert ("sluice_fleet_replica_version", "a") not in after


def test_the_last_step_and_the_last_validation_are_exported() -> None:
    run = metrics()
    run.history.write(3, {**STEP, "actor/lr": 1e-4, "actor/skipped_updates": 2.0})
    run.history.write(4, {**STEP, "actor/lr": 5e-5, "actor/skipped_updates": 1.0})
    run.history.write(4, {"val-core/openai/gsm8k/acc/mean@8": 0.75, "val/failed": 0.0})
    found = reported(run)
    assert found[("sluice_trainer_learning_rate",)] == 5e-5
    assert found[("sluice_trainer_skipped_updates_total",)] == 3.0
    assert found[("sluice_trainer_validation_score", "openai/gsm8k", "acc", "mean@8")] == 0.75
    assert ("sluice_trainer_entropy_nats",) not in found
    waits = found[("sluice_trainer_batch_wait_seconds",)]
    assert isinstance(waits, Distribution)
    assert (waits.cumulative[-1][1], waits.total) == (2, pytest.approx(0.4))


def test_weight_updates_are_exported_by_encoding_and_phase() -> None:
    run = metrics()
    run.deliveries.count_delivery("fleet", 100, 100, 0.5)
    run.deliveries.count_delivery("newcomers", 10, 100, 0.25)
    run.deliveries.count_failure(DeliveryPhase.STAGE)
    with run.deliveries.time_phase(DeliveryPhase.COMMIT):
        pass
    found = reported(run)
    assert found[("sluice_weights_updates_total", "fleet")] == 1.0
    assert found[("sluice_weights_sent_bytes_total", "dense")] == 100.0
    assert found[("sluice_weights_sent_bytes_total", "sparse")] == 10.0
    assert found[("sluice_weights_whole_bytes_total",)] == 200.0
    assert found[("sluice_weights_failures_total", "stage")] == 1.0
    assert found[("sluice_weights_failures_total", "form")] == 0.0
    assert found[("sluice_weights_stall_seconds_total",)] == 0.75
    seconds = found[("sluice_weights_seconds_total", "commit")]
    assert isinstance(seconds, float)
    assert seconds > 0.0
