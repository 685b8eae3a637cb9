"""Spans of this process: their names, their parents across processes, and whether they are
recorded.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from enum import IntEnum, StrEnum
from types import TracebackType
from typing import NamedTuple, Protocol, Self


class SpanName(StrEnum):
    """What a span times."""

    # A prompt's trace, in the reward service.
    PROMPT = "prompt"
    SUBMIT = "submit"
    READ = "draw"
    ADMIT = "admit"
    GENERATE = "generate"
    ATTEMPT = "attempt"
    GRADE = "grade"
    FILTER = "filter"
    WAIT = "wait"
    # In a replica.
    SERVE = "serve"
    SAMPLE = "sample"
    RECEIVE_WEIGHTS = "receive weights"
    SWAP_WEIGHTS = "swap weights"
    # A step's trace, in the trainer; the first two are in the prompts' traces as well.
    TRAIN_STEP = "train step"
    PUBLISH = "publish"
    STEP = "step"
    TAKE_BATCH = "take batch"
    EVALUATE = "evaluate"
    SAVE = "save"


class Key(StrEnum):
    """Attributes."""

    PROMPT_ID = "sluice.prompt.id"
    PROMPT_ORIGIN = "sluice.prompt.origin"
    PROMPT_SEQUENCE = "sluice.prompt.sequence"
    PROMPT_PLACE = "sluice.prompt.place"
    PROMPT_END = "sluice.prompt.end"
    DATA_SOURCE = "sluice.data_source"
    DETAIL = "sluice.detail"
    NUM_SAMPLES = "sluice.samples"
    NUM_SCORED = "sluice.samples.scored"
    NUM_TOKENS = "sluice.tokens"
    SAMPLE_INDEX = "sluice.sample.index"
    FINISH_REASON = "sluice.sample.finish_reason"
    REPLICA = "sluice.replica"
    REQUEST_ID = "sluice.request.id"
    VERSION = "sluice.policy.version"
    OLDEST_VERSION = "sluice.policy.version.oldest"
    BATCH_ID = "sluice.batch.id"
    NUM_GROUPS = "sluice.groups"
    STEP = "sluice.step"


class SpanKind(IntEnum):
    """A span's side of a call, by OTLP's numbers."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


# Which trace and span something belongs to, as it crosses processes: W3C Trace Context.
#
# https://www.w3.org/TR/trace-context/, version 00. `tracestate` is not carried on.

_TRACE_BITS, _SPAN_BITS = 128, 64
_LONGEST = 256
_SAMPLED = 1
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
# Not the interpreter's own generator, which runs seed to be repeatable.
_random = random.Random()


class TraceContext(NamedTuple):
    """A span as others name it: 128 bits of trace, 64 bits of span, neither 0.

    `is_sampled`: it is recorded, and so is what follows from it. A tuple, since one is made for
    every span, in half the time of a frozen dataclass.
    """

    trace_id: int
    span_id: int
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        """The header's value."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"


def parse_traceparent(value: object) -> TraceContext | None:
    """The context in a header's value; ``None`` where it holds none, as the standard asks.

    Later versions may add fields after the four that are known, which are read all the same.
    """
    found = _FORM.fullmatch(value) if isinstance(value, str) and len(value) <= _LONGEST else None
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == "ff" or (version == "00" and more) or not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def new_trace_id() -> int:
    """A trace nobody has used before."""
    return _random.getrandbits(_TRACE_BITS) or 1


def new_span_id() -> int:
    """A span nobody has used before in its trace."""
    return _random.getrandbits(_SPAN_BITS) or 1


def is_chosen(trace_id: int, ratio: float) -> bool:
    """Whether a trace is among the share `ratio` that is recorded.

    Every process chooses alike: by the lower 64 bits, as OpenTelemetry's ``TraceIdRatioBased``.
    """
    return (trace_id & (1 << _SPAN_BITS) - 1) < round(ratio * (1 << _SPAN_BITS))


# Spans of this process: what is timed, under which parent, and whether at all.
#
# Off, which is the default, every function here answers with `NOTHING`, a span that keeps
# nothing, and no package of OpenTelemetry is imported. On, an ended span goes into the sinks'
# queues, and nobody waits for it.
#
# The current span is a context variable: tasks inherit it from whoever starts them. Enter a span
# in coroutines and functions only; an asynchronous generator would leave its own to its
# consumer.

Attributes = Mapping[str, str | int | float | bool]

_MAX_ERROR_CHARS = 500
_current: ContextVar[TraceContext | None] = ContextVar("span", default=None)
_NO_ATTRIBUTES: Attributes = {}


class Span:
    """A span that keeps nothing; `RecordedSpan` is one that is recorded.

    `context` names it to others; ``None``: there is nothing to name.
    """

    __slots__ = ()

    @property
    def context(self) -> TraceContext | None:
        """How others name it."""
        return None

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""

    def link(self, contexts: Sequence[TraceContext]) -> None:
        """Adds links to spans of other traces."""

    def fail(self, error: str | None) -> None:
        """Says what went wrong; ``None``: nothing did."""

    def end(self) -> None:
        """Ends it. Repeating it is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


NOTHING = Span()


class Sink(Protocol):
    """Takes ended spans."""

    def put(self, span: RecordedSpan) -> None:
        """Takes one, at once."""
        ...


class _Within(Span):
    """What happens inside belongs to `context`, which is recorded elsewhere or not at all."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: TraceContext) -> None:
        self._context = context
        self._token: Token[TraceContext | None] | None = None

    @property
    def context(self) -> TraceContext:
        return self._context

    def __enter__(self) -> Self:
        self._token = _current.set(self._context)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._token is not None:
            _current.reset(self._token)


class Moment(NamedTuple):
    """A time by both clocks: nanoseconds since the epoch, and of the monotonic clock."""

    wall_ns: int
    monotonic_ns: int

    @classmethod
    def now(cls) -> Self:
        """This one."""
        return cls(time.time_ns(), time.monotonic_ns())


class RecordedSpan(_Within):
    """From its beginning until `end`; inside its block it is the current one.

    An exception that leaves the block is its error.

    Attributes:
        name: what is timed.
        parent_id: the span above it; ``None``: none is.
        start_ns: since the epoch.
        duration_ns: ``None`` until it has ended.
        attributes: numbers and short texts.
        links: spans of other traces.
        error: what went wrong.

    Args:
        began: its beginning; ``None``: now.
    """

    __slots__ = (
        *("_began_ns", "_tracer", "attributes", "duration_ns", "error", "kind", "links", "name"),
        *("parent_id", "start_ns"),
    )

    def __init__(
        self,
        tracer: Tracer,
        name: SpanName,
        context: TraceContext,
        parent_id: int | None,
        kind: SpanKind,
        attributes: Attributes,
        began: Moment | None = None,
    ) -> None:
        super().__init__(context)
        self._tracer, self.name, self.parent_id, self.kind = tracer, name.value, parent_id, kind
        self.attributes = dict(attributes)
        self.links: tuple[TraceContext, ...] = ()
        self.error: str | None = None
        self.duration_ns: int | None = None
        self.start_ns, self._began_ns = began or Moment.now()

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""
        self.attributes.update(attributes)

    def link(self, contexts: Sequence[TraceContext]) -> None:
        """Adds links to spans of other traces."""
        self.links = (*self.links, *contexts)

    def fail(self, error: str | None) -> None:
        """Says what went wrong; ``None``: nothing did."""
        if error is not None:
            self.error = error[:_MAX_ERROR_CHARS]

    def end(self) -> None:
        """Ends it. Repeating it is harmless."""
        if self.duration_ns is None:
            self.duration_ns = time.monotonic_ns() - self._began_ns
            self._tracer.ended(self)

    def again_under(self, parent: TraceContext, attributes: Attributes) -> None:
        """Records the same stretch of time, once it has ended, in another trace; linked to this."""
        copy = RecordedSpan(
            self._tracer,
            SpanName(self.name),
            TraceContext(parent.trace_id, new_span_id(), is_sampled=True),
            parent.span_id,
            self.kind,
            attributes,
        )
        copy.start_ns, copy.duration_ns = self.start_ns, self.duration_ns or 0
        copy.error, copy.links = self.error, (self._context,)
        self._tracer.ended(copy)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, asyncio.CancelledError):
            self.fail("cancelled")
        elif error is not None:
            self.fail(f"{type(error).__name__}: {error}")
        self.end()


class Tracer:
    """Begins spans, if this process is traced, and hands ended ones on."""

    def __init__(self) -> None:
        self._sinks: tuple[Sink, ...] = ()
        self._sample_ratio, self._follows_callers = 0.0, True
        self.is_on = False

    def start(
        self, sinks: Sequence[Sink], sample_ratio: float, *, follows_callers: bool = True
    ) -> None:
        """From here on spans are recorded.

        Args:
            sinks: get the spans.
            sample_ratio: share of the traces that are recorded.
            follows_callers: callers from outside decide about their traces, whatever the share.
        """
        self._sinks, self._sample_ratio, self.is_on = tuple(sinks), sample_ratio, True
        self._follows_callers = follows_callers

    def stop(self) -> None:
        """Nothing is recorded any more."""
        self._sinks, self.is_on = (), False

    def stage(
        self,
        name: SpanName,
        attributes: Attributes = _NO_ATTRIBUTES,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """A span below the current one; nothing where none is recorded."""
        parent = _current.get() if self.is_on else None
        return NOTHING if parent is None else self.child(parent, name, attributes, kind)

    def child(
        self,
        parent: TraceContext,
        name: SpanName,
        attributes: Attributes = _NO_ATTRIBUTES,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """A span below `parent`; nothing where that one is not recorded."""
        if not (self.is_on and parent.is_sampled):
            return NOTHING
        context = TraceContext(parent.trace_id, new_span_id(), is_sampled=True)
        return RecordedSpan(self, name, context, parent.span_id, kind, attributes)

    def past(
        self,
        parent: TraceContext,
        name: SpanName,
        began: Moment,
        attributes: Attributes,
        error: str | None = None,
    ) -> None:
        """Records a span below `parent` that ends now.

        Args:
            parent: the span above it; where that one is not recorded, nothing is.
            name: what was timed.
            began: its beginning.
            attributes: of it.
            error: what went wrong; ``None``: nothing did.
        """
        if self.is_on and parent.is_sampled:
            context = TraceContext(parent.trace_id, new_span_id(), is_sampled=True)
            kind = SpanKind.INTERNAL
            span = RecordedSpan(self, name, context, parent.span_id, kind, attributes, began)
            span.fail(error)
            span.end()

    def trace(
        self,
        name: SpanName,
        *,
        caller: TraceContext | None = None,
        trace_id: int | None = None,
        is_always: bool = False,
        attributes: Attributes = _NO_ATTRIBUTES,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """The first span of a trace in this process.

        Args:
            name: what is timed.
            caller: whose trace is continued, as it is recorded or not; ``None``: one begins.
            trace_id: of one that begins; ``None``: a random one.
            is_always: one that begins is recorded, whatever share of the others is.
            attributes: known at its beginning.
            kind: its side of a call.
        """
        if not self.is_on:
            return NOTHING
        if caller is not None:
            span = self.child(caller, name, attributes, kind)
            return _Within(caller) if span is NOTHING else span
        own_id = trace_id or new_trace_id()
        is_recorded = is_always or is_chosen(own_id, self._sample_ratio)
        context = TraceContext(own_id, new_span_id(), is_recorded)
        if not is_recorded:
            return _Within(context)
        return RecordedSpan(self, name, context, None, kind, attributes)

    def admitted(self, caller: TraceContext) -> TraceContext:
        """The span of a caller from outside, recorded only if this process agrees."""
        if self._follows_callers or is_chosen(caller.trace_id, self._sample_ratio):
            return caller
        return TraceContext(caller.trace_id, caller.span_id, is_sampled=False)

    def within(self, context: TraceContext | None) -> Span:
        """What happens inside belongs to `context`; ``None``: to whatever it belonged before."""
        return NOTHING if context is None or not self.is_on else _Within(context)

    def unrecorded(self) -> Span:
        """Nothing that happens inside is recorded, here or by whoever is called."""
        return self.within(TraceContext(new_trace_id(), new_span_id(), is_sampled=False))

    def current(self) -> TraceContext | None:
        """The span that is under way here, recorded or not; ``None``: none is."""
        return _current.get() if self.is_on else None

    def ended(self, span: RecordedSpan) -> None:
        """Takes on what has ended."""
        for sink in self._sinks:
            sink.put(span)


TRACER = Tracer()
"""This process's tracer."""
