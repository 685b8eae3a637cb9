"""Serve ``GET /metrics`` by prometheus_client, from its own threads, and announce where."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sluice.config.addresses import bare_host
from sluice.errors import ConfigError
from sluice.telemetry.metrics import Distribution, Instrument, InstrumentKind, InstrumentReading
from sluice.telemetry.process import TELEMETRY_CPU, TelemetryPart

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
"""What prometheus_client's own collector adds, by names that all of its users share."""
AnswerT = TypeVar("AnswerT")
_MOST_REQUESTS = 8
_REQUEST_TIMEOUT_S = 5.0
_POLL_S = 0.2


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
                """Log nothing: a scrape every few seconds is not news."""

        class Server(ThreadingWSGIServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            _places = threading.BoundedSemaphore(_MOST_REQUESTS)

            def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
                """Serve in a thread; close the connection if too many are open."""
                if not self._places.acquire(blocking=False):
                    self.shutdown_request(request)
                    return
                super().process_request(request, client_address)

            def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    self._places.release()

        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Collector(read))
        page = make_wsgi_app(registry)

        def answer(environ: dict[str, Any], start_response: Any) -> Any:  # noqa: ANN401  as in WSGI
            if environ["PATH_INFO"] != PATH:
                start_response("404 Not Found", [("Content-Type", "text/plain")])
                return [f"only {PATH} is here\n".encode()]
            with TELEMETRY_CPU.charged(TelemetryPart.SCRAPES):
                return page(environ, start_response)

        self._server = make_server(bare_host(host), port, answer, Server, Handler)
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
    """Turns readings into prometheus_client's families, in the order in which they come."""

    def __init__(self, read: Callable[[], Iterable[InstrumentReading]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._highest: dict[tuple[str, tuple[str, ...]], float] = {}

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            families: dict[Instrument, list[InstrumentReading]] = {}
            for reading in self._read():
                families.setdefault(reading.instrument, []).append(reading)
            found = [self._family(one, readings) for one, readings in families.items()]
        yield from found

    def _family(self, instrument: Instrument, readings: Iterable[InstrumentReading]) -> Metric:
        from prometheus_client import core

        kinds: dict[InstrumentKind, Any] = {
            InstrumentKind.COUNTER: core.CounterMetricFamily,
            InstrumentKind.GAUGE: core.GaugeMetricFamily,
            InstrumentKind.HISTOGRAM: core.HistogramMetricFamily,
        }
        text = f"{instrument.meaning} Unit: {instrument.unit}."
        family = kinds[instrument.kind](instrument.name, text, labels=instrument.labels)
        for reading in readings:
            value = reading.value
            if isinstance(value, Distribution):
                buckets = [(_bound(bound), float(count)) for bound, count in value.cumulative]
                family.add_metric(reading.labels, buckets, value.total)
            else:
                family.add_metric(reading.labels, self._exported(reading, value))
        metric: Metric = family
        return metric

    def _exported(self, reading: InstrumentReading, value: float) -> float:
        # Prometheus takes a counter that fell for one that restarted, and all of it for new.
        instrument = reading.instrument
        if instrument.kind is not InstrumentKind.COUNTER or instrument.may_restart:
            return value
        key = (instrument.name, reading.labels)
        self._highest[key] = max(value, self._highest.get(key, 0.0))
        return self._highest[key]


def _bound(value: float) -> str:
    return "+Inf" if math.isinf(value) else str(float(value))


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

    def run() -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(question())
        except Exception as error:  # noqa: BLE001  raised in the caller
            answer.set_exception(error)

    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError:
        return None
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        # The answer may have come meanwhile; or the question itself timed out.
        if answer.done():
            return answer.result()
        answer.cancel()
        return None


FOLDER = "metrics_targets"


def target_text(address: str, labels: Mapping[str, str]) -> str:
    """Return the content of a file of targets.

    Args:
        address: host:port of the metrics.
        labels: that Prometheus puts on all of them.
    """
    return json.dumps([{"targets": [address], "labels": dict(labels)}]) + "\n"


def forget_targets(run_dir: Path) -> None:
    """Remove all targets: a run begins, and those of an earlier run are gone."""
    for file in (run_dir / FOLDER).glob("*.json"):
        file.unlink(missing_ok=True)


def forget_target(run_dir: Path, name: str) -> None:
    """Remove the target of a process that left as it was asked to: it is not down."""
    with suppress(OSError):
        _file_of(run_dir, name).unlink()


@contextmanager
def scrape_target(
    run_dir: Path, name: str, address: str, labels: Mapping[str, str]
) -> Iterator[None]:
    """Note where a process's metrics are, in ``<run_dir>/metrics_targets/<name>.json``.

    The file is removed only at an ordered end, such as a cancelled block: Prometheus shall report
    a process as down that was killed, or whose block ended with an error. Nothing happens where
    there is no such folder: a replica may run on a machine without it.
    """
    text = target_text(address, labels)
    file = _file_of(run_dir, name)
    with suppress(OSError):  # a full disk is reported by those who need it
        if run_dir.is_dir():
            file.parent.mkdir(exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_text(text, encoding="utf-8")
            partial.replace(file)
    has_failed = False
    try:
        yield
    except Exception:
        has_failed = True
        raise
    finally:
        if not has_failed:
            with suppress(OSError):
                if file.read_text(encoding="utf-8") == text:
                    file.unlink()


def _file_of(run_dir: Path, name: str) -> Path:
    return run_dir / FOLDER / f"{name.replace('/', '_')}.json"
