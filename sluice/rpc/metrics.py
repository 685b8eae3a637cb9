"""Serve a process's metrics to Prometheus, with the readings that every process has.

Each scrape has a thread. It asks the event loop for the service's readings and waits at most
`_LOOP_TIMEOUT_S`. If the loop does not answer, or the readings cannot be read (logged once until
they can again), the page has only the readings that need no loop, and reports itself as incomplete.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sluice import own_version
from sluice.concurrency.process import process_age_s
from sluice.concurrency.threads import BackgroundMeasurement
from sluice.concurrency.waits import present_waits
from sluice.concurrency.watchdog import no_progress_seconds
from sluice.config.addresses import advertised_host, is_loopback, join_host_port
from sluice.config.schema.service import EndpointConfig, ServiceConfig
from sluice.rpc.credentials import CERTIFICATE_ENDS
from sluice.rpc.ports import check_bindable
from sluice.rpc.status import QUOTA_REFUSALS, RPC_ERRORS
from sluice.telemetry.metrics import (
    PATH,
    SPANS,
    TELEMETRY_CPU,
    InstrumentReading,
    MetricsPage,
    SpanOutcome,
    TelemetryPart,
    ask_loop,
    charge_cpu,
    reading,
    scrape_target,
)

logger = logging.getLogger(__name__)

_LOOP_TIMEOUT_S = 3.0
_DISK_WAIT_S = 0.5

ReadMetrics = Callable[[], Iterable[InstrumentReading]]


class DiskCapacity(NamedTuple):
    """Bytes of a file system: free for this user, and in total."""

    free_bytes: int
    size_bytes: int


DiskSpace = BackgroundMeasurement[DiskCapacity]


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


def process_readings(process: ProcessName, disk: DiskSpace) -> Iterator[InstrumentReading]:
    """Yield age, waits, errors, restarts, certificates, disk and the cost of telemetry itself."""
    yield reading("sluice_process_info", 1.0, process.name, process.kind, own_version())
    yield reading("sluice_process_uptime_seconds", process_age_s())
    yield reading("sluice_process_restarts_total", process.restarts)
    yield reading("sluice_watchdog_still_seconds", no_progress_seconds() or 0.0)
    waits = present_waits()
    yield reading(
        "sluice_watchdog_longest_wait_seconds", max((wait.seconds for wait in waits), default=0.0)
    )
    yield reading("sluice_watchdog_waits", sum(wait.count for wait in waits))
    for kind, count in RPC_ERRORS.counts().items():
        yield reading("sluice_rpc_errors_total", count, *kind)
    for limit, count in QUOTA_REFUSALS.counts().items():
        yield reading("sluice_quota_refusals_total", count, *limit)
    for file, end in CERTIFICATE_ENDS.items():
        yield reading("sluice_certificate_end_seconds", end.timestamp(), file)
    cpu_s = TELEMETRY_CPU.counts()
    for part in TelemetryPart:
        yield reading("sluice_telemetry_cpu_seconds_total", cpu_s.get((part,), 0.0), part)
    spans = SPANS.counts()
    for outcome in SpanOutcome:
        yield reading("sluice_telemetry_spans_total", spans.get((outcome,), 0), outcome)
    if (capacity := disk.latest(_DISK_WAIT_S)) is not None:
        yield reading("sluice_run_folder_free_bytes", capacity.free_bytes)
        yield reading("sluice_run_folder_size_bytes", capacity.size_bytes)


@contextmanager
def serve_metrics(
    service: ServiceConfig, endpoint: EndpointConfig, process: ProcessName, read: ReadMetrics
) -> Iterator[None]:
    """Serve metrics during the block. Without a port, do nothing and load nothing.

    Call it in a running event loop.

    Args:
        service, endpoint, who: settings, endpoint and name of this process.
        read: returns the service's readings; runs in the event loop and must not block.

    Raises:
        ConfigError: prometheus_client is not installed, or the port is not available.
    """
    if endpoint.metrics_port is None:
        yield
        return
    run_dir = Path(service.run_dir)
    disk = DiskSpace("disk space", partial(disk_capacity, run_dir))
    readings = _ServedPage(asyncio.get_running_loop(), read, process, disk).readings
    check_bindable(endpoint.host, endpoint.metrics_port)
    server = MetricsPage(readings, endpoint.host, endpoint.metrics_port)
    address = join_host_port(advertised_host(endpoint), server.port)
    _announce(endpoint.host, address)
    labels = {"service": process.kind, "name": process.name, "run": run_dir.absolute().name}
    try:
        with scrape_target(run_dir, process.name, address, labels):
            yield
    finally:
        server.close()


@dataclass(slots=True)
class _ServedPage:
    """All readings of a process, collected in a scrape's thread."""

    loop: asyncio.AbstractEventLoop
    read: ReadMetrics
    process: ProcessName
    disk: DiskSpace
    has_failed: bool = False

    def readings(self) -> Iterator[InstrumentReading]:
        yield from process_readings(self.process, self.disk)
        service_readings = self._service_readings()
        yield reading("sluice_scrape_complete", float(service_readings is not None))
        yield from service_readings or ()

    def _service_readings(self) -> tuple[InstrumentReading, ...] | None:
        try:
            service_readings = ask_loop(self.loop, self._read_service, _LOOP_TIMEOUT_S)
        except Exception:  # such as a broken engine; the rest of the page reports it
            if not self.has_failed:
                logger.exception("the metrics of %s cannot be read", self.process.name)
            self.has_failed = True
            return None
        if service_readings is not None:
            self.has_failed = False
        return service_readings

    def _read_service(self) -> tuple[InstrumentReading, ...]:
        """Read them in the event loop."""
        with charge_cpu(TelemetryPart.SCRAPES):
            return tuple(self.read())


def _announce(host: str, address: str) -> None:
    logger.info("metrics at http://%s%s", address, PATH)
    if not is_loopback(host):
        logger.warning(
            "%s: anybody who reaches this port can read the run's metrics, unencrypted and without "
            "a token; keep the network private, or remove metrics_port",
            address,
        )


def disk_capacity(folder: Path) -> DiskCapacity:
    """Return the space of a folder's file system. It hangs where the file system does.

    Raises:
        OSError: there is no such folder; a replica may run on a machine without the run's.
    """
    stats = os.statvfs(folder)
    return DiskCapacity(stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize)
