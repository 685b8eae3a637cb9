"""Name spans, choose which traces are recorded, and find a span's parent across processes.

Nothing here imports OpenTelemetry. While tracing is off, which is the default, every function
returns `NOTHING`, a span that keeps nothing. `sluice.telemetry.otel` turns it on.

The current span is a context variable: tasks inherit it from their parent. Enter a span in
coroutines and functions only; an asynchronous generator would leave its own to its consumer.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from enum import IntEnum, StrEnum
from types import TracebackType
from typing import NamedTuple, Protocol, Self

TRACE_BITS, SPAN_BITS = 128, 64
_LONGEST_HEADER = 256
_SAMPLED = 1
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
# The system's: runs seed the interpreter's own, and a fork would repeat any other's numbers.
_RANDOM = random.SystemRandom()

Attributes = Mapping[str, str | int | float | bool]

_NO_ATTRIBUTES: Attributes = {}


class SpanName(StrEnum):
    """What a span times."""

    # A prompt's trace, in the reward service.
    PROMPT = "prompt"
    SUBMIT = "submit"
    READ = "draw"
    ADMIT = "admit"
    GENERATE = "generate"
    TURN = "turn"
    ENVIRONMENT = "environment"
    ATTEMPT = "attempt"
    GRADE = "grade"
    FILTER = "filter"
    WAIT = "wait"
    # In a replica.
    SERVE = "serve"
    SAMPLE = "sample"
    RECEIVE_WEIGHTS = "receive weights"
    SWAP_WEIGHTS = "swap weights"
    # A step's trace, in the trainer; prompts' traces have the first two as well.
    TRAIN_STEP = "train step"
    PUBLISH = "publish"
    STEP = "step"
    TAKE_BATCH = "take batch"
    EVALUATE = "evaluate"
    SAVE = "save"


class SpanAttribute(StrEnum):
    """Attributes."""

    PROMPT_ID = "sluice.prompt.id"
    PROMPT_ORIGIN = "sluice.prompt.origin"
    PROMPT_SEQUENCE = "sluice.prompt.sequence"
    PROMPT_PLACE = "sluice.prompt.place"
    PROMPT_END = "sluice.prompt.end"
    DATA_SOURCE = "sluice.data_source"
    DETAIL = "sluice.detail"
    NUM_SAMPLES = "sluice.samples"
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


class TraceContext(NamedTuple):
    """A span as other processes name it: 128 bits of trace, 64 bits of span, neither 0.

    `is_sampled`: it is recorded, and so is every span below it.
    """

    trace_id: int
    span_id: int
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        """The value of W3C's header (https://www.w3.org/TR/trace-context/, version 00)."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"


def parse_traceparent(value: object) -> TraceContext | None:
    """Return the context in a header's value; ``None`` where it holds none, as W3C's standard asks.

    Later versions of the standard may add fields after the four that are known.
    """
    if not isinstance(value, str) or len(value) > _LONGEST_HEADER:
        return None
    match = _TRACEPARENT.fullmatch(value)
    if match is None:
        return None
    version, trace, span, flags, extension = match.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == "ff" or (version == "00" and extension) or not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def new_id(bits: int) -> int:
    """Return a random id of a trace or a span; never 0, which is not valid."""
    return _RANDOM.getrandbits(bits) or 1


def is_chosen(trace_id: int, ratio: float) -> bool:
    """Return whether a trace is among the share `ratio` that is recorded.

    Every process makes the same choice, by the lower 64 bits, as OpenTelemetry's
    ``TraceIdRatioBased``.
    """
    return (trace_id & (1 << SPAN_BITS) - 1) < round(ratio * (1 << SPAN_BITS))


class Timestamp(NamedTuple):
    """A time by both clocks: nanoseconds since the epoch, and of the monotonic clock."""

    wall_ns: int
    monotonic_ns: int

    @classmethod
    def now(cls) -> Self:
        """Return the present moment."""
        return cls(time.time_ns(), time.monotonic_ns())


_current: ContextVar[TraceContext | None] = ContextVar("span", default=None)


class Span:
    """A span that keeps nothing; `RecordedSpan` is one that is recorded.

    `context` names it to other processes; ``None``: there is nothing to name.
    """

    __slots__ = ()

    @property
    def context(self) -> TraceContext | None:
        """How other processes name it."""
        return None

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""

    def link(self, contexts: Sequence[TraceContext]) -> None:
        """Add links to spans of other traces."""

    def fail(self, error: str | None) -> None:
        """Note what went wrong; ``None``: nothing did."""

    def end(self) -> None:
        """End it. Repeating it is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave its block."""


NOTHING = Span()


class ContextSpan(Span):
    """A span that another process may record; it is current inside its block."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: TraceContext) -> None:
        self._context = context
        self._token: Token[TraceContext | None] | None = None

    @property
    def context(self) -> TraceContext:
        """How other processes name it."""
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


class RecordedSpan(ContextSpan):
    """A span that is recorded, from its creation until `end`.

    An exception that leaves its block becomes its error. `sluice.telemetry.otel` has the rest.
    """

    __slots__ = ()

    def again_under(self, parent: TraceContext, attributes: Attributes) -> None:
        """Record the same stretch of time, once it has ended, in another trace; link it to this."""
        raise NotImplementedError

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


class Recorder(Protocol):
    """Records the spans of chosen traces: `sluice.telemetry.otel.OtelRecorder`."""

    @property
    def begin(self) -> Callable[..., RecordedSpan]: ...


class Tracer:
    """Begins spans if this process is traced.

    Sampling is decided at the head of a trace: a span below one that is not recorded costs a
    comparison here and never reaches the recorder.
    """

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._sample_ratio = 0.0
        self._follows_callers = True

    @property
    def is_on(self) -> bool:
        """Whether this process is traced."""
        return self._recorder is not None

    def start(
        self, recorder: Recorder, sample_ratio: float, *, follows_callers: bool = True
    ) -> None:
        """Record spans from now on.

        Args:
            sample_ratio: share of the traces that are recorded.
            follows_callers: callers from outside decide about their traces, whatever the share.
        """
        self._recorder = recorder
        self._sample_ratio = sample_ratio
        self._follows_callers = follows_callers

    def stop(self) -> None:
        """Record nothing from now on."""
        self._recorder = None

    def span(
        self,
        name: SpanName,
        attributes: Attributes = _NO_ATTRIBUTES,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Begin a span below the current one; `NOTHING` where that one is not recorded."""
        parent = _current.get()
        return NOTHING if parent is None else self.child(parent, name, attributes, kind)

    def child(
        self,
        parent: TraceContext,
        name: SpanName,
        attributes: Attributes = _NO_ATTRIBUTES,
        kind: SpanKind = SpanKind.INTERNAL,
        began: Timestamp | None = None,
    ) -> Span:
        """Begin a span below `parent`, now or at `began`; `NOTHING` where that is not recorded."""
        recorder = self._recorder
        if recorder is None or not parent.is_sampled:
            return NOTHING
        return recorder.begin(name, parent, kind, attributes, began=began)

    def past(
        self,
        parent: TraceContext,
        name: SpanName,
        began: Timestamp,
        attributes: Attributes,
        error: str | None = None,
    ) -> None:
        """Record a span below `parent` that ends now, if that one is recorded.

        Args:
            error: the failure; ``None``: a success.
        """
        span = self.child(parent, name, attributes, began=began)
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
        """Begin the first span of a trace in this process.

        Args:
            caller: continue its trace, recorded or not as the caller decided; ``None``: begin one.
            trace_id: of the trace that begins; ``None``: a random one.
            is_always: record the trace that begins, whatever the share of recorded traces.
        """
        recorder = self._recorder
        if recorder is None:
            return NOTHING
        if caller is not None:
            span = self.child(caller, name, attributes, kind)
            return ContextSpan(caller) if span is NOTHING else span
        own_id = trace_id or new_id(TRACE_BITS)
        if is_always or is_chosen(own_id, self._sample_ratio):
            return recorder.begin(name, None, kind, attributes, trace_id=own_id)
        return ContextSpan(TraceContext(own_id, new_id(SPAN_BITS), is_sampled=False))

    def admit(self, caller: TraceContext) -> TraceContext:
        """Return the span of a caller from outside, recorded only if this process agrees."""
        if self._follows_callers or is_chosen(caller.trace_id, self._sample_ratio):
            return caller
        return TraceContext(caller.trace_id, caller.span_id, is_sampled=False)

    def within(self, context: TraceContext | None) -> Span:
        """Make `context` the current span inside a block; ``None``: leave the current one."""
        return NOTHING if context is None or not self.is_on else ContextSpan(context)

    def unrecorded(self) -> Span:
        """Record nothing inside a block, here or in the processes that are called."""
        return self.within(TraceContext(new_id(TRACE_BITS), new_id(SPAN_BITS), is_sampled=False))

    def current(self) -> TraceContext | None:
        """Return the current span, recorded or not; ``None``: there is none."""
        return _current.get() if self._recorder is not None else None


TRACER = Tracer()
"""This process's tracer."""
