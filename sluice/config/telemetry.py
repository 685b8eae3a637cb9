"""`sluice.telemetry.*`: what processes tell of themselves to tools outside the run."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sluice.config.section import PositiveInt, Section, Share


class TracesConfig(Section, frozen=True):
    """Spans from prompt to gradient. Off unless they go somewhere."""

    endpoint: Annotated[
        str | None,
        Meta(
            description=(
                "Collector that takes spans by OTLP over gRPC, as http://host:port or https://"
                "host:port; none: spans are sent nowhere, whatever OTEL_EXPORTER_OTLP_ENDPOINT "
                "says."
            )
        ),
    ] = None
    file: Annotated[
        str | None,
        Meta(
            description=(
                "File that spans are appended to, as lines of OTLP in JSON; a relative one is in "
                "the run's folder; none: spans are written nowhere."
            )
        ),
    ] = None
    sample_ratio: Annotated[
        Share,
        Meta(
            description=(
                "Share of the prompts whose traces are recorded. Steps are always recorded."
            )
        ),
    ] = 1.0
    file_mb: Annotated[
        PositiveInt,
        Meta(
            description=(
                "Size in MiB at which nothing more is appended to the file, which the log tells "
                "once; a file that is moved away begins anew."
            ),
        ),
    ] = 1024
    follow_callers: Annotated[
        bool,
        Meta(
            description=(
                "Clients that send a trace decide whether it is recorded, whatever sample_ratio "
                "says; false: of those that they record, the same share is, by the trace's id."
            )
        ),
    ] = False


class TelemetryConfig(Section, frozen=True):
    """All of it."""

    traces: TracesConfig = msgspec.field(default_factory=TracesConfig)
