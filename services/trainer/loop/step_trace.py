"""The trace of one train step, and of the prompts in its batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sluice.telemetry.tracing import (
    TRACER,
    Attributes,
    RecordedSpan,
    Span,
    SpanAttribute,
    SpanName,
    TraceContext,
    parse_traceparent,
)
from sluice.types import TrainBatch


class StepTrace:
    """The trace of one train step; without effect in a run that is not traced.

    The first span of the step's trace links to the span of every recorded prompt in its batch. The
    traces of these prompts get the training and the publication as spans, which link back.
    """

    def __init__(self, step: int, span: Span) -> None:
        self._step, self._span = step, span
        self._prompts: dict[str, TraceContext] = {}

    def link_prompts(self, batch: TrainBatch) -> None:
        """Link the step's span to the prompts of its batch."""
        if not TRACER.is_on:
            return
        contexts = (
            (group.prompt_id, parse_traceparent(group.traceparent)) for group in batch.groups
        )
        self._prompts = {
            prompt_id: context for prompt_id, context in contexts if context is not None
        }
        self._span.set(
            {SpanAttribute.BATCH_ID: batch.batch_id, SpanAttribute.NUM_GROUPS: len(batch.groups)}
        )
        self._span.link(tuple(self._prompts.values()))

    @contextmanager
    def span(self, name: SpanName) -> Iterator[None]:
        """Record the block in the trace of the step, and in the traces of the batch's prompts."""
        attributes: Attributes = {SpanAttribute.STEP: self._step}
        span = TRACER.span(name, attributes)
        try:
            with span:
                yield
        finally:
            if isinstance(span, RecordedSpan):
                for prompt_id, context in self._prompts.items():
                    span.again_under(context, {**attributes, SpanAttribute.PROMPT_ID: prompt_id})


@contextmanager
def step_trace(step: int) -> Iterator[StepTrace]:
    """Trace the block as step `step`, from 1."""
    with TRACER.trace(SpanName.STEP, is_always=True, attributes={SpanAttribute.STEP: step}) as span:
        yield StepTrace(step, span)
