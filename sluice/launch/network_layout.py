"""Where the services of a run listen and are found, when each has a host of its own.

Compose, Kubernetes and users who start services by hand on several hosts take ports, names, paths
and commands from here; `sluice up` chooses free ports instead. This file imports next to nothing of
the project, since health probes load it every few seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from sluice.service_contract import CONFIG_NAME, WEIGHTS_HEALTH

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


@dataclass(frozen=True, slots=True)
class ContainerLayout:
    """One service as a container runs it.

    Args:
        kind: the service; also its name for the other services.
        image: the container image.
        entrypoint: program of the image; it keeps the service's process and restarts it.
        arguments: of that program.
        health: a command inside the container; code 0 while the service serves.
        readiness: the name of the health state that stands for readiness; empty: the service's.
        place: its ports.
        mounts: volumes that it sees, and whether it may write there.
        takes_devices: whether it computes on NPUs or GPUs.
        stop_grace_s: seconds an engine waits after SIGTERM before it kills.
        keeps_state: whether only one may run at a time, with its state in the run's folder.
    """

    kind: Kind
    image: str
    entrypoint: tuple[str, ...]
    arguments: tuple[str, ...]
    health: tuple[str, ...]
    readiness: str
    place: ServicePorts
    mounts: tuple[tuple[str, bool], ...]
    takes_devices: bool
    stop_grace_s: int
    keeps_state: bool


def container_layout(kind: Kind, shutdown_grace_s: float = 15.0) -> ContainerLayout:
    """Return how a service runs as a container, in Compose and in Kubernetes.

    Args:
        kind: of the service.
        shutdown_grace_s: ``sluice.shutdown_grace_s``, by default the key's own default.
    """
    return ContainerLayout(
        kind=kind,
        image=REWARD_IMAGE if kind == "reward" else COMPUTE_IMAGE,
        entrypoint=LAUNCHER,
        arguments=(kind, "--config", CONFIG_FILE),
        health=(*HEALTH_PROBE, kind),
        readiness=WEIGHTS_HEALTH if kind == "rollout" else "",
        place=SERVICE_PORTS[kind],
        mounts=((RUNS_MOUNT, True), (JOBS_MOUNT, False)),
        takes_devices=kind != "reward",
        stop_grace_s=engine_grace_s(shutdown_grace_s),
        keeps_state=kind != "rollout",
    )


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
