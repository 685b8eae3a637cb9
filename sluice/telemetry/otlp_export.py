"""Spans to a collector, by OTLP over gRPC: the one file that imports OpenTelemetry's packages.

Its exporter brings the connection, TLS, compression and retries, and reads
``OTEL_EXPORTER_OTLP_HEADERS``, ``_CERTIFICATE``, ``_COMPRESSION`` and their like, for which there
are no keys of ours. Spans are recorded and encoded here: the SDK's take several times the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.errors import ConfigError
from sluice.telemetry.span_export import SCOPE, ExportError
from sluice.telemetry.tracing import Attributes, RecordedSpan, TraceContext

try:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
    from opentelemetry.proto.common.v1 import common_pb2 as common
    from opentelemetry.proto.resource.v1 import resource_pb2
    from opentelemetry.proto.trace.v1 import trace_pb2 as trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExportResult
except ImportError as missing:
    raise ConfigError(
        "sluice.telemetry.traces.endpoint: OpenTelemetry's exporter cannot be imported "
        f"({missing}); install it with pip install 'sluice[traces]', or use "
        "sluice.telemetry.traces.file, which needs no package"
    ) from missing

TIMEOUT_S = 5
"""Seconds that a batch may take, retries included; only the queue's thread waits."""
_MOST_ATTRIBUTES = 2048


class _Exporter(OTLPSpanExporter):  # type: ignore[misc,unused-ignore]  # Any where it is missing
    """Sends our spans instead of the SDK's."""

    def __init__(self, endpoint: str, timeout_s: int, resource: Attributes) -> None:
        super().__init__(endpoint=endpoint, timeout=timeout_s)
        # With what OTEL_RESOURCE_ATTRIBUTES adds.
        found: Mapping[str, Any] = Resource.create(dict(resource)).attributes
        self._resource = resource_pb2.Resource(attributes=_attributes(found))

    def _translate_data(self, data: Any) -> Any:  # noqa: ANN401  as its base, of our own spans
        request = service.ExportTraceServiceRequest()
        found = request.resource_spans.add(resource=self._resource)
        scoped = found.scope_spans.add(scope=common.InstrumentationScope(name=SCOPE))
        for span in data:
            _add(scoped, span)
        return request


class OtlpSpans:
    """Sends spans to a collector.

    Args:
        endpoint: ``http://host:port``, or with ``https`` for TLS.
        resource: attributes of this process; ``OTEL_RESOURCE_ATTRIBUTES`` adds others.
        timeout_s: seconds that a batch may take.
    """

    def __init__(self, endpoint: str, resource: Attributes, timeout_s: int = TIMEOUT_S) -> None:
        # It tells of every retry; the queue tells of an outage, once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._endpoint = endpoint
        self._exporter: Any = _Exporter(endpoint, timeout_s, resource)

    @property
    def destination(self) -> str:
        """The collector's address."""
        return self._endpoint

    def export(self, spans: Sequence[RecordedSpan]) -> None:
        """Sends spans. Raises ExportError if the collector did not take them in time."""
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # whatever a vendor raises costs spans and nothing else
            raise ExportError(f"{type(error).__name__}: {error}") from error
        if result is not SpanExportResult.SUCCESS:
            raise ExportError("the collector does not take them")

    def close(self) -> None:
        """Closes the connection; an export that waits for its next try gives up."""
        self._exporter.shutdown()


def _add(scoped: Any, span: RecordedSpan) -> None:  # noqa: ANN401  the package may be missing
    context, parent_id = span.context, span.parent_id
    encoded = scoped.spans.add(
        trace_id=context.trace_id.to_bytes(16, "big"),
        span_id=context.span_id.to_bytes(8, "big"),
        parent_span_id=b"" if parent_id is None else parent_id.to_bytes(8, "big"),
        name=span.name,
        kind=span.kind,  # OTLP's number
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.start_ns + (span.duration_ns or 0),
        attributes=_attributes(span.attributes),
    )
    if span.links:
        encoded.links.extend([_link(linked) for linked in span.links])
    if span.error is not None:
        encoded.status.code = trace.Status.STATUS_CODE_ERROR
        encoded.status.message = span.error


def _link(context: TraceContext) -> Any:  # noqa: ANN401
    return trace.Span.Link(
        trace_id=context.trace_id.to_bytes(16, "big"), span_id=context.span_id.to_bytes(8, "big")
    )


def _attributes(values: Mapping[str, Any]) -> list[Any]:
    return [_ATTRIBUTES[key, value, value.__class__] for key, value in values.items()]


class _Attributes(dict[tuple[str, Any, type], Any]):
    """Attributes that were encoded before, as most of a run's are.

    To make a message costs ten times what it costs to find it. The class keeps 1 and true apart.
    """

    def __missing__(self, key: tuple[str, Any, type]) -> Any:  # noqa: ANN401
        if len(self) >= _MOST_ATTRIBUTES:
            self.clear()
        name, value, _ = key
        encoded = self[key] = common.KeyValue(key=name, value=_value(value))
        return encoded


_ATTRIBUTES = _Attributes()


def _value(value: str | int | float | bool) -> Any:  # noqa: ANN401
    if isinstance(value, str):
        return common.AnyValue(string_value=value)
    if isinstance(value, bool):
        return common.AnyValue(bool_value=value)
    if isinstance(value, int):
        return common.AnyValue(int_value=value)
    return common.AnyValue(double_value=value)
