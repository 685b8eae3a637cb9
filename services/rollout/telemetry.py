"""Show a replica's work to others: spans of samples, Prometheus readings, and the watchdog's
view.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from services.rollout.engines.protocol import EngineLoad
from sluice.concurrency.waits import units_done
from sluice.concurrency.watchdog import WorkState
from sluice.telemetry.metrics import InstrumentReading, reading
from sluice.telemetry.tracing import TRACER, SpanAttribute, SpanName, Timestamp
from sluice.types import Rollout


def trace_samples(began: Timestamp, rollouts: Iterable[Rollout]) -> None:
    """Record spans of finished samples in the trace of the running call, if that is recorded.

    Args:
        began: when the call began to sample.
        rollouts: the samples.
    """
    parent = TRACER.current()
    if parent is not None and parent.is_sampled:
        for sample in rollouts:
            TRACER.past(parent, SpanName.SAMPLE, began, _attributes(sample))


def _attributes(rollout: Rollout) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        SpanAttribute.SAMPLE_INDEX: rollout.sample_index,
        SpanAttribute.NUM_TOKENS: rollout.num_tokens,
        SpanAttribute.FINISH_REASON: rollout.finish_reason.value,
    }
    if rollout.version_spans:
        attributes[SpanAttribute.VERSION] = rollout.version_spans[-1].version
        if rollout.version_spans[0].version != rollout.version_spans[-1].version:
            attributes[SpanAttribute.OLDEST_VERSION] = rollout.version_spans[0].version
    return attributes


def load_readings(load: EngineLoad) -> Iterator[InstrumentReading]:
    """Yield the engine's counters."""
    yield reading("sluice_replica_slots", load.slots)
    yield reading("sluice_replica_slots_busy", load.slots_busy)
    yield reading("sluice_replica_queued_samples", load.queued)
    yield reading(
        "sluice_replica_policy_version", float(-1 if load.version is None else load.version)
    )
    yield reading("sluice_replica_generated_tokens_total", load.generated_tokens)
    yield reading("sluice_replica_unsent_tokens_total", load.unsent_tokens)
    yield reading("sluice_replica_running_tokens", load.running_tokens)
    yield reading(
        "sluice_replica_direct_client_tokens_total",
        load.direct_sent_tokens + load.direct_unsent_tokens,
    )
    yield reading("sluice_replica_prompt_tokens_total", load.prompt_tokens)
    yield reading("sluice_replica_reused_tokens_total", load.reused_tokens)
    yield reading("sluice_replica_busy_seconds_total", load.busy_seconds)
    for state, seconds in load.seconds_by_state.items():
        yield reading("sluice_replica_seconds_total", seconds, state)


def work_state(load: EngineLoad) -> WorkState:
    """Return what a replica has to do and has done.

    Sampled tokens and new versions are progress, busy seconds are not: an engine that hangs is busy
    too. There is work while samples run or wait for a slot; a replica without weights or without
    prompts is idle.
    """
    progress = (load.generated_tokens, load.version, units_done())
    return WorkState(progress, load.slots_busy + load.queued > 0)
