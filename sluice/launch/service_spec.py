"""Specifications of a run's processes, for every launcher, with ports and addresses."""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Container, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from sluice.config.addresses import configured_ports, split_host_port
from sluice.config.deadlines import longest_start_s
from sluice.config.derived import checkpoint_folder, world_size
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.launch.device_plan import rank_environment, replica_environment
from sluice.rpc.ports import bind_socket, check_bindable
from sluice.service_contract import MARK_VARIABLE, checkpoint_mark

_LOWEST, _BEHIND_HIGHEST = 20_000, 30_000
_TRIES = 32
_ANY_PORT = 9  # nothing is sent
_RETRY_S = 1.0
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Not the interpreter's own generator, which runs seed to be repeatable: two would choose the same.
_random = random.SystemRandom()

TRAINER = "trainer"
REWARD = "reward"
EVALUATION = "evaluation"
_REPLICA = "rollout-"


def free_ports(hosts: list[str], besides: Container[int] = ()) -> list[int]:
    """Return one free port per host; they differ, since all are held until all are known.

    Args:
        hosts: addresses of this machine.
        besides: ports that others are going to take.

    Raises:
        ConfigError: one of them is none.
    """
    for host in dict.fromkeys(hosts):
        check_bindable(host, 0)
    with ExitStack() as stack:
        sockets = [stack.enter_context(_listening_socket(host, besides)) for host in hosts]
        return [listening.getsockname()[1] for listening in sockets]


def _listening_socket(host: str, besides: Container[int]) -> socket.socket:
    choice = range(_LOWEST, min(_BEHIND_HIGHEST, _first_ephemeral()))
    for port in _random.sample(choice, min(_TRIES, len(choice))):
        if port in besides:
            continue
        try:
            return _listen_at(host, port)
        except (ConfigError, OSError):
            continue  # taken
    return _listen_at(host, 0)


def _listen_at(host: str, port: int) -> socket.socket:
    server = bind_socket(host, port)
    try:
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def _first_ephemeral() -> int:
    """Return the lowest port that the system chooses on its own."""
    try:
        return int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return _BEHIND_HIGHEST


def own_address(peer_host: str, patience_s: float = 0.0) -> str:
    """Return this host's address on the network that leads to `peer_host`; send no packet.

    Raises:
        ConfigError: after `patience_s` seconds the name is unknown, or no network leads there.
    """
    until_s = time.monotonic() + patience_s
    while True:
        try:
            infos = socket.getaddrinfo(peer_host, _ANY_PORT, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, address = infos[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() >= until_s:
                raise ConfigError(
                    f"{peer_host} cannot be reached from here ({error}); are both in one network, "
                    "and is sluice.trainer.endpoint.advertise right?"
                ) from error
        time.sleep(_RETRY_S)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When to restart a failed service.

    Args:
        max_restarts: most restarts in a row.
        retries_errors: restart it also after its own error; otherwise only after a signal.
        stable_s: a process that lived longer than it may take to start was in no crash loop: its
            restarts count from 0 again. No process reports to the supervisor that it serves.
    """

    max_restarts: int
    retries_errors: bool
    stable_s: float = 120.0


NO_RESTARTS = RestartPolicy(0, retries_errors=False)
# What the reward service or the trainer refuses it would refuse again; what a replica meets may
# be another process's state (its port, its memory, a trainer that restarts).
RESTARTS_AFTER_SIGNALS = RestartPolicy(5, retries_errors=False)
RESTARTS_AFTER_ERRORS_TOO = RestartPolicy(5, retries_errors=True)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """The specification of a process.

    Args:
        name: for logs; unique in the run.
        command: program and arguments.
        environment: variables set on top of the launcher's.
        restarts: when to restart it after a failure.
        ends_run: the run is over when it ends with code 0.
        is_needed: the run fails if it ends early, even with code 0 or on request.
        crew: processes of a crew start and end together; empty for a crew of its own.
        starts_before: how often earlier launchers started it in this run.
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
        """The name of its crew."""
        return self.crew or self.name


def with_ports(config: RunConfig) -> RunConfig:
    """Return the configuration with free ports in place of 0 for trainer and reward service."""
    service = config.sluice
    trainer, reward = service.trainer, service.reward
    configured = [trainer.endpoint, reward.endpoint]
    hosts = [endpoint.host for endpoint in configured if endpoint.port == 0]
    ports = iter(free_ports(hosts, besides=_configured_ports(config)))
    endpoints = [e if e.port else msgspec.structs.replace(e, port=next(ports)) for e in configured]
    return msgspec.structs.replace(
        config,
        sluice=msgspec.structs.replace(
            service,
            trainer=msgspec.structs.replace(trainer, endpoint=endpoints[0]),
            reward=msgspec.structs.replace(reward, endpoint=endpoints[1]),
        ),
    )


def local_services(config: RunConfig, config_file: Path) -> tuple[ServiceSpec, ...]:
    """Return the processes of a run on one machine, in the order of their start."""
    rollouts = [
        rollout_service(config, config_file, index)
        for index in range(config.sluice.rollout.replicas)
    ]
    if config.sluice.evaluation.benchmarks:
        leads: tuple[ServiceSpec, ...] = (evaluation_service(config_file),)
    else:
        mark = checkpoint_mark(Path(checkpoint_folder(config)))
        leads = trainer_services(config, config_file, mark)
    return (reward_service(config, config_file), *leads, *rollouts)


def reward_service(config: RunConfig, config_file: Path) -> ServiceSpec:
    """Return the reward service."""
    # It resumes where it was with the ledger on disk, or with an evaluation's stored responses.
    services = config.sluice
    resumes = services.reward.ledger == "sqlite" or bool(services.evaluation.benchmarks)
    return ServiceSpec(
        REWARD,
        _module_command("services.reward", "--config", str(config_file)),
        restarts=RESTARTS_AFTER_SIGNALS if resumes else NO_RESTARTS,
        is_needed=True,
    )


def evaluation_service(config_file: Path) -> ServiceSpec:
    """Return the process that leads a stand-alone evaluation, in place of the trainer."""
    return ServiceSpec(
        EVALUATION,
        _module_command("services.evaluation", "--config", str(config_file)),
        restarts=RESTARTS_AFTER_SIGNALS,
        ends_run=True,
        is_needed=True,
    )


def trainer_services(
    config: RunConfig,
    config_file: Path,
    checkpoints_before: str,
    environment: Mapping[str, str] = os.environ,
) -> tuple[ServiceSpec, ...]:
    """Return all ranks of a trainer on this machine, each with its share of the devices."""
    host = split_host_port(config.sluice.trainer.endpoint.host)[0]
    port = free_ports([host], besides=_configured_ports(config))[0]
    ranks = placed_trainer(config, config_file, checkpoints_before, (host, port))
    return tuple(
        _with_variables(spec, rank_environment(config, rank, environment))
        for rank, spec in enumerate(ranks)
    )


def placed_trainer(
    config: RunConfig, config_file: Path, checkpoints_before: str, meeting: tuple[str, int]
) -> tuple[ServiceSpec, ...]:
    """Return all ranks of the trainer, one crew; placement adds devices.

    Args:
        config_file: the same path on all nodes.
        checkpoints_before: the mark of the checkpoints that existed before the run.
        meeting: host and port of rank 0, where several ranks find each other.
    """
    ranks, per_node = world_size(config), config.trainer.n_gpus_per_node
    environment = {
        "OMP_NUM_THREADS": str(config.sluice.trainer.torch_threads),
        MARK_VARIABLE: checkpoints_before,
    }
    if ranks > 1:
        environment |= {
            "MASTER_ADDR": meeting[0],
            "MASTER_PORT": str(meeting[1]),
            "WORLD_SIZE": str(ranks),
        }
    return tuple(
        ServiceSpec(
            rank_name(rank),
            _module_command("services.trainer", "--config", str(config_file)),
            environment
            | ({"RANK": str(rank), "LOCAL_RANK": str(rank % per_node)} if ranks > 1 else {}),
            restarts=replace(RESTARTS_AFTER_SIGNALS, stable_s=longest_start_s(config)),
            ends_run=rank == 0,
            is_needed=True,
            crew=TRAINER,
        )
        for rank in range(ranks)
    )


def rank_name(rank: int) -> str:
    """Return the name of a trainer rank."""
    return TRAINER if rank == 0 else f"{TRAINER}-{rank}"


def replica_name(index: int) -> str:
    """Return the name of the replica with a number."""
    return f"{_REPLICA}{index}"


def replica_number(name: str) -> int | None:
    """Return the number of the replica with a name; None: another process has that name."""
    number = name.removeprefix(_REPLICA)
    return int(number) if number != name and number.isdecimal() else None


def placed_replica(config: RunConfig, config_file: Path, index: int) -> ServiceSpec:
    """Return one replica on a node of a cluster; placement adds its address and devices."""
    return _replica_spec(config, config_file, replica_name(index))


def rollout_service(config: RunConfig, config_file: Path, index: int) -> ServiceSpec:
    """Return one replica on this machine, with its share of the devices."""
    spec = placed_replica(config, config_file, index)
    return _with_variables(spec, replica_environment(config, index, os.environ))


def replica_in_container(
    config: RunConfig, config_file: Path, name: str, address: str, devices: Mapping[str, str]
) -> ServiceSpec:
    """Return a replica that has a container to itself.

    Args:
        config_file: where the replica reads the same configuration.
        name: unique in the fleet.
        address: its host as peers reach it.
        devices: variables of its devices.
    """
    spec = _replica_spec(config, config_file, name, f"sluice.rollout.endpoint.advertise={address}")
    return _with_variables(spec, devices)


def _with_variables(spec: ServiceSpec, variables: Mapping[str, str]) -> ServiceSpec:
    return replace(spec, environment={**spec.environment, **variables})


def _replica_spec(config: RunConfig, config_file: Path, name: str, *overrides: str) -> ServiceSpec:
    return ServiceSpec(
        name,
        _module_command(
            "services.rollout", "--config", str(config_file), "--name", name, *overrides
        ),
        {"OMP_NUM_THREADS": str(config.sluice.rollout.torch_threads)},
        restarts=replace(RESTARTS_AFTER_ERRORS_TOO, stable_s=longest_start_s(config)),
    )


def _configured_ports(config: RunConfig) -> frozenset[int]:
    return frozenset(port for _, _, port in configured_ports(config.sluice))


def _module_command(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)
