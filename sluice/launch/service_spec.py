"""Which processes make up a run: one specification for every launcher."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sluice.config.host_port import split_host_port
from sluice.config.run import RunConfig
from sluice.rpc.bound_socket import bound_socket

_ROLLOUT_RESTARTS = _REWARD_RESTARTS = 5


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process.

    Args:
        name: for logs; unique in the run.
        command: program and arguments.
        environment: variables set on top of the launcher's.
        max_restarts: times it is started again after it failed.
        retries_errors: whether also after it ended by itself, with an error; else only after a
            signal has ended it.
        ends_run: when it ends with code 0 the run is over.
        is_needed: when it ends before the run is over, the run fails, whatever the code.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    retries_errors: bool = True
    ends_run: bool = False
    is_needed: bool = False


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
    file = str(config_file)
    threads = {"OMP_NUM_THREADS": str(config.sluice.trainer.torch_threads)}
    reward = ServiceSpec(
        "reward",
        _module("services.reward", "--config", file),
        # With the ledger on disk it goes on where it was; what it refuses itself it would again.
        max_restarts=_REWARD_RESTARTS if config.sluice.reward.ledger == "sqlite" else 0,
        retries_errors=False,
        is_needed=True,
    )
    rollouts = [
        rollout_service(config, config_file, index)
        for index in range(config.sluice.rollout.replicas)
    ]
    return (reward, *_trainer_ranks(config, file, threads), *rollouts)


def rollout_service(config: RunConfig, config_file: Path, index: int) -> ServiceSpec:
    """One replica."""
    name = f"rollout-{index}"
    return ServiceSpec(
        name,
        _module("services.rollout", "--config", str(config_file), "--name", name),
        {"OMP_NUM_THREADS": str(config.sluice.rollout.torch_threads)},
        max_restarts=_ROLLOUT_RESTARTS,
    )


def _trainer_ranks(
    config: RunConfig, file: str, threads: Mapping[str, str]
) -> tuple[ServiceSpec, ...]:
    ranks = config.trainer.n_gpus_per_node
    command = _module("services.trainer", "--config", file)
    if ranks == 1:
        return (ServiceSpec("trainer", command, threads, ends_run=True),)
    host = split_host_port(config.sluice.trainer.endpoint.host)[0]
    rendezvous = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(_rendezvous_port(config, host)),
        "WORLD_SIZE": str(ranks),
    }
    return tuple(
        ServiceSpec(
            "trainer" if rank == 0 else f"trainer-{rank}",
            command,
            {**threads, **rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            ends_run=rank == 0,
        )
        for rank in range(ranks)
    )


def _rendezvous_port(config: RunConfig, host: str) -> int:
    """A free port that no service is going to take."""
    services = config.sluice
    taken = {services.reward.endpoint.port, services.trainer.endpoint.port}
    taken.add(services.rollout.endpoint.port)
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
