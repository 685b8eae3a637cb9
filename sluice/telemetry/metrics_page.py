"""Serve ``GET /metrics`` with prometheus_client, and note the address for Prometheus."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sluice.concurrency.process import noted_file
from sluice.concurrency.threads import settle
from sluice.config.addresses import bare_host
from sluice.errors import ConfigError
from sluice.telemetry.metric_names import Instrument, InstrumentKind
from sluice.telemetry.metrics import Distribution, InstrumentReading, TelemetryPart, charged_cpu

if TYPE_CHECKING:
    from prometheus_client import Metric

PATH = "/metrics"
PROCESS_NAMES = (
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
)
"""Metrics that prometheus_client's own collector adds, as in every program that uses it."""
AnswerT = TypeVar("AnswerT")
_MOST_REQUESTS = 8
_REQUEST_TIMEOUT_S = 5.0
_POLL_S = 0.2

FOLDER = "metrics_targets"


class MetricsPage:
    """The page of metrics and the server that answers with it.

    Args:
        read: returns all readings; called once a page, in a request's thread.
        host: interface to listen on.
        port: 0 lets the system choose.

    Raises:
        ConfigError: prometheus_client is not installed.
        OSError: the port cannot be bound.
    """

    def __init__(
        self, read: Callable[[], Iterable[InstrumentReading]], host: str, port: int
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
            _free = threading.BoundedSemaphore(_MOST_REQUESTS)

            def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
                """Serve in a thread; close the connection if too many are open."""
                if not self._free.acquire(blocking=False):
                    self.shutdown_request(request)
                    return
                super().process_request(request, client_address)

            def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    self._free.release()

        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Collector(read))
        page = make_wsgi_app(registry)

        def answer(environ: dict[str, Any], start_response: Any) -> Any:  # noqa: ANN401  as in WSGI
            if environ["PATH_INFO"] != PATH:
                start_response("404 Not Found", [("Content-Type", "text/plain")])
                return [f"only {PATH} is here\n".encode()]
            with charged_cpu(TelemetryPart.SCRAPES):
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
                    families[instrument.name] = _family(instrument)
                family = families[instrument.name]
                if isinstance(value, Distribution):
                    buckets = [
                        ("+Inf" if math.isinf(bound) else str(bound), count)
                        for bound, count in value.cumulative
                    ]
                    family.add_metric(labels, buckets, value.total)
                else:
                    family.add_metric(labels, self._exported(instrument, value, labels))
        return families.values()

    def _exported(self, instrument: Instrument, value: float, labels: tuple[str, ...]) -> float:
        # Prometheus takes a counter that falls for one that restarted, and counts its value again.
        if instrument.kind is not InstrumentKind.COUNTER or instrument.may_restart:
            return value
        key = (instrument.name, labels)
        self._highest[key] = max(value, self._highest.get(key, 0.0))
        return self._highest[key]


def _family(instrument: Instrument) -> Metric:
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
        loop: another thread's.
        question: must not block.
        timeout_s: seconds that the loop has for it.

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
        run_dir: the run's folder.
        name: the process's.
        address: host:port of the metrics.
        labels: Prometheus adds them to all metrics of the process.
    """
    text = json.dumps([{"targets": [address], "labels": dict(labels)}]) + "\n"
    return noted_file(_file_of(run_dir, name), text, stays_after_error=True)


def _file_of(run_dir: Path, name: str) -> Path:
    return run_dir / FOLDER / f"{name.replace('/', '_')}.json"
