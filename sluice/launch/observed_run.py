"""What a run is told so that the tools of `compose.observability.yaml` see it."""

from __future__ import annotations

from sluice.launch.network_layout import metrics_settings

__all__ = ["COLLECTOR", "OBSERVED_VARIABLE", "observed_settings"]

OBSERVED_VARIABLE = "SLUICE_OBSERVED"
"""Set to 1, `sluice prepare` prepares an observed run; an overlay of Compose's can add it."""

COLLECTOR = "http://collector:4317"
"""Where spans are taken, by OTLP over gRPC."""


def observed_settings() -> tuple[str, ...]:
    """Overrides (``key=value``): metrics at the ports of the layout, spans to the collector."""
    return (*metrics_settings(), f"sluice.telemetry.traces.endpoint={COLLECTOR}")
