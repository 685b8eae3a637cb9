"""What a replica exports are its engine's counters."""

from __future__ import annotations

from services.rollout.engines.protocol import EngineLoad
from services.rollout.telemetry import load_readings
from sluice.telemetry.instruments import INSTRUMENTS

SECONDS = {"idle": 2.0, "generating": 1.5}
LOAD = EngineLoad(
    slots=8,
    slots_busy=3,
    queued=2,
    generated_tokens=100,
    unsent_tokens=5,
    running_tokens=7,
    busy_seconds=1.5,
    seconds_by_state=SECONDS,
    version=4,
    weight_digest="digest",
    direct_sent_tokens=20,
    direct_unsent_tokens=3,
)


def test_every_counter_of_the_engine_is_told() -> None:
    found = {(one.instrument.name, *one.labels): one.value for one in load_readings(LOAD)}
    assert found == {
        ("sluice_replica_slots",): 8.0,
        ("sluice_replica_slots_busy",): 3.0,
        ("sluice_replica_queued_samples",): 2.0,
        ("sluice_replica_policy_version",): 4.0,
        ("sluice_replica_generated_tokens_total",): 100.0,
        ("sluice_replica_unsent_tokens_total",): 5.0,
        ("sluice_replica_running_tokens",): 7.0,
        ("sluice_replica_direct_client_tokens_total",): 23.0,
        ("sluice_replica_busy_seconds_total",): 1.5,
        ("sluice_replica_seconds_total", "idle"): 2.0,
        ("sluice_replica_seconds_total", "generating"): 1.5,
    }
    assert {name for name, *_ in found} == {one.name for one in INSTRUMENTS["rollout"]}


def test_a_replica_without_weights_serves_version_minus_one() -> None:
    load = EngineLoad(slots=8, version=None, weight_digest="")
    found = {one.instrument.name: one.value for one in load_readings(load)}
    assert found["sluice_replica_policy_version"] == -1.0
