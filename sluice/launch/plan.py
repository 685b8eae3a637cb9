"""Before the start: load a custom reward function once, and plan the processes of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sluice.config.rules.checks import fixed_ports
from sluice.config.run import RunConfig
from sluice.config.schema.reward import RewardConfig
from sluice.errors import ConfigError, DeadlineError
from sluice.launch.processes.child import ProcessHost, ThisMachine
from sluice.launch.service_spec import ServiceSpec, local_services, rollout_service

COMMAND = ("-m", "services.reward.scorer_check")
TIMEOUT_S = 90.0  # above the check's own deadline


def check_reward_function(reward: RewardConfig) -> None:
    """Load the configured function in a process of its own, under a scorer's limits.

    Raises:
        ConfigError: it cannot be loaded; names file, function and the Python error.
        DeadlineError: loading does not end.
    """
    function = reward.custom_reward_function
    if function.path is None:
        return
    kwargs = json.dumps(function.reward_kwargs)
    command = [sys.executable, *COMMAND, function.path, function.name, kwargs]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError("custom reward function", "loading it", TIMEOUT_S) from error
    if ended.returncode != 0:
        raise ConfigError(ended.stderr.strip().removeprefix("sluice: ERROR "))


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
        """Return whether all replicas would listen on the same port, or answer probes there."""
        return bool(fixed_ports(self.config.sluice.rollout))


def local_plan(config: RunConfig, config_file: Path) -> LaunchPlan:
    """Return the plan of a run on this machine.

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
