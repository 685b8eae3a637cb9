"""Settings of a run from its containers' environment: devices, time to stop, metrics, page.

Compose's files give `sluice prepare` these in variables, since services read only the
configuration. The Helm chart sets the keys, and derives the pods' time from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sluice.config.run import RunConfig
from sluice.device.ascend_environment import VISIBLE_VARIABLE
from sluice.device.host import CUDA_VISIBLE_VARIABLE
from sluice.errors import ConfigError
from sluice.launch.network_layout import engine_grace_s, metrics_settings

OBSERVED_VARIABLE = "SLUICE_OBSERVED"
"""Set to 1, `sluice prepare` prepares an observed run, as `compose.observability.yaml` asks."""

DASHBOARD_VARIABLE = "SLUICE_DASHBOARD"
"""Set to 1, it prepares one with a dashboard for other hosts, as `compose.dashboard.yaml` asks."""

COLLECTOR = "http://collector:4317"
"""Where spans are taken, by OTLP over gRPC."""

DEVICE_VARIABLE = "SLUICE_DEVICE"
"""The device that `compose.gpu.yaml` and `compose.npu.yaml` give to trainer and replicas."""

SHARED_DEVICES_VARIABLE = "SLUICE_SHARED_DEVICES"
"""Devices of this machine that the containers of a run divide, as `compose.gpu.yaml` gives them to
trainer and replicas: numbers, or ``all``. Without it a container has all that it sees to itself."""

STOP_GRACE_VARIABLE = "SLUICE_STOP_GRACE"
"""`stop_grace_period` of `compose.yaml`: the time between SIGTERM and SIGKILL."""

# What both versions of Compose take; fractions of a millisecond are of no use here.
_DURATION = re.compile(
    r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m(?!s))?"
    r"(?:(?P<s>\d+(?:\.\d+)?)s)?(?:(?P<ms>\d+(?:\.\d+)?)ms)?"
)
_UNIT_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def observed_settings() -> tuple[str, ...]:
    """Return overrides (``key=value``) for metrics at the layout's ports, and spans."""
    return (*metrics_settings(), f"sluice.telemetry.traces.endpoint={COLLECTOR}")


def device_settings(device: str) -> tuple[str, ...]:
    """Return overrides (``key=value``) that fix the device of trainer and replicas.

    Without them they would train on the CPU where their image, or the engine's mounts, lack what
    the device needs.
    """
    return (f"trainer.device={device}", f"sluice.rollout.device={device}")


def shared_environment(given: Mapping[str, str], device: str | None) -> dict[str, str] | None:
    """Return a launcher's variables with the devices that containers divide; ``None``: they do not.

    Args:
        given: variables of the container.
        device: of the service, as configured.
    """
    shared = given.get(SHARED_DEVICES_VARIABLE)
    if not shared:
        return None
    variable = VISIBLE_VARIABLE if (device or "").startswith("npu") else CUDA_VISIBLE_VARIABLE
    return {**given, **({} if shared == "all" else {variable: shared})}


def duration_s(text: str) -> float:
    """Return the seconds of a duration as Compose writes it: ``90s``, ``1m30s``, ``1.5h``.

    Raises:
        ConfigError: it is none.
    """
    found = _DURATION.fullmatch(text)
    if found is None or not text:
        raise ConfigError(
            f"{STOP_GRACE_VARIABLE} = {text!r} is no duration; give one such as 90s or 1m30s"
        )
    return sum(_UNIT_S[unit] * float(number) for unit, number in found.groupdict("0").items())


def check_stop_grace(config: RunConfig, stop_grace: str) -> None:
    """Refuse a run whose services may still be stopping when their engine kills them.

    Args:
        config: that the services will read.
        stop_grace: what the engine waits, see `duration_s`.

    Raises:
        ConfigError: the time is too short, or no duration.
    """
    grace_s = config.sluice.shutdown_grace_s
    needed_s = engine_grace_s(grace_s)
    if duration_s(stop_grace) < needed_s:
        raise ConfigError(
            f"sluice.shutdown_grace_s = {grace_s:g}: services may take {needed_s} s to stop, and "
            f"their containers are killed after {stop_grace} ({STOP_GRACE_VARIABLE}); set "
            f"{STOP_GRACE_VARIABLE}={needed_s}s, or lower sluice.shutdown_grace_s"
        )
