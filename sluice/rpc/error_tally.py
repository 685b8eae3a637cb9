"""Errors of calls, and requests that a limit refused, counted for whoever reads metrics."""

from __future__ import annotations

from sluice.telemetry.tally import EventCounts

__all__ = ["QUOTA_REFUSALS", "RPC_ERRORS", "short_method"]

RPC_ERRORS = EventCounts()
"""By side (``server`` or ``client``), method and code."""

QUOTA_REFUSALS = EventCounts()
"""By the key of the setting that limits."""


def short_method(path: str) -> str:
    """``Service/Method`` of a gRPC path such as ``/sluice.api.reward.v1.RewardService/Score``."""
    service, _, method = path.removeprefix("/").partition("/")
    return f"{service.rpartition('.')[2]}/{method}"
