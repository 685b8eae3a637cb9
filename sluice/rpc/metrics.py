"""Serve a process's metrics to Prometheus, with the readings that every process has.

Consumes: scrapes, in a thread of their own (`MetricsPage`). Waits for: the event loop, which
reads the service's metrics, `_LOOP_TIMEOUT_S` at most. Unblocked by: the loop, or that time, after
which the page reports itself as incomplete and holds the rest. Produces: a page, and the file in
the run's folder that gives Prometheus its address. On failure of the service's readings: the same
incomplete page, and the reason in the log, once until they work again. On shutdown: the block's
end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sluice.concurrency.waits import WAITS
from sluice.concurrency.watchdog import still_seconds
from sluice.config.addresses import advertised_host, is_loopback, join_host_port
from sluice.config.schema.service import EndpointConfig, ServiceConfig
from sluice.rpc.credentials import CERTIFICATE_ENDS
from sluice.rpc.ports import check_bindable
from sluice.rpc.status import QUOTA_REFUSALS, RPC_ERRORS
from sluice.telemetry.instruments import process
from sluice.telemetry.metrics import InstrumentReading
from sluice.telemetry.metrics_page import PATH, MetricsPage, ask_loop, scrape_target
from sluice.telemetry.process import (
    SPANS,
    TELEMETRY_CPU,
    DiskSpace,
    SpanOutcome,
    TelemetryPart,
    process_age_s,
)

logger = logging.getLogger(__name__)

_LOOP_TIMEOUT_S = 3.0

ReadMetrics = Callable[[], Iterable[InstrumentReading]]


@dataclass(frozen=True, slots=True)
class ProcessName:
    """The process that reports its metrics.

    Attributes:
        kind: trainer, reward or rollout.
        name: the replica's name, or the kind.
        restarts: how often its launcher has restarted it.
    """

    kind: str
    name: str
    restarts: int = 0


def process_readings(who: ProcessName, disk: DiskSpace) -> Iterator[InstrumentReading]:
    """Yield age, waits, errors, restarts, certificates, disk and the cost of telemetry itself."""
    yield process.INFO.at(1.0, who.name, who.kind, _version())
    yield process.UPTIME.at(process_age_s())
    yield process.RESTARTS.at(float(who.restarts))
    yield process.STILL.at(still_seconds() or 0.0)
    waits = WAITS.snapshot()
    yield process.LONGEST_WAIT.at(max((wait.seconds for wait in waits), default=0.0))
    yield process.WAITS.at(float(sum(wait.count for wait in waits)))
    for kind, count in RPC_ERRORS.counts().items():
        yield process.RPC_ERRORS.at(float(count), *kind)
    for limit, count in QUOTA_REFUSALS.counts().items():
        yield process.QUOTA_REFUSALS.at(float(count), *limit)
    for file, end in CERTIFICATE_ENDS.by_file.items():
        yield process.CERTIFICATE_END.at(end.timestamp(), file)
    for part, seconds in TELEMETRY_CPU.seconds().items():
        yield process.TELEMETRY_CPU.at(seconds, part)
    spans = SPANS.counts()
    for outcome in SpanOutcome:
        yield process.TELEMETRY_SPANS.at(float(spans.get((outcome,), 0)), outcome)
    yield from _disk(disk)


def _disk(disk: DiskSpace) -> Iterator[InstrumentReading]:
    if (capacity := disk.capacity()) is not None:
        yield process.RUN_FOLDER_FREE.at(float(capacity.free_bytes))
        yield process.RUN_FOLDER_SIZE.at(float(capacity.size_bytes))


def _version() -> str:
    try:
        return version("sluice")
    except PackageNotFoundError:  # run from a source tree
        return ""


@contextmanager
def served_metrics(
    service: ServiceConfig, endpoint: EndpointConfig, who: ProcessName, read: ReadMetrics
) -> Iterator[None]:
    """Serve metrics during the block. Without a port, do nothing and load nothing.

    Call it in a running event loop.

    Args:
        service: the run's settings.
        endpoint: of this process.
        who: this process.
        read: returns the service's readings; runs in the event loop and must not block.

    Raises:
        ConfigError: prometheus_client is not installed, or the port is not available.
    """
    if endpoint.metrics_port is None:
        yield
        return
    run_dir = Path(service.run_dir)
    disk = DiskSpace(run_dir)
    readings = _ServedPage(asyncio.get_running_loop(), read, who, disk).readings
    check_bindable(endpoint.host, endpoint.metrics_port)
    server = MetricsPage(readings, endpoint.host, endpoint.metrics_port)
    disk.start()
    address = join_host_port(advertised_host(endpoint), server.port)
    _announce(endpoint.host, address)
    labels = {"service": who.kind, "name": who.name, "run": run_dir.absolute().name}
    try:
        with scrape_target(run_dir, who.name, address, labels):
            yield
    finally:
        server.close()
        disk.stop()


class _ServedPage:
    """All readings of a process, collected in a scrape's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, read: ReadMetrics, who: ProcessName, disk: DiskSpace
    ) -> None:
        self._loop = loop
        self._read = read
        self._who = who
        self._disk = disk
        self._has_failed = False

    def readings(self) -> Iterator[InstrumentReading]:
        yield from process_readings(self._who, self._disk)
        own = self._own()
        yield process.SCRAPE_COMPLETE.at(float(own is not None))
        yield from own or ()

    def _own(self) -> tuple[InstrumentReading, ...] | None:
        try:
            own = ask_loop(self._loop, self._read_service, _LOOP_TIMEOUT_S)
        except Exception:  # such as a broken engine; the rest of the page reports it
            if not self._has_failed:
                logger.exception("the metrics of %s cannot be read", self._who.name)
            self._has_failed = True
            return None
        if own is not None:
            self._has_failed = False
        return own

    def _read_service(self) -> tuple[InstrumentReading, ...]:
        """Read them in the event loop."""
        with TELEMETRY_CPU.charged(TelemetryPart.SCRAPES):
            return tuple(self._read())


def _announce(host: str, address: str) -> None:
    logger.info("metrics at http://%s%s", address, PATH)
    if not is_loopback(host):
        logger.warning(
            "%s: anybody who reaches this port can read the run's metrics, unencrypted and without "
            "a token; keep the network private, or remove metrics_port",
            address,
        )
