"""Trace every prompt: one span from acceptance to end, with a child span for each wait.

`groups.run` and `grading` add spans in the task of the prompt's group. This module times what a
prompt waits for, by the events of its group. A prompt that starts again stays in its trace.

A trace id is computed from the prompt's id and a key in the run's folder, so a restarted service
continues its traces. A client's trace context is not stored: after a restart its prompt continues
in a new trace.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from services.reward.group_table import EventKind, GroupEnding, GroupEvent
from sluice.telemetry.tracing import (
    NOTHING,
    TRACER,
    RecordedSpan,
    Span,
    SpanAttribute,
    SpanKind,
    SpanName,
    TraceContext,
    Tracer,
)
from sluice.types import Prompt, PromptEnd, PromptOrigin
from sluice.whole_file import write_whole

KEY_FILE = Path("reward") / "trace_key"
PENDING = "pending"
FORGOTTEN = "forgotten"
_KEY_BYTES = _ID_BYTES = 16
_MAX_DETAIL_CHARS = 500
_FAILURES = {PromptEnd.DROPPED_FAILED, PromptEnd.DROPPED_STALE}


def trace_key(run_dir: Path, *, is_first: bool) -> bytes:
    """Return the trace key of a run's folder.

    A new run (`is_first`) makes a new key, since its prompt ids equal those of an earlier run in
    the folder.
    """
    path = run_dir / KEY_FILE
    if is_first or not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, secrets.token_hex(_KEY_BYTES).encode("ascii"))
    return path.read_bytes()


@dataclass(slots=True)
class _PromptSpans:
    """A recorded prompt: its span, and the spans of its waits."""

    prompt: RecordedSpan
    waits: dict[SpanName, Span] = field(default_factory=dict)

    def begin(self, tracer: Tracer, wait: SpanName) -> None:
        self.finish(wait)
        self.waits[wait] = tracer.child(self.prompt.context, wait)

    def wait_for(self, tracer: Tracer, wait: SpanName) -> None:
        """End the span of the previous wait and begin one for the next."""
        self.finish(SpanName.ADMIT, SpanName.WAIT)
        self.begin(tracer, wait)

    def finish(self, *waits: SpanName) -> None:
        for wait in waits:
            self.waits.pop(wait, NOTHING).end()


class PromptTraces:
    """The recorded prompts that are pending."""

    def __init__(self, key: bytes = b"", tracer: Tracer = TRACER) -> None:
        self._key, self._tracer = key, tracer
        self._spans_by_prompt: dict[str, _PromptSpans] = {}

    def observe(self, event: GroupEvent) -> None:
        """Begin, continue or end the trace of a prompt."""
        if event.kind is EventKind.ACCEPTED:
            self._begin_trace(event.group.prompt)
            return
        spans = self._spans_by_prompt.get(event.group.prompt_id)
        if spans is None:
            return
        match event.kind:
            case EventKind.ENDED | EventKind.FORGOTTEN:
                ending = event.group.ending
                end = ending.end.value if ending else FORGOTTEN
                self._end(event.group.prompt_id, end, ending)
            case EventKind.REQUEUED:
                spans.wait_for(self._tracer, SpanName.ADMIT)
            case EventKind.KEPT | EventKind.RETURNED:
                spans.wait_for(self._tracer, SpanName.WAIT)
            case EventKind.ADMITTED | EventKind.LEASED:
                spans.finish(SpanName.ADMIT, SpanName.WAIT)

    def _begin_trace(self, prompt: Prompt) -> None:
        """Begin the trace; a client's prompt continues the trace of the current call."""
        is_client = prompt.origin is PromptOrigin.CLIENT
        span = self._tracer.trace(
            SpanName.PROMPT,
            caller=self._tracer.current() if is_client else None,
            trace_id=self._trace_id(prompt.prompt_id),
            attributes={
                SpanAttribute.PROMPT_ID: prompt.prompt_id,
                SpanAttribute.PROMPT_ORIGIN: prompt.origin.value,
                SpanAttribute.PROMPT_SEQUENCE: prompt.sequence,
                SpanAttribute.DATA_SOURCE: prompt.data_source,
            },
            kind=SpanKind.SERVER if is_client else SpanKind.INTERNAL,
        )
        if not isinstance(span, RecordedSpan):
            return
        spans = self._spans_by_prompt[prompt.prompt_id] = _PromptSpans(span)
        if is_client:
            spans.begin(self._tracer, SpanName.SUBMIT)
        else:
            with self._tracer.child(span.context, SpanName.READ) as draw:
                draw.set({SpanAttribute.PROMPT_PLACE: prompt.place})
        spans.begin(self._tracer, SpanName.ADMIT)

    def receipt_sent(self, prompt_id: str) -> None:
        """Note that the client has got its receipt."""
        if (spans := self._spans_by_prompt.get(prompt_id)) is not None:
            spans.finish(SpanName.SUBMIT)

    def close(self) -> None:
        """End all spans with the service; the prompts of a durable ledger continue later."""
        for prompt_id in list(self._spans_by_prompt):
            self._end(prompt_id, PENDING)

    def within(self, prompt_id: str) -> Span:
        """Make the prompt's span current in the block and in the tasks that start there."""
        context = self._context(prompt_id)
        return self._tracer.within(context) if context else self._tracer.unrecorded()

    def traceparent(self, prompt_id: str) -> str:
        """Return the prompt's span as a traceparent header; empty if it is not recorded."""
        context = self._context(prompt_id)
        return context.traceparent if context else ""

    def _context(self, prompt_id: str) -> TraceContext | None:
        spans = self._spans_by_prompt.get(prompt_id)
        return spans.prompt.context if spans else None

    def _trace_id(self, prompt_id: str) -> int:
        digest = blake2b(prompt_id.encode(), digest_size=_ID_BYTES, key=self._key)
        return int.from_bytes(digest.digest(), "big")

    def _end(self, prompt_id: str, end: str, ending: GroupEnding | None = None) -> None:
        spans = self._spans_by_prompt.pop(prompt_id, None)
        if spans is None:
            return
        spans.finish(*tuple(spans.waits))
        spans.prompt.set({SpanAttribute.PROMPT_END: end})
        if ending is not None:
            if ending.step is not None:
                spans.prompt.set({SpanAttribute.STEP: ending.step})
            if ending.detail:
                spans.prompt.set({SpanAttribute.DETAIL: ending.detail[:_MAX_DETAIL_CHARS]})
            if ending.end in _FAILURES:
                spans.prompt.fail(ending.detail or end)
        spans.prompt.end()
