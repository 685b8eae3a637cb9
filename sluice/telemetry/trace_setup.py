"""Whether this process is traced and where its spans go, as the run is configured."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.telemetry.span_export import Exporter, SpanFile, SpanQueue
from sluice.telemetry.tracing import TRACER, Attributes

logger = logging.getLogger(__name__)

_OTLP_PORT = 4317
_ENDPOINT = "sluice.telemetry.traces.endpoint"
_SHARE_OF_GRACE, _MOST_CLOSING_S = 0.2, 3.0


@contextmanager
def traced_process(config: RunConfig, service: str, instance: str) -> Iterator[None]:
    """Inside, this process records spans if the run is traced.

    At the end the last ones get a share of `sluice.shutdown_grace_s`, and never more than a few
    seconds.

    Args:
        config: the run's.
        service: ``trainer``, ``reward`` or ``rollout``.
        instance: this process's name in the run.

    Raises:
        ConfigError: the collector's address is none, or OpenTelemetry's packages are missing.
    """
    exporters = _exporters(config, _resource(config, service, instance))
    if not exporters:
        yield
        return
    queues = [SpanQueue(exporter) for exporter in exporters]
    traces = config.sluice.telemetry.traces
    TRACER.start(queues, traces.sample_ratio, follows_callers=traces.follow_callers)
    logger.info("spans go to %s", " and ".join(exporter.destination for exporter in exporters))
    try:
        yield
    finally:
        TRACER.stop()
        seconds = min(_SHARE_OF_GRACE * config.sluice.shutdown_grace_s, _MOST_CLOSING_S)
        for queue in queues:
            queue.close(seconds / len(queues))


def _exporters(config: RunConfig, resource: Attributes) -> list[Exporter]:
    traces, found = config.sluice.telemetry.traces, list[Exporter]()
    if traces.file:
        path, most_bytes = Path(config.sluice.run_dir) / traces.file, traces.file_mb << 20
        found.append(SpanFile(path, resource, most_bytes))
    if traces.endpoint:
        from sluice.telemetry.otlp_export import OtlpSpans

        found.append(OtlpSpans(collector_url(traces.endpoint), resource))
    return found


def collector_url(endpoint: str) -> str:
    """The collector's address, whole: without a scheme it is plain, without a port OTLP's.

    Raises:
        ConfigError: it is no address.
    """
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    try:
        parts = urlsplit(url)
        port = parts.port or _OTLP_PORT
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ConfigError(
            f"{_ENDPOINT} = {endpoint!r}: no address of a collector; use http://host:port, or "
            "https://host:port for TLS"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def _resource(config: RunConfig, service: str, instance: str) -> Attributes:
    """By OpenTelemetry's semantic conventions for resources."""
    return {
        "service.name": f"sluice-{service}",
        "service.namespace": config.trainer.project_name,
        "service.instance.id": instance,
        "sluice.run": config.trainer.experiment_name,
        "sluice.run_dir": config.sluice.run_dir,
    }
