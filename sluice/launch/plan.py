"""Before the start: load a reward function once, make paths absolute, plan the processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from sluice.config.run import RunConfig
from sluice.config.schema.reward import RewardConfig
from sluice.config.schema.section import Section
from sluice.config.schema.security import FILE_FIELDS
from sluice.errors import ConfigError, DeadlineError
from sluice.launch.processes.child import ProcessHost, ThisMachine
from sluice.launch.service_spec import ServiceSpec, local_services, rollout_service

COMMAND = ("-m", "services.reward.scorer_check")
PartT = TypeVar("PartT", bound=Section)
TIMEOUT_S = 90.0  # above the check's own deadline

_PATHS = (
    "actor_rollout_ref.model.path",
    "critic.model.path",
    "data.train_files",
    "data.val_files",
    "reward.custom_reward_function.path",
    "trainer.default_local_dir",
    "trainer.resume_from_path",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "sluice.run_dir",
    *(f"sluice.security.{name}" for name in FILE_FIELDS),
)
_PACKAGE, _FILE = "pkg://", "file://"


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


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths.

    Other commands, and processes on other nodes, have another working directory.
    """
    for key in _PATHS:
        config = _with_absolute(config, key.split("."))
    return config


def _with_absolute(section: PartT, names: Sequence[str]) -> PartT:
    name, *below = names
    value = getattr(section, name)
    changed = _with_absolute(value, below) if below else _absolute(value)
    return msgspec.structs.replace(section, **{name: changed})


def _absolute(path: str | list[str] | None) -> str | list[str] | None:
    if isinstance(path, list):
        return [str(_absolute(one)) for one in path]
    if not path or path.startswith(_PACKAGE):
        return path
    return str(Path(path.removeprefix(_FILE)).absolute())


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A run before its start.

    Args:
        config: with the addresses of its services.
        specs: its processes, in the order of their start.
        make_replica: the specification of the replica with a number.
        host: starts processes.
    """

    config: RunConfig
    specs: tuple[ServiceSpec, ...]
    make_replica: Callable[[int], ServiceSpec]
    host: ProcessHost


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
