"""Show a replica's work to others: spans of samples, Prometheus readings, and the watchdog's
view.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Self

from services.rollout.engines.protocol import EngineLoad
from sluice.concurrency.waits import units_done
from sluice.concurrency.watchdog import WorkState
from sluice.telemetry.metrics import InstrumentReading, reading
from sluice.telemetry.tracing import TRACER, Key, Moment, SpanName
from sluice.types import Rollout


class SampleSpans:
    """The unfinished samples of one call, for its trace; empty if the call is not recorded.

    Leaving the context ends the spans of samples that were broken off.

    Args:
        indexes: the requested samples.
    """

    def __init__(self, indexes: Iterable[int]) -> None:
        current = TRACER.current()
        self._parent = current if current is not None and current.is_sampled else None
        self._open = set(indexes) if self._parent else set[int]()
        self._began = Moment.now()

    def ended(self, rollouts: Iterable[Rollout]) -> None:
        """End the spans of finished samples."""
        if self._parent is None:
            return
        for sample in rollouts:
            if sample.sample_index in self._open:
                self._open.remove(sample.sample_index)
                TRACER.past(self._parent, SpanName.SAMPLE, self._began, _attributes(sample))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._parent is None:
            return
        for index in sorted(self._open):
            asked: dict[str, int] = {Key.SAMPLE_INDEX: index}
            TRACER.past(self._parent, SpanName.SAMPLE, self._began, asked, "broken off")
        self._open.clear()


def _attributes(rollout: Rollout) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        Key.SAMPLE_INDEX: rollout.sample_index,
        Key.NUM_TOKENS: rollout.num_tokens,
        Key.FINISH_REASON: rollout.finish_reason.value,
    }
    if rollout.version_spans:
        found[Key.VERSION] = rollout.version_spans[-1].version
        if rollout.version_spans[0].version != rollout.version_spans[-1].version:
            found[Key.OLDEST_VERSION] = rollout.version_spans[0].version
    return found


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
