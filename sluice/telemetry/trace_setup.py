"""Trace this process as the run is configured."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.telemetry.tracing import TRACER, Attributes

logger = logging.getLogger(__name__)

_OTLP_PORT = 4317
_ENDPOINT = "sluice.telemetry.traces.endpoint"
_SHARE_OF_GRACE, _MAX_CLOSING_S = 0.2, 3.0


@contextmanager
def trace_process(config: RunConfig, service: str, instance: str) -> Iterator[None]:
    """Record this process's spans inside the block, if the run is traced.

    At the end the last ones get a share of `sluice.shutdown_grace_s`, and never more than a few
    seconds.

    Args:
        service: ``trainer``, ``reward`` or ``rollout``.
        instance: this process's name in the run.

    Raises:
        ConfigError: the collector's address is not one, or OpenTelemetry's packages are missing.
    """
    traces = config.sluice.telemetry.traces
    if not (traces.file or traces.endpoint):
        yield
        return
    # Only here: without tracing no process loads OpenTelemetry, which may not be installed.
    from sluice.telemetry import otel

    queues = []
    if traces.file:
        path = Path(config.sluice.run_dir) / traces.file
        queues.append(otel.file_queue(path, traces.file_mb << 20))
    if traces.endpoint:
        queues.append(otel.collector_queue(collector_url(traces.endpoint)))
    recorder = otel.OtelRecorder(_resource(config, service, instance), queues)
    TRACER.start(recorder, traces.sample_ratio, follows_callers=traces.follow_callers)
    logger.info("spans go to %s", " and ".join(queue.destination for queue in queues))
    try:
        yield
    finally:
        TRACER.stop()
        seconds = min(_SHARE_OF_GRACE * config.sluice.shutdown_grace_s, _MAX_CLOSING_S)
        for queue in queues:
            queue.writer.close(seconds / len(queues))


def collector_url(endpoint: str) -> str:
    """Complete a collector's address: no scheme means no TLS, no port means OTLP's port.

    Raises:
        ConfigError: it is not an address.
    """
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    try:
        parts = urlsplit(url)
        port = parts.port or _OTLP_PORT
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ConfigError(
            f"{_ENDPOINT} = {endpoint!r}: not the address of a collector; use http://host:port, or "
            "https://host:port for TLS"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def _resource(config: RunConfig, service: str, instance: str) -> Attributes:
    """Return this process's attributes by OpenTelemetry's conventions for resources."""
    return {
        "service.name": f"sluice-{service}",
        "service.namespace": config.trainer.project_name,
        "service.instance.id": instance,
        "sluice.run": config.trainer.experiment_name,
        "sluice.run_dir": config.sluice.run_dir,
    }
