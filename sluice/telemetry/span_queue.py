"""Ended spans on their way out of the process, in a thread of their own, so that nobody waits.

Consumes: ended spans, put from any thread. Waits for: more of them, a moment at most, and its
exporter. Produces: batches for the exporter. On failure: spans that an exporter could not take,
and those for which the queue has no room, are dropped and counted; each outage is told once, when
it begins and when it has ended. On shutdown: `close` gives the exporter its last spans and a
bounded time for them; what is left then is dropped, and told.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from sluice.telemetry.own_cost import SPANS, TELEMETRY_CPU, Part, SpanOutcome
from sluice.telemetry.tracing import RecordedSpan

logger = logging.getLogger(__name__)

MOST_QUEUED = 16_384
"""Spans that wait at most, about 1 kB each."""
BATCH = 512
INTERVAL_S = 1.0


class ExportError(Exception):
    """An exporter could not take a batch."""


class Exporter(Protocol):
    """Brings spans to where they are kept; its calls may block, and end by deadlines of its own."""

    @property
    def destination(self) -> str:
        """Where that is, for messages."""
        ...

    def export(self, spans: Sequence[RecordedSpan]) -> None:
        """Raises ExportError if the spans did not arrive, as far as is known."""
        ...

    def close(self) -> None:
        """Ends it; a call under way in another thread is broken off if it can be."""
        ...


class SpanQueue:
    """One exporter's queue and thread.

    Args:
        exporter: gets the spans.
        most: spans that may wait.
        interval_s: a span waits about so long for others to travel with.
    """

    def __init__(
        self, exporter: Exporter, *, most: int = MOST_QUEUED, interval_s: float = INTERVAL_S
    ) -> None:
        self._exporter, self._most, self._interval_s = exporter, most, interval_s
        self._spans: deque[RecordedSpan] = deque()
        self._wake = threading.Event()
        self._is_closing = self._is_out_of_order = False
        self.num_dropped = self.num_exported = 0
        self._thread = threading.Thread(
            target=self._run, name=f"spans to {exporter.destination}", daemon=True
        )
        self._thread.start()

    def put(self, span: RecordedSpan) -> None:
        """Takes a span, at once; without room for it, it is dropped."""
        size = len(self._spans)
        if size >= self._most:
            self._drop(1)
            return
        self._spans.append(span)
        if size == BATCH:
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Exports what waits, for `timeout_s` seconds at most."""
        ends_s = time.monotonic() + timeout_s
        self._is_closing = True
        self._wake.set()
        # The exporter's half: a batch that hangs is broken off, and there is time to see it end.
        self._thread.join(timeout_s / 2)
        if self._thread.is_alive():
            self._exporter.close()
            self._thread.join(max(0.0, ends_s - time.monotonic()))
        else:
            self._exporter.close()
        lost = self.num_dropped + len(self._spans)
        if lost:
            logger.warning(
                "%d spans never reached %s, %d did",
                *(lost, self._exporter.destination, self.num_exported),
            )

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            self._drain()
        self._drain()

    def _drain(self) -> None:
        while self._spans:
            with TELEMETRY_CPU.charged(Part.SPANS):
                batch = [self._spans.popleft() for _ in range(min(BATCH, len(self._spans)))]
                self._export(batch)
            if self._is_closing and self._is_out_of_order:
                return

    def _export(self, batch: Sequence[RecordedSpan]) -> None:
        try:
            self._exporter.export(batch)
        except Exception as error:  # noqa: BLE001  the queue outlives whatever an exporter raises
            self._failed(batch, error)
            return
        self.num_exported += len(batch)
        SPANS.add(SpanOutcome.SENT, count=len(batch))
        if self._is_out_of_order:
            self._is_out_of_order = False
            logger.info(
                "spans reach %s again; %d were dropped",
                *(self._exporter.destination, self.num_dropped),
            )

    def _failed(self, batch: Sequence[RecordedSpan], error: Exception) -> None:
        self._drop(len(batch))
        if not self._is_out_of_order:
            is_known = isinstance(error, ExportError)
            logger.warning(
                "spans do not reach %s and are dropped until they do: %s",
                *(self._exporter.destination, error if is_known else repr(error)),
                exc_info=None if is_known else error,
            )
        self._is_out_of_order = True

    def _drop(self, count: int) -> None:
        self.num_dropped += count
        SPANS.add(SpanOutcome.DROPPED, count=count)
