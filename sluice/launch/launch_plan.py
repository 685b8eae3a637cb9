"""All that a supervisor needs to know of a run, wherever its processes are going to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sluice.config.checks import fixed_ports
from sluice.config.run import RunConfig
from sluice.launch.process_host import ProcessHost, ThisMachine
from sluice.launch.service_spec import ServiceSpec, local_services, rollout_service


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A run that is about to be started.

    Args:
        config: with the addresses at which its services are found.
        specs: its processes, in the order of their start.
        make_replica: the specification of the replica with a number.
        host: starts processes.
    """

    config: RunConfig
    specs: tuple[ServiceSpec, ...]
    make_replica: Callable[[int], ServiceSpec]
    host: ProcessHost

    @property
    def has_fixed_port(self) -> bool:
        """Whether all replicas would listen on the same port, or answer probes there."""
        return bool(fixed_ports(self.config.sluice.rollout))


def local_plan(config: RunConfig, config_file: Path) -> LaunchPlan:
    """A run on this machine.

    Args:
        config: with ports.
        config_file: where the processes read the same configuration.
    """
    return LaunchPlan(
        config,
        local_services(config, config_file),
        lambda number: rollout_service(config, config_file, number),
        ThisMachine(),
    )
