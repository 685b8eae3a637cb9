"""What the reward service tells: prompts, groups, samples, batches, demand for replicas."""

from __future__ import annotations

from sluice.telemetry.metrics import counter, gauge, histogram

__all__ = [
    "AWAITED",
    "BATCHES",
    "BATCH_ASKED",
    "BATCH_FILL",
    "BATCH_FILL_SECONDS",
    "BATCH_GROUPS",
    "DEMAND_REPLICAS",
    "DEMAND_SLOTS",
    "GROUPS_KEPT",
    "GROUPS_QUEUED",
    "GROUPS_RESTARTED",
    "GROUPS_SURPLUS",
    "KNOWN_REPLICAS",
    "KNOWN_VERSION",
    "MAX_STALENESS",
    "PROMPTS",
    "PROMPTS_ENDED",
    "PROMPTS_LOST",
    "PROMPTS_SUBMITTED",
    "QUARANTINED",
    "RECEIVED_TOKENS",
    "RESPONSES_AT_BOUND",
    "SAMPLES",
    "SAMPLES_AGAIN",
    "SAMPLES_GRADED",
    "SCORER_SECONDS",
    "SLOT_SECONDS",
    "STALENESS",
    "STARVED_SECONDS",
    "VALIDATION_GROUPS",
    "YIELD",
]

_P = "sluice_reward_"
_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_VERSIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)

PROMPTS_SUBMITTED = counter(
    f"{_P}prompts_submitted_total",
    "prompts",
    "Prompts accepted since the ledger began, of clients and of the data set.",
)
PROMPTS_ENDED = counter(
    f"{_P}prompts_ended_total",
    "prompts",
    "Prompts by how their groups ended, since the ledger began.",
    "end",
)
PROMPTS = gauge(f"{_P}prompts", "prompts", "Pending prompts by where they stand.", "state")
PROMPTS_LOST = gauge(
    f"{_P}prompts_lost", "prompts", "Prompts that the service lost track of; only a defect does it."
)
QUARANTINED = gauge(f"{_P}quarantined_prompts", "prompts", "Prompts in quarantine.")
GROUPS_QUEUED = gauge(f"{_P}queued_groups", "groups", "Groups that wait for room on a replica.")
GROUPS_KEPT = counter(
    f"{_P}groups_kept_total", "groups", "Groups that passed the filter, since the start."
)
GROUPS_RESTARTED = counter(
    f"{_P}groups_restarted_total",
    "groups",
    "Groups generated once more from the start: withdrawn, too old or taken over.",
)
GROUPS_SURPLUS = counter(
    f"{_P}groups_surplus_total",
    "groups",
    "Kept groups thrown away: too old, or surplus of a batch of rounds.",
)
SAMPLES = counter(
    f"{_P}samples_total",
    "samples",
    "Samples by how they ended; a scored one that grew stale counts as both.",
    "outcome",
)
SAMPLES_GRADED = counter(f"{_P}samples_graded_total", "samples", "Samples that were graded.")
SAMPLES_AGAIN = counter(
    f"{_P}samples_again_total", "samples", "Samples scored, or generated, once more.", "what"
)
RECEIVED_TOKENS = counter(
    f"{_P}received_tokens_total", "tokens", "Tokens that arrived from replicas, since the start."
)
VALIDATION_GROUPS = counter(
    f"{_P}validation_groups_total", "groups", "Groups graded for validations."
)
SCORER_SECONDS = counter(
    f"{_P}scorer_seconds_total", "seconds", "Time in scorers, all workers added up."
)

BATCHES = counter(
    f"{_P}batches_total", "batches", "Batches that the trainer said it trained, since the start."
)
BATCH_GROUPS = gauge(f"{_P}batch_groups", "groups", "Groups of a train batch.")
BATCH_FILL = gauge(
    f"{_P}batch_fill_ratio", "share", "Kept groups that wait, over those of a batch, at most 1."
)
BATCH_ASKED = gauge(f"{_P}batch_asked", "0 or 1", "1 while the trainer waits for a batch.")
BATCH_FILL_SECONDS = histogram(
    f"{_P}batch_fill_seconds",
    "seconds",
    "Batches by the time from the batch before until they were formed.",
    _SECONDS,
)
STALENESS = histogram(
    f"{_P}staleness_versions",
    "versions",
    "Responses in batches by how far their oldest token's version lay behind.",
    _VERSIONS,
)
RESPONSES_AT_BOUND = counter(
    f"{_P}responses_at_bound_total",
    "responses",
    "Responses in batches that were as far behind as may be, if that is at all.",
)
MAX_STALENESS = gauge(
    f"{_P}max_staleness_versions", "versions", "The most that a trained response may lie behind."
)
YIELD = gauge(
    f"{_P}yield_ratio", "share", "Estimated probability that a group which starts will be kept."
)
AWAITED = gauge(
    f"{_P}awaited_seconds", "seconds", "What a batch waits for, and for how long.", "what"
)
KNOWN_VERSION = gauge(f"{_P}policy_version", "versions", "The policy version announced last.")
KNOWN_REPLICAS = gauge(f"{_P}replicas", "replicas", "Replicas announced last.")

DEMAND_REPLICAS = gauge(
    "sluice_rollout_demand_replicas",
    "replicas",
    "Replicas that would keep the trainer fed, by the last batches; at least 1.",
)
DEMAND_SLOTS = gauge(
    "sluice_rollout_demand_slots", "slots", "The same in slots, before rounding to replicas."
)
SLOT_SECONDS = counter(
    "sluice_rollout_used_slot_seconds_total",
    "slot seconds",
    "Slots of the fleet in use, added up over time, as the reward service sees them.",
)
STARVED_SECONDS = counter(
    "sluice_rollout_starved_seconds_total",
    "seconds",
    "Time in which the trainer waited for a batch and generation was what was missing.",
)
