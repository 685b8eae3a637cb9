"""What a run is told so that tools of Compose's overlays, or people, see it."""

from __future__ import annotations

from sluice.launch.network_layout import metrics_settings

__all__ = ["COLLECTOR", "DASHBOARD_VARIABLE", "OBSERVED_VARIABLE", "observed_settings"]

OBSERVED_VARIABLE = "SLUICE_OBSERVED"
"""Set to 1, `sluice prepare` prepares an observed run, as `compose.observability.yaml` asks."""

DASHBOARD_VARIABLE = "SLUICE_DASHBOARD"
"""Set to 1, it prepares one with a live page for other hosts, as `compose.dashboard.yaml` asks."""

COLLECTOR = "http://collector:4317"
"""Where spans are taken, by OTLP over gRPC."""


def observed_settings() -> tuple[str, ...]:
    """Overrides (``key=value``): metrics at the ports of the layout, spans to the collector."""
    return (*metrics_settings(), f"sluice.telemetry.traces.endpoint={COLLECTOR}")
