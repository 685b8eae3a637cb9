"""The trace of one train step, and of the prompts in its batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from sluice.telemetry.tracing import (
    TRACER,
    Attributes,
    Key,
    RecordedSpan,
    SpanName,
    TraceContext,
    Tracer,
    parse_traceparent,
)
from sluice.types import TrainBatch


class StepTrace:
    """The trace of one train step; without effect in a run that is not traced.

    The first span of the step's trace links to the span of every recorded prompt in its batch. The
    traces of these prompts get the training and the publication as spans, which link back.

    Args:
        step: from 1.
    """

    def __init__(self, step: int, tracer: Tracer = TRACER) -> None:
        self._step = step
        self._tracer = tracer
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
        """Link the step's span to the prompts of its batch."""
        if not self._tracer.is_on:
            return
        found = ((group.prompt_id, parse_traceparent(group.traceparent)) for group in batch.groups)
        self._prompts = {prompt_id: context for prompt_id, context in found if context is not None}
        self._span.set({Key.BATCH_ID: batch.batch_id, Key.NUM_GROUPS: len(batch.groups)})
        self._span.link(tuple(self._prompts.values()))

    @contextmanager
    def span(self, name: SpanName) -> Iterator[None]:
        """Record the block in the trace of the step, and in the traces of the batch's prompts."""
        attributes: Attributes = {Key.STEP: self._step}
        span = self._tracer.span(name, attributes)
        try:
            with span:
                yield
        finally:
            if isinstance(span, RecordedSpan):
                for prompt_id, context in self._prompts.items():
                    span.again_under(context, {**attributes, Key.PROMPT_ID: prompt_id})
