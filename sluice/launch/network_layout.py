"""Where the services of a run listen and are found, when each has a host of its own.

Compose, Kubernetes and whoever starts services by hand on several hosts take ports, names and
commands from here; `sluice up`, where all share one host, has ports drawn instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["trainer", "reward", "rollout"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CONFIG_NAME = "config.yaml"


@dataclass(frozen=True, slots=True)
class Place:
    """Ports of one service. `health_port` answers health unencrypted, and nothing else."""

    port: int
    health_port: int


PLACES: dict[Kind, Place] = {
    "trainer": Place(7000, 7100),
    "rollout": Place(7001, 7101),
    "reward": Place(7002, 7102),
}
_EVERY_INTERFACE = "0.0.0.0"  # noqa: S104 a container's own network; who may call is up to tokens


def network_settings() -> tuple[str, ...]:
    """Overrides (``key=value``) of a run whose services are found by the names of their kinds.

    A replica's name stands for all of them: each one advertises an address of its own instead. The
    launcher starts the replicas, so none are the local launcher's.
    """
    return (*_endpoint_settings(), "sluice.rollout.replicas=0")


def _endpoint_settings() -> Iterator[str]:
    for kind, place in PLACES.items():
        key = f"sluice.{kind}.endpoint"
        yield f"{key}.host={_EVERY_INTERFACE}"
        yield f"{key}.advertise={kind}"
        yield f"{key}.port={place.port}"
        yield f"{key}.health_port={place.health_port}"
