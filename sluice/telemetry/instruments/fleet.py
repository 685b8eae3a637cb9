"""Metrics of the replicas that the trainer exports, by their heartbeats."""

from __future__ import annotations

from sluice.telemetry.metrics import counter, gauge

REPLICAS = gauge("sluice_fleet_replicas", "replicas", "Registered replicas by state.", "state")
SLOTS = gauge(
    "sluice_fleet_slots", "slots", "Samples that all registered replicas can run at once."
)
SLOTS_BUSY = gauge("sluice_fleet_slots_busy", "slots", "Slots with a sample in them.")
QUEUED = gauge(
    "sluice_fleet_queued_samples", "samples", "Samples at replicas that wait for a slot."
)
FLEET_TOKENS = counter(
    "sluice_fleet_tokens_total",
    "tokens",
    "Response tokens by the last heartbeats, also of replicas that have left.",
)
FLEET_SECONDS = counter(
    "sluice_fleet_seconds_total",
    "seconds",
    "Where the replicas' time went, summed over all that ever registered.",
    "state",
)
FLEET_WALL = counter(
    "sluice_fleet_wall_seconds_total", "seconds", "Ages of the same processes, summed."
)
REPLICA_VERSION = gauge(
    "sluice_fleet_replica_version",
    "versions",
    "The policy version that a replica serves; -1 before its first.",
    "replica",
)
REPLICA_BUSY = gauge("sluice_fleet_replica_slots_busy", "slots", "Its busy slots.", "replica")
REPLICA_TOKENS = counter(
    "sluice_fleet_replica_tokens_total",
    "tokens",
    "Response tokens that it sampled since its process began.",
    "replica",
    may_restart=True,
)
HEARTBEAT_AGE = gauge(
    "sluice_fleet_replica_heartbeat_age_seconds",
    "seconds",
    "Time since its last heartbeat.",
    "replica",
)
