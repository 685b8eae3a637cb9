"""What a replica tells of its engine."""

from __future__ import annotations

from sluice.telemetry.metrics import counter, gauge

_P = "sluice_replica_"

OWN_SLOTS = gauge(f"{_P}slots", "slots", "Samples that it can run at once.")
OWN_SLOTS_BUSY = gauge(f"{_P}slots_busy", "slots", "Slots with a sample in them.")
OWN_QUEUE = gauge(f"{_P}queued_samples", "samples", "Samples that wait for a slot.")
OWN_VERSION = gauge(
    f"{_P}policy_version", "versions", "The policy version that it serves; -1 before its first."
)
GENERATED = counter(f"{_P}generated_tokens_total", "tokens", "Response tokens that it sampled.")
UNSENT = counter(
    f"{_P}unsent_tokens_total", "tokens", "Tokens of calls that ended before these were sent."
)
RUNNING = gauge(f"{_P}running_tokens", "tokens", "Tokens of running calls that are not sent yet.")
DIRECT = counter(
    f"{_P}direct_client_tokens_total",
    "tokens",
    "Tokens for callers outside the run, sent or unsent.",
)
BUSY_SECONDS = counter(f"{_P}busy_seconds_total", "seconds", "Time with a sample running.")
STATE_SECONDS = counter(
    f"{_P}seconds_total",
    "seconds",
    "Where its time went; states add up to the age of the process.",
    "state",
)
