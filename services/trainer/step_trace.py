"""The trace of one train step, and what it adds to the traces of the prompts it trains.

A step has a trace of its own, whose first span links to the span of every recorded prompt in its
batch. Each of those traces gets the step that trained it, and the publication, as spans below the
prompt's; they link back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from sluice.telemetry.span_names import Key, SpanName
from sluice.telemetry.trace_context import TraceContext, parse_traceparent
from sluice.telemetry.tracing import TRACER, Attributes, RecordedSpan, Tracer
from sluice.types import TrainBatch


class StepTrace:
    """One step; nothing happens where the run is not traced.

    Args:
        step: from 1.
        tracer: records it.
    """

    def __init__(self, step: int, tracer: Tracer = TRACER) -> None:
        self._step, self._tracer = step, tracer
        self._span = tracer.trace(SpanName.STEP, is_always=True, attributes={Key.STEP: step})
        self._prompts: dict[str, TraceContext] = {}

    def __enter__(self) -> Self:
        self._span.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._span.__exit__(kind, error, trace)

    def takes(self, batch: TrainBatch) -> None:
        """The batch that it trains."""
        if not self._tracer.is_on:
            return
        found = ((group.prompt_id, parse_traceparent(group.traceparent)) for group in batch.groups)
        self._prompts = {prompt_id: context for prompt_id, context in found if context is not None}
        self._span.set({Key.BATCH_ID: batch.batch_id, Key.NUM_GROUPS: len(batch.groups)})
        self._span.link(tuple(self._prompts.values()))

    @contextmanager
    def stage(self, name: SpanName) -> Iterator[None]:
        """A stage of the step, and of the traces of all prompts in its batch."""
        attributes: Attributes = {Key.STEP: self._step}
        span = self._tracer.stage(name, attributes)
        try:
            with span:
                yield
        finally:
            if isinstance(span, RecordedSpan):
                for prompt_id, context in self._prompts.items():
                    span.again_under(context, {**attributes, Key.PROMPT_ID: prompt_id})
