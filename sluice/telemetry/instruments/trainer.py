"""Metrics of the trainer: steps, phases, accounting, the policy's numbers, weight updates."""

from __future__ import annotations

from sluice.telemetry.metrics import Instrument, counter, gauge, histogram

_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

STEPS = counter(
    "sluice_trainer_steps_total", "steps", "Finished steps, those before a resume included."
)
PLANNED_STEPS = gauge("sluice_trainer_planned_steps", "steps", "Steps of the whole run.")
POLICY_VERSION = gauge(
    "sluice_trainer_policy_version", "versions", "The policy version that was published last."
)
PHASE = gauge(
    "sluice_trainer_phase", "0 or 1", "1 for the phase that the run is in, 0 for others.", "phase"
)
PHASE_AGE = gauge(
    "sluice_trainer_present_phase_seconds", "seconds", "Time since the present phase began."
)
PHASE_SECONDS = counter(
    "sluice_trainer_seconds_total",
    "seconds",
    "Where the trainer's time went, one phase at a time; they add up to its wall-clock.",
    "phase",
)
WALL = counter(
    "sluice_trainer_wall_seconds_total", "seconds", "Age of rank 0's process, by another clock."
)
STEP_SECONDS = histogram(
    "sluice_trainer_step_seconds",
    "seconds",
    "Steps by their length, from asking for the batch to the end of the checkpoint.",
    _SECONDS,
)
BATCH_WAIT = histogram(
    "sluice_trainer_batch_wait_seconds",
    "seconds",
    "Steps by how long the trainer waited for their batch.",
    _SECONDS,
)

TOKENS_GENERATED = counter(
    "sluice_tokens_generated_total", "tokens", "Response tokens that all replicas ever drew."
)
TOKENS = counter(
    "sluice_tokens_total", "tokens", "Those of them that met their end, by what it was.", "fate"
)
OPEN_TOKENS = gauge(
    "sluice_tokens_open",
    "tokens",
    "Those of groups that have not ended (pending), and those that are not sent yet (under_way).",
    "fate",
)
ACCOUNTING_RESIDUAL = gauge(
    "sluice_books_residual",
    "tokens or seconds",
    "The part of an account's total that no use explains.",
    "account",
)
ACCOUNTING_RESIDUAL_SHARE = gauge(
    "sluice_books_residual_ratio", "share", "Size of that residual over the total.", "account"
)
ACCOUNTING_AGE = gauge(
    "sluice_books_tokens_age_seconds",
    "seconds",
    "Time since all processes were asked for the counters in the account of tokens.",
)
ACCOUNTING_MOVED = gauge(
    "sluice_books_tokens_moved",
    "tokens",
    "Tokens that arrived meanwhile: the residual may be off by that many at most.",
)

_PREFIX = "sluice_trainer_"
BY_ROW: dict[str, Instrument] = {
    "actor/lr": gauge(f"{_PREFIX}learning_rate", "rate", "Learning rate of the last step."),
    "critic/rewards/mean": gauge(
        f"{_PREFIX}reward_mean", "reward", "Mean reward over the responses of the last batch."
    ),
    "actor/entropy": gauge(
        f"{_PREFIX}entropy_nats",
        "nats",
        "Entropy of the policy, mean over the last batch's tokens.",
    ),
    "actor/ppo_kl": gauge(
        f"{_PREFIX}policy_kl_nats",
        "nats",
        "Old minus new logprob, mean over the last batch's tokens: how far the step moved.",
    ),
    "actor/kl_loss": gauge(
        f"{_PREFIX}reference_kl_nats", "nats", "KL to the reference in the loss of the last step."
    ),
    "actor/grad_norm": gauge(
        f"{_PREFIX}grad_norm", "norm", "Norm of the gradient before clipping, in the last step."
    ),
    "actor/pg_clipfrac": gauge(
        f"{_PREFIX}clipped_tokens_ratio", "share", "Tokens whose loss was clipped in the last step."
    ),
    "training/rollout_probs_diff_mean": gauge(
        f"{_PREFIX}engine_probability_gap",
        "probability",
        "Difference between the trainer's and the engine's probability of a token, last batch.",
    ),
    "response_length/mean": gauge(
        f"{_PREFIX}response_tokens_mean", "tokens", "Mean response length of the last batch."
    ),
    "response_length/clip_ratio": gauge(
        f"{_PREFIX}cut_responses_ratio",
        "share",
        "Responses of the last batch that reached the longest length.",
    ),
}
"""Gauges of the last step, by the name of its row in the run's metrics."""

SKIPPED_UPDATES = counter(
    "sluice_trainer_skipped_updates_total",
    "steps",
    "Optimizer steps left out because the norm of the gradient was not finite.",
)
VALIDATION_SCORE = gauge(
    "sluice_trainer_validation_score",
    "by variable",
    "Scores of the last validation, such as accuracy (variable acc).",
    *("source", "variable", "statistic"),
)

SYNC_UPDATES = counter(
    "sluice_weights_updates_total",
    "updates",
    "Deliveries of weights that arrived: to the fleet as a whole, to newcomers.",
    "to",
)
SYNC_BYTES = counter(
    "sluice_weights_sent_bytes_total",
    "bytes",
    "What deliveries that arrived took on the wire, once for all replicas: dense (all weights) or "
    "sparse (what changed).",
    "encoding",
)
SYNC_DENSE_BYTES = counter(
    "sluice_weights_whole_bytes_total",
    "bytes",
    "What the same deliveries would have taken if all weights had been sent each time.",
)
SYNC_SECONDS = counter(
    "sluice_weights_seconds_total",
    "seconds",
    "Where the time of deliveries went, those that failed included.",
    "phase",
)
SYNC_FAILURES = counter(
    "sluice_weights_failures_total",
    "attempts",
    "Attempts to deliver weights that failed, by phase; the next one goes to who is left.",
    "phase",
)
SYNC_STALL = counter(
    "sluice_weights_stall_seconds_total",
    "seconds",
    "Time in which replicas drew no token for a swap: of each delivery the longest.",
)
