"""Which processes make up a run: one specification for every launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sluice.config.derived import checkpoint_folder
from sluice.config.host_port import split_host_port
from sluice.config.run import RunConfig
from sluice.device.ascend_host import launch_environment
from sluice.launch.checkpoint_mark import MARK_VARIABLE, checkpoint_mark
from sluice.launch.device_share import rank_environment, replica_environment
from sluice.rpc.bound_socket import bound_socket

# Tells a process how often it was started before in this run.
RESTARTS_VARIABLE = "SLUICE_RESTARTS"
TRAINER = "trainer"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a service that failed is started again.

    Args:
        max_restarts: times in a row.
        retries_errors: whether also after it ended by itself, with an error; else only after a
            signal has ended it.
    """

    max_restarts: int
    retries_errors: bool


NO_RESTARTS = RestartPolicy(0, retries_errors=False)
# What the reward service or the trainer refuses it would refuse again; what a replica meets may
# be another process's state (its port, its memory, a trainer that restarts).
RESTARTS_AFTER_SIGNALS = RestartPolicy(5, retries_errors=False)
RESTARTS_AFTER_ERRORS_TOO = RestartPolicy(5, retries_errors=True)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process.

    Args:
        name: for logs; unique in the run.
        command: program and arguments.
        environment: variables set on top of the launcher's.
        restarts: when it is started again after it failed.
        ends_run: when it ends with code 0 the run is over.
        is_needed: when it ends before the run is over because it was asked to, the run fails.
        crew: processes of one crew are ended and started together; empty: it has its own.
        starts_before: how often launchers that are gone started it in this run.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts: RestartPolicy = NO_RESTARTS
    ends_run: bool = False
    is_needed: bool = False
    crew: str = ""
    starts_before: int = 0

    @property
    def crew_name(self) -> str:
        """Its crew's name."""
        return self.crew or self.name


def with_ports(config: RunConfig) -> RunConfig:
    """The configuration with a free port wherever the trainer's or reward's port is 0."""
    service = config.sluice
    trainer, reward = service.trainer, service.reward
    wanted = [trainer.endpoint, reward.endpoint]
    ports = iter(_free_ports([e.host for e in wanted if e.port == 0]))
    endpoints = [e if e.port else msgspec.structs.replace(e, port=next(ports)) for e in wanted]
    return msgspec.structs.replace(
        config,
        sluice=msgspec.structs.replace(
            service,
            trainer=msgspec.structs.replace(trainer, endpoint=endpoints[0]),
            reward=msgspec.structs.replace(reward, endpoint=endpoints[1]),
        ),
    )


def local_services(config: RunConfig, config_file: Path) -> tuple[ServiceSpec, ...]:
    """The processes of a run on one machine, in the order of their start.

    Args:
        config: resolved, with ports.
        config_file: where the processes read the same configuration.
    """
    mark = checkpoint_mark(Path(checkpoint_folder(config)))
    rollouts = [
        rollout_service(config, config_file, index)
        for index in range(config.sluice.rollout.replicas)
    ]
    return (
        reward_service(config, config_file),
        *trainer_services(config, config_file, mark),
        *rollouts,
    )


def reward_service(config: RunConfig, config_file: Path) -> ServiceSpec:
    """The reward service."""
    return ServiceSpec(
        "reward",
        _module("services.reward", "--config", str(config_file)),
        # Only with the ledger on disk does it go on where it was.
        restarts=RESTARTS_AFTER_SIGNALS if config.sluice.reward.ledger == "sqlite" else NO_RESTARTS,
        is_needed=True,
    )


def trainer_services(
    config: RunConfig, config_file: Path, checkpoints_before: str
) -> tuple[ServiceSpec, ...]:
    """All ranks of the trainer, one crew.

    Args:
        checkpoints_before: the mark of the checkpoints that were there before the run.
    """
    environment = {
        "OMP_NUM_THREADS": str(config.sluice.trainer.torch_threads),
        MARK_VARIABLE: checkpoints_before,
    }
    return _trainer_ranks(config, str(config_file), environment)


def replica_name(index: int) -> str:
    """The name of the replica with a number."""
    return f"rollout-{index}"


def rollout_service(config: RunConfig, config_file: Path, index: int) -> ServiceSpec:
    """One replica."""
    name = replica_name(index)
    return ServiceSpec(
        name,
        _module("services.rollout", "--config", str(config_file), "--name", name),
        {
            "OMP_NUM_THREADS": str(config.sluice.rollout.torch_threads),
            **replica_environment(config, index, os.environ),
        },
        restarts=RESTARTS_AFTER_ERRORS_TOO,
    )


def replica_on_its_own(
    config: RunConfig, config_file: Path, name: str, address: str
) -> ServiceSpec:
    """A replica whose host is its own, with all devices that it sees.

    Args:
        name: unique in the fleet.
        address: its host as peers reach it.
    """
    service = config.sluice.rollout
    advertised = f"sluice.rollout.endpoint.advertise={address}"
    return ServiceSpec(
        name,
        _module("services.rollout", "--config", str(config_file), "--name", name, advertised),
        {
            "OMP_NUM_THREADS": str(service.torch_threads),
            **launch_environment(config, service.device, service.endpoint, os.environ),
        },
        restarts=RESTARTS_AFTER_ERRORS_TOO,
    )


def _trainer_ranks(
    config: RunConfig, file: str, environment: Mapping[str, str]
) -> tuple[ServiceSpec, ...]:
    ranks = config.trainer.n_gpus_per_node
    command = _module("services.trainer", "--config", file)
    host = split_host_port(config.sluice.trainer.endpoint.host)[0]
    places: list[dict[str, str]] = [{}]
    if ranks > 1:
        meeting = {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(_rendezvous_port(config, host)),
            "WORLD_SIZE": str(ranks),
        }
        places = [{**meeting, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(ranks)]
    return tuple(
        ServiceSpec(
            TRAINER if rank == 0 else f"{TRAINER}-{rank}",
            command,
            {**environment, **place, **rank_environment(config, rank, os.environ)},
            restarts=RESTARTS_AFTER_SIGNALS,
            ends_run=rank == 0,
            is_needed=True,
            crew=TRAINER,
        )
        for rank, place in enumerate(places)
    )


def _rendezvous_port(config: RunConfig, host: str) -> int:
    """A free port that no service is going to take."""
    services = config.sluice
    endpoints = (
        service.endpoint for service in (services.reward, services.trainer, services.rollout)
    )
    taken = {port for endpoint in endpoints for port in (endpoint.port, endpoint.health_port)}
    while (port := _free_ports([host])[0]) in taken:
        continue
    return port


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


def _free_ports(hosts: list[str]) -> list[int]:
    """One free port per host; all are held until all are known, so that they differ."""
    with ExitStack() as held:
        ports: list[int] = []
        for host in hosts:
            server = held.enter_context(bound_socket(host, 0))
            server.listen()
            ports.append(server.getsockname()[1])
        return ports
