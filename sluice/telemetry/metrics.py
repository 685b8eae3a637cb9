"""Values for Prometheus: readings of exported metrics, counts of events and histograms, among them
the cost of this process's own telemetry; and the page that serves them (``GET /metrics``), whose
address is noted for Prometheus.

Only the page needs prometheus_client.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sluice.concurrency.process import hold_file
from sluice.concurrency.threads import settle
from sluice.config.addresses import bare_host
from sluice.errors import ConfigError
from sluice.telemetry.metric_names import Instrument, InstrumentKind, instrument

if TYPE_CHECKING:
    from prometheus_client import Metric

PATH = "/metrics"
AnswerT = TypeVar("AnswerT")
_MAX_REQUESTS = 8
_REQUEST_TIMEOUT_S = 5.0
_POLL_S = 0.2

FOLDER = "metrics_targets"


class EventCounts:
    """Counts since the process's start. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def add(self, *labels: str, count: float = 1) -> None:
        """Count events of one kind, named by labels; there must be few kinds in all."""
        with self._lock:
            self._counts[labels] += count

    def counts(self) -> Mapping[tuple[str, ...], float]:
        """Return the events so far, by kind."""
        with self._lock:
            return dict(self._counts)


class Distribution(NamedTuple):
    """A histogram at one moment.

    Attributes:
        cumulative: pairs of an upper bound (inclusive) and how many values are at most that; the
            last bound is infinite.
        total: sum of all values.
    """

    cumulative: tuple[tuple[float, int], ...]
    total: float


class InstrumentReading(NamedTuple):
    """One value of an exported metric."""

    instrument: Instrument
    value: float | Distribution
    labels: tuple[str, ...] = ()


def reading(name: str, value: float | Distribution, *labels: str) -> InstrumentReading:
    """Return a value of the metric `name` of the table, for these values of its labels.

    Raises:
        LookupError: the metric has no row.
        ValueError: it has another number of labels.
    """
    exported = instrument(name)
    if len(labels) != len(exported.labels):
        raise ValueError(f"{name}: {len(labels)} labels given, {exported.labels} wanted")
    return InstrumentReading(exported, value, labels)


class Histogram:
    """Counts of values by size.

    Args:
        name: of a metric with bounds in the table. The bounds of buckets are inclusive; a bucket
            without an upper bound is added.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._bounds = instrument(name).bounds
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def reading(self) -> InstrumentReading:
        """Return the counts so far."""
        bounds = (*self._bounds, math.inf)
        cumulative = tuple(zip(bounds, accumulate(self._counts), strict=True))
        return reading(self._name, Distribution(cumulative, self._total))


SPANS = EventCounts()
"""Recorded spans by `SpanOutcome`, counted for each destination."""
TELEMETRY_CPU = EventCounts()
"""CPU seconds by `TelemetryPart`.

Threads of libraries, such as gRPC's, do not count; nor does recording a span, which is too short to
be timed each time: `make bench-telemetry` measures it.
"""


class TelemetryPart(StrEnum):
    """The work of telemetry."""

    SPANS = "spans"
    SCRAPES = "scrapes"


class SpanOutcome(StrEnum):
    """The outcome of a recorded span."""

    SENT = "sent"
    DROPPED = "dropped"


@contextmanager
def charge_cpu(part: TelemetryPart) -> Iterator[None]:
    """Charge the CPU time of this thread inside the block to `part`. Do not nest blocks."""
    began_s = time.thread_time()
    try:
        yield
    finally:
        TELEMETRY_CPU.add(part, count=time.thread_time() - began_s)


class MetricsPage:
    """The page of metrics and the server that answers with it.

    Args:
        read_metrics: returns all readings; called once a page, in a request's thread.
        port: 0 lets the system choose.

    Raises:
        ConfigError: prometheus_client is not installed.
        OSError: the port cannot be bound.
    """

    def __init__(
        self, read_metrics: Callable[[], Iterable[InstrumentReading]], host: str, port: int
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
            from prometheus_client.exposition import ThreadingWSGIServer
        except ImportError as error:
            raise ConfigError(
                "metrics_port needs the package prometheus_client, which is not installed; run "
                "pip install 'sluice[metrics]', or take metrics_port out"
            ) from error
        from wsgiref.simple_server import WSGIRequestHandler, make_server

        class Handler(WSGIRequestHandler):
            timeout = _REQUEST_TIMEOUT_S  # else a client that sends nothing keeps its thread

            def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401  as its base
                """Log nothing: Prometheus scrapes every few seconds."""

        class PageServer(ThreadingWSGIServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            _free = threading.BoundedSemaphore(_MAX_REQUESTS)

            def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
                """Serve in a thread; close the connection if too many are open."""
                if not self._free.acquire(blocking=False):
                    self.shutdown_request(request)
                    return
                try:
                    super().process_request(request, client_address)
                except BaseException:  # such as no thread for it
                    self._free.release()
                    raise

            def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    self._free.release()

        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Collector(read_metrics))
        page = make_wsgi_app(registry)

        def answer(environ: dict[str, Any], start_response: Any) -> Any:  # noqa: ANN401  as in WSGI
            if environ["PATH_INFO"] != PATH:
                start_response("404 Not Found", [("Content-Type", "text/plain")])
                return [f"only {PATH} is here\n".encode()]
            with charge_cpu(TelemetryPart.SCRAPES):
                return page(environ, start_response)

        self._server = make_server(bare_host(host), port, answer, PageServer, Handler)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(_POLL_S), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening; requests under way end with the process."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Collector:
    """Turns readings into prometheus_client's families, in their order."""

    def __init__(self, read: Callable[[], Iterable[InstrumentReading]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._highest: dict[tuple[str, tuple[str, ...]], float] = {}

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Any] = {}
        with self._lock:
            for instrument, value, labels in self._read():
                if instrument.name not in families:
                    families[instrument.name] = _metric_family(instrument)
                family = families[instrument.name]
                if isinstance(value, Distribution):
                    buckets = [
                        ("+Inf" if math.isinf(bound) else str(bound), count)
                        for bound, count in value.cumulative
                    ]
                    family.add_metric(labels, buckets, value.total)
                else:
                    family.add_metric(labels, self._export_value(instrument, value, labels))
        return families.values()

    def _export_value(self, instrument: Instrument, value: float, labels: tuple[str, ...]) -> float:
        # Prometheus takes a counter that falls for one that restarted, and counts its value again.
        if instrument.kind is not InstrumentKind.COUNTER or instrument.may_restart:
            return value
        key = (instrument.name, labels)
        self._highest[key] = max(value, self._highest.get(key, 0.0))
        return self._highest[key]


def _metric_family(instrument: Instrument) -> Metric:
    from prometheus_client import core

    kinds: dict[InstrumentKind, Any] = {
        InstrumentKind.COUNTER: core.CounterMetricFamily,
        InstrumentKind.GAUGE: core.GaugeMetricFamily,
        InstrumentKind.HISTOGRAM: core.HistogramMetricFamily,
    }
    text = f"{instrument.meaning} Unit: {instrument.unit}."
    family: Metric = kinds[instrument.kind](instrument.name, text, labels=instrument.labels)
    return family


def ask_loop(
    loop: asyncio.AbstractEventLoop, question: Callable[[], AnswerT], timeout_s: float
) -> AnswerT | None:
    """Return what `question` returns in the loop's thread.

    Args:
        question: must not block.

    Returns:
        ``None`` if the loop was busy for that long, or is closed.
    """
    answer: Future[AnswerT] = Future()
    try:
        loop.call_soon_threadsafe(settle, answer, question)
    except RuntimeError:
        return None
    if wait([answer], timeout_s).done or not answer.cancel():
        return answer.result()
    return None


def forget_targets(run_dir: Path) -> None:
    """Remove all targets: a run begins, and an earlier run's targets are gone."""
    for file in (run_dir / FOLDER).glob("*.json"):
        file.unlink(missing_ok=True)


def forget_target(run_dir: Path, name: str) -> None:
    """Remove the target of a process that was shut down on request: it must not count as down."""
    with suppress(OSError):
        _file_of(run_dir, name).unlink()


def scrape_target(
    run_dir: Path, name: str, address: str, labels: Mapping[str, str]
) -> AbstractContextManager[None]:
    """Note where a process's metrics are, in ``<run_dir>/metrics_targets/<name>.json``.

    Only a normal end of the block, or its cancellation, removes the file: Prometheus must report a
    process as down that was killed, or whose block ended with an error.

    Args:
        labels: Prometheus adds them to all metrics of the process.
    """
    text = json.dumps([{"targets": [address], "labels": dict(labels)}]) + "\n"
    return hold_file(_file_of(run_dir, name), text, stays_after_error=True)


def _file_of(run_dir: Path, name: str) -> Path:
    return run_dir / FOLDER / f"{name.replace('/', '_')}.json"
