"""Speed of one step by verl's names, from token counts and the step's measured seconds."""

from __future__ import annotations

from collections.abc import Mapping

RESPONSE_PHASES = ("gen",)
"""Phases whose time is divided by response tokens; all others by prompt and response tokens."""

PER_TOKEN_PHASES = ("gen", "ref", "values", "adv", "update_critic", "update_actor")


def throughput_metrics(
    phase_seconds: Mapping[str, float],
    *,
    total_tokens: int,
    response_tokens: int,
    num_ranks: int,
) -> dict[str, float]:
    """``timing_s/*``, ``timing_per_token_ms/*``, ``perf/time_per_step`` and ``perf/throughput``.

    Throughput is prompt and response tokens per second **per rank** (per GPU in verl's words).

    Args:
        phase_seconds: seconds by phase (``gen``, ``update_actor``, ...); ``step`` is the whole.
        total_tokens: prompt and response tokens of the batch, the prompt counted for every row.
        response_tokens: response tokens of the batch.
        num_ranks: all ranks of the trainer.
    """
    metrics = {f"timing_s/{phase}": seconds for phase, seconds in phase_seconds.items()}
    for phase in PER_TOKEN_PHASES:
        tokens = response_tokens if phase in RESPONSE_PHASES else total_tokens
        if phase in phase_seconds and tokens:
            metrics[f"timing_per_token_ms/{phase}"] = 1000.0 * phase_seconds[phase] / tokens
    step_seconds = phase_seconds.get("step", 0.0)
    if step_seconds > 0.0:
        metrics["perf/time_per_step"] = step_seconds
        metrics["perf/throughput"] = total_tokens / (step_seconds * num_ranks)
    return metrics
