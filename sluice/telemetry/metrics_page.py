"""Serve ``GET /metrics`` from its own thread, in Prometheus' text format, and announce where."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

from sluice.errors import ConfigError
from sluice.telemetry.metrics import Distribution, Instrument, InstrumentKind, InstrumentReading
from sluice.telemetry.process import TELEMETRY_CPU, TelemetryPart

AnswerT = TypeVar("AnswerT")


def ask_loop(
    loop: asyncio.AbstractEventLoop, question: Callable[[], AnswerT], timeout_s: float
) -> AnswerT | None:
    """What `question` returns in the loop's thread.

    Args:
        loop: another thread's.
        question: must not block.
        timeout_s: seconds the loop has to come to it.

    Returns:
        ``None`` if the loop did not come to it, or is closed.
    """
    answer: Future[AnswerT] = Future()

    def run() -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(question())
        except Exception as error:  # noqa: BLE001  raised to whoever asked
            answer.set_exception(error)

    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError:
        return None
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        # It may have come while the time ran out; or the question itself timed out.
        if answer.done():
            return answer.result()
        answer.cancel()
        return None


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PROCESS_NAMES = (
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
)
"""What prometheus_client's own collector adds, by names that all of its users share."""


class Exposition:
    """A page of metrics.

    Args:
        read: all readings as they stand; called once a page.

    Raises:
        ConfigError: prometheus_client is not installed.
    """

    def __init__(self, read: Callable[[], Iterable[InstrumentReading]]) -> None:
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
        except ImportError as error:
            raise ConfigError(
                "metrics_port needs the package prometheus_client, which is not installed; run "
                "pip install 'sluice[metrics]', or take metrics_port out"
            ) from error
        self._registry, self._generate = CollectorRegistry(), generate_latest
        ProcessCollector(registry=self._registry)
        self._registry.register(_Collector(read))
        self._lock = threading.Lock()

    def page(self) -> bytes:
        """All metrics as text. Any thread may ask; one is served at a time."""
        with self._lock:
            text: bytes = self._generate(self._registry)
        return text


class _Collector:
    """Turns readings into prometheus_client's families, in the order in which they come."""

    def __init__(self, read: Callable[[], Iterable[InstrumentReading]]) -> None:
        self._read = read
        self._highest: dict[tuple[str, tuple[str, ...]], float] = {}

    def describe(self) -> Iterable[Any]:
        return ()

    def collect(self) -> Iterator[Any]:
        families: dict[Instrument, list[InstrumentReading]] = {}
        for reading in self._read():
            families.setdefault(reading.instrument, []).append(reading)
        for instrument, readings in families.items():
            family = _family(instrument)
            for reading in readings:
                self._add(family, reading)
            yield family

    def _add(self, family: Any, reading: InstrumentReading) -> None:  # noqa: ANN401  the package's families
        value = reading.value
        if isinstance(value, Distribution):
            buckets = [(_bound(bound), float(count)) for bound, count in value.cumulative]
            family.add_metric(reading.labels, buckets, value.total)
        elif reading.instrument.kind is InstrumentKind.COUNTER:
            family.add_metric(reading.labels, self._risen(reading, value))
        else:
            family.add_metric(reading.labels, value)

    def _risen(self, reading: InstrumentReading, value: float) -> float:
        """A counter that fell would be taken for one that began anew, and all of it for new."""
        if reading.instrument.may_restart:
            return value
        key = (reading.instrument.name, reading.labels)
        self._highest[key] = max(value, self._highest.get(key, 0.0))
        return self._highest[key]


def _family(instrument: Instrument) -> Any:  # noqa: ANN401  the package's families
    from prometheus_client import core

    kinds = {
        InstrumentKind.COUNTER: core.CounterMetricFamily,
        InstrumentKind.GAUGE: core.GaugeMetricFamily,
        InstrumentKind.HISTOGRAM: core.HistogramMetricFamily,
    }
    text = f"{instrument.meaning} Unit: {instrument.unit}."
    return kinds[instrument.kind](instrument.name, text, labels=instrument.labels)


def _bound(value: float) -> str:
    return "+Inf" if math.isinf(value) else str(float(value))


# Answers ``GET /metrics`` from a thread of its own, so that it answers while others are stuck.
#
# Consumes: requests without a body. Waits for: the whole of a request, and for each part of its
# answer to be taken, `_REQUEST_TIMEOUT_S` at most. Unblocked by: bytes, that time, the caller's
# end. Produces: a page. On failure of the page: 500, and the reason in the log. Requests above
# `_MOST_AT_ONCE` find a closed connection. On shutdown: `stop` ends the thread; requests under
# way are cut off with the process.


logger = logging.getLogger(__name__)

PATH = "/metrics"
_REQUEST_TIMEOUT_S = 5.0
_MOST_AT_ONCE = 8
_POLL_S = 0.2
_TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """One listening server.

    Args:
        page: makes the answer; called in any thread.
        content_type: of the page.
        listening: a bound TCP socket, which the server closes.
    """

    def __init__(
        self, page: Callable[[], bytes], content_type: str, listening: socket.socket
    ) -> None:
        self._server = _Server(page, content_type, listening)
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(_POLL_S), name="metrics", daemon=True
        )
        self.port: int = listening.getsockname()[1]

    def start(self) -> None:
        """Serves from here on."""
        self._server.server_activate()
        self._thread.start()

    def stop(self) -> None:
        """Listens no more."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, page: Callable[[], bytes], content_type: str, listening: socket.socket
    ) -> None:
        super().__init__(("", 0), _MetricsRequest, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.page, self.content_type = page, content_type
        self._capacity = threading.BoundedSemaphore(_MOST_AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  as its base
        if not self._capacity.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started, which would have given the room back
            self._capacity.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  as its base
        try:
            with TELEMETRY_CPU.charged(TelemetryPart.SCRAPES):
                super().process_request_thread(request, client_address)
        finally:
            self._capacity.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  as its base
        logger.debug("a scrape broke off", exc_info=True)  # noqa: LOG014  called in a handler


class _UntilDeadline(io.RawIOBase):
    """Reads of a socket that end at one time together, however few bytes each brings."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._connection, self._deadline_s = connection, deadline_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401  as its base
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request did not come in time")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _MetricsRequest(BaseHTTPRequestHandler):
    timeout = _REQUEST_TIMEOUT_S
    server_version, sys_version = "sluice", ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        deadline_s = time.monotonic() + self.timeout
        self.rfile = io.BufferedReader(_UntilDeadline(self.connection, deadline_s))

    def do_GET(self) -> None:
        """Answers a scrape."""
        server = self.server
        assert isinstance(server, _Server)
        if self.path.partition("?")[0] != PATH:
            self._answer(HTTPStatus.NOT_FOUND, _TEXT, f"only {PATH} is here\n".encode())
            return
        try:
            page = server.page()
        except Exception:  # the boundary where errors become statuses
            logger.exception("the metrics could not be read")
            reported = b"the metrics could not be read; see the log\n"
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, reported)
            return
        self._answer(HTTPStatus.OK, server.content_type, page)

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.connection.settimeout(self.timeout)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401  as its base
        """A scrape every few seconds is no news."""


FOLDER = "metrics_targets"


def target_text(address: str, labels: Mapping[str, str]) -> str:
    """The file's content.

    Args:
        address: host:port of the metrics.
        labels: that Prometheus puts on all of them.
    """
    return json.dumps([{"targets": [address], "labels": dict(labels)}]) + "\n"


def forget_targets(run_dir: Path) -> None:
    """A run begins: processes of an earlier one that were killed are down for good."""
    for file in (run_dir / FOLDER).glob("*.json"):
        file.unlink(missing_ok=True)


def forget_target(run_dir: Path, name: str) -> None:
    """A process has left for good, as it was asked to: that it is down is nobody's concern."""
    with suppress(OSError):
        _file_of(run_dir, name).unlink()


@contextmanager
def scrape_target(
    run_dir: Path, name: str, address: str, labels: Mapping[str, str]
) -> Iterator[None]:
    """Notes where a process's metrics are, in ``<run_dir>/metrics_targets/<name>.json``.

    The file goes at an ordered end only, which a cancelled block is as well: of a process that was
    killed, or whose block ended with an error, Prometheus shall tell that it is down. Nothing
    happens where there is no such folder: a replica may run on a machine without it.
    """
    text = target_text(address, labels)
    file = _file_of(run_dir, name)
    with suppress(OSError):  # a full disk is told of by those who need it
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
