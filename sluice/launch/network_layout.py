"""Names, ports and paths of a run's services when each has a separate host.

Compose, Kubernetes and users who start services by hand on several hosts take ports, names, paths
and commands from here; `sluice up` chooses free ports instead. This file imports next to nothing of
the project, since health probes load it every few seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from sluice.service_contract import CONFIG_NAME

Kind = Literal["trainer", "reward", "rollout"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Inside a container: volumes, and the one configuration in the run's folder.
RUNS_MOUNT, JOBS_MOUNT = "/runs", "/jobs"
RUN_FOLDER = f"{RUNS_MOUNT}/run"
CONFIG_FILE = f"{RUN_FOLDER}/{CONFIG_NAME}"
# Targets of the Dockerfile, by their images' names; the reward service's has no torch.
COMPUTE_IMAGE, REWARD_IMAGE = "sluice", "sluice-reward"
LAUNCHER = ("python", "-m", "sluice.launch.container")
HEALTH_PROBE = ("python", "-m", "sluice.launch.health_probe")
PREPARE = ("sluice", "prepare")
PREPARED_FOLDER = ("--run-dir", RUN_FOLDER)  # the last words of that command
USER_ID = 10001  # of the images

# A service spends its own grace period draining; what it needs to leave comes on top.
EXIT_MARGIN_S = 5.0
# By then an engine has killed what its launcher has not.
_ENGINE_MARGIN_S = 10.0

# Variables that Compose's files give `sluice prepare`: services read only the configuration. The
# Helm chart sets its keys instead.
OBSERVED_VARIABLE, DASHBOARD_VARIABLE = "SLUICE_OBSERVED", "SLUICE_DASHBOARD"
DEVICE_VARIABLE = "SLUICE_DEVICE"
# Where spans are taken, by OTLP over gRPC.
COLLECTOR = "http://collector:4317"
# The dashboard's port; a process next to the trainer's rank 0 can serve the page.
DASHBOARD_PORT = 8080
_EVERY_INTERFACE = "0.0.0.0"  # noqa: S104 a container's own network; tokens restrict the callers


@dataclass(frozen=True, slots=True)
class ServicePorts:
    """Ports of one service.

    `health_port` answers health unencrypted, and nothing else. `metrics_port` is where it is
    scraped if metrics are on; 0: a free one.
    """

    port: int
    health_port: int
    metrics_port: int = 0


SERVICE_PORTS: dict[Kind, ServicePorts] = {
    "trainer": ServicePorts(7000, 7100, 7200),
    "rollout": ServicePorts(7001, 7101, 7201),
    "reward": ServicePorts(7002, 7102, 7202),
}


def launcher_grace_s(shutdown_grace_s: float) -> float:
    """Return the seconds that a launcher waits between a service's SIGTERM and SIGKILL."""
    return shutdown_grace_s + EXIT_MARGIN_S


def engine_grace_s(shutdown_grace_s: float) -> int:
    """Return the seconds between SIGTERM and SIGKILL that a container's engine must allow."""
    return round(launcher_grace_s(shutdown_grace_s) + _ENGINE_MARGIN_S)


def network_settings() -> Iterator[str]:
    """Yield overrides (``key=value``) of a run whose services are found by their kinds' names.

    A replica's name means all of them: each one advertises an address of its own instead. The
    launcher starts the replicas, so none are the local launcher's.
    """
    for kind, place in SERVICE_PORTS.items():
        key = f"sluice.{kind}.endpoint"
        yield f"{key}.host={_EVERY_INTERFACE}"
        yield f"{key}.advertise={kind}"
        yield f"{key}.port={place.port}"
        yield f"{key}.health_port={place.health_port}"
    yield "sluice.rollout.replicas=0"


def metrics_settings() -> tuple[str, ...]:
    """Return overrides (``key=value``) that serve metrics at the ports of the layout."""
    return tuple(
        f"sluice.{kind}.endpoint.metrics_port={place.metrics_port}"
        for kind, place in SERVICE_PORTS.items()
    )


def dashboard_settings() -> tuple[str, ...]:
    """Return overrides (``key=value``) that serve the dashboard beyond the trainer's own host.

    Its readers show a token, so the run needs ``sluice.security.token_file`` as well.
    """
    return (f"sluice.dashboard.host={_EVERY_INTERFACE}", f"sluice.dashboard.port={DASHBOARD_PORT}")


def observed_settings() -> tuple[str, ...]:
    """Return overrides (``key=value``) for metrics at the layout's ports, and spans."""
    return (*metrics_settings(), f"sluice.telemetry.traces.endpoint={COLLECTOR}")


def device_settings(device: str) -> tuple[str, ...]:
    """Return overrides (``key=value``) that fix the device of trainer and replicas.

    Without them they would train on the CPU where their image, or the engine's mounts, lack what
    the device needs.
    """
    return (f"trainer.device={device}", f"sluice.rollout.device={device}")
