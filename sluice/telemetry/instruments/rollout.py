"""What a replica tells of its engine."""

from __future__ import annotations

from sluice.telemetry.metrics import counter, gauge

__all__ = [
    "BUSY_SECONDS",
    "DIRECT",
    "GENERATED",
    "OWN_QUEUE",
    "OWN_SLOTS",
    "OWN_SLOTS_BUSY",
    "OWN_VERSION",
    "RUNNING",
    "STATE_SECONDS",
    "UNSENT",
]

_P = "sluice_replica_"

OWN_SLOTS = gauge(f"{_P}slots", "slots", "Samples that it can run at once.")
OWN_SLOTS_BUSY = gauge(f"{_P}slots_busy", "slots", "Slots with a sample in them.")
OWN_QUEUE = gauge(f"{_P}queued_samples", "samples", "Samples that wait for a slot.")
OWN_VERSION = gauge(
    f"{_P}policy_version", "versions", "The policy version that it serves; -1 before its first."
)
GENERATED = counter(f"{_P}generated_tokens_total", "tokens", "Response tokens that it drew.")
UNSENT = counter(
    f"{_P}unsent_tokens_total", "tokens", "Those of calls that ended before they were sent."
)
RUNNING = gauge(f"{_P}running_tokens", "tokens", "Those of calls that go on, not sent yet.")
DIRECT = counter(
    f"{_P}direct_client_tokens_total",
    "tokens",
    "Those for callers that are no service of the run, sent or unsent.",
)
BUSY_SECONDS = counter(f"{_P}busy_seconds_total", "seconds", "Time with a sample running.")
STATE_SECONDS = counter(
    f"{_P}seconds_total",
    "seconds",
    "Where its time went; states add up to the age of the process.",
    "state",
)
