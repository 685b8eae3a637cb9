"""Serves a process's metrics to Prometheus, where a port is set for it.

Consumes: scrapes, in a thread of their own (`MetricsServer`). Waits for: the event loop, which
reads what belongs to it, `_LOOP_TIMEOUT_S` at most. Unblocked by: the loop, or that time; then the
page says that it is not complete, and tells what needs no loop. Produces: a page, and the file in
the run's folder that tells Prometheus where it is. On failure of the service's readings: the same
page, and the reason in the log, once until they are there again. On shutdown: the block's end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.config.endpoints import advertised_host
from sluice.config.host_port import is_loopback, join_host_port
from sluice.config.service import EndpointConfig, ServiceConfig
from sluice.rpc.bound_socket import bound_socket
from sluice.rpc.process_readings import ProcessName, process_readings
from sluice.telemetry.disk_space import DiskSpace
from sluice.telemetry.exposition import CONTENT_TYPE, Exposition
from sluice.telemetry.instrument import Reading
from sluice.telemetry.instruments import process
from sluice.telemetry.loop_question import ask_loop
from sluice.telemetry.metrics_server import PATH, MetricsServer
from sluice.telemetry.own_cost import TELEMETRY_CPU, Part
from sluice.telemetry.scrape_target import scrape_target

__all__ = ["ReadMetrics", "served_metrics"]

logger = logging.getLogger(__name__)

_LOOP_TIMEOUT_S = 3.0

ReadMetrics = Callable[[], Iterable[Reading]]


@contextmanager
def served_metrics(
    service: ServiceConfig, endpoint: EndpointConfig, who: ProcessName, read: ReadMetrics
) -> Iterator[None]:
    """Serves metrics while the block runs; without a port nothing happens, and nothing is loaded.

    Called in a running event loop.

    Args:
        service: the run's settings.
        endpoint: of this process.
        who: this process.
        read: the service's readings; called in the event loop, must not block.

    Raises:
        ConfigError: prometheus_client is not installed, or the port cannot be had.
    """
    if endpoint.metrics_port is None:
        yield
        return
    run_dir = Path(service.run_dir)
    disk = DiskSpace(run_dir)
    page = _Page(asyncio.get_running_loop(), read, who, disk)
    exposition = Exposition(page.readings)
    listening = bound_socket(endpoint.host, endpoint.metrics_port)
    server = MetricsServer(exposition.page, CONTENT_TYPE, listening)
    server.start()
    disk.start()
    address = join_host_port(advertised_host(endpoint), server.port)
    _announce(endpoint.host, address)
    labels = {"service": who.kind, "name": who.name, "run": run_dir.absolute().name}
    try:
        with scrape_target(run_dir, who.name, address, labels):
            yield
    finally:
        server.stop()
        disk.stop()


class _Page:
    """All readings of a process, asked for in a scrape's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, read: ReadMetrics, who: ProcessName, disk: DiskSpace
    ) -> None:
        self._loop, self._read, self._who, self._disk = loop, read, who, disk
        self._has_failed = False

    def readings(self) -> Iterator[Reading]:
        yield from process_readings(self._who, self._disk)
        own = self._own()
        yield process.SCRAPE_COMPLETE.at(float(own is not None))
        yield from own or ()

    def _own(self) -> tuple[Reading, ...] | None:
        try:
            own = ask_loop(self._loop, self._read_service, _LOOP_TIMEOUT_S)
        except Exception:  # an engine that is broken, say; the rest of the page tells of it
            if not self._has_failed:
                logger.exception("the metrics of %s cannot be read", self._who.name)
            self._has_failed = True
            return None
        if own is not None:
            self._has_failed = False
        return own

    def _read_service(self) -> tuple[Reading, ...]:
        """In the event loop."""
        with TELEMETRY_CPU.charged(Part.SCRAPES):
            return tuple(self._read())


def _announce(host: str, address: str) -> None:
    logger.info("metrics at http://%s%s", address, PATH)
    if not is_loopback(host):
        logger.warning(
            "%s: whoever reaches this port may read the run's numbers, unencrypted and without a "
            "token; keep the network private, or take metrics_port out",
            address,
        )
