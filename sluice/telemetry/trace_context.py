"""Which trace and span something belongs to, as it crosses processes: W3C Trace Context.

https://www.w3.org/TR/trace-context/, version 00. `tracestate` is not carried on.
"""

from __future__ import annotations

import random
import re
from typing import NamedTuple

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
