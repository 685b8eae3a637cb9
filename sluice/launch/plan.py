"""Before the start: make paths absolute, plan the processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from sluice.config.loading.conversions import PATH_KEYS
from sluice.config.run import RunConfig
from sluice.config.schema.data import FileList, file_list
from sluice.config.schema.section import Section
from sluice.device.host import device_numbers, gpu_numbers
from sluice.launch.processes.child import ProcessHost, ThisMachine
from sluice.launch.processes.forking import ForkingMachine
from sluice.launch.service_spec import ServiceSpec, local_services, rollout_service

PartT = TypeVar("PartT", bound=Section)

# What takes long to import of a trainer and of a replica with the embedded engine.
_FORKED = ("services.trainer", "services.rollout")
_OF_REPLICAS = ("services.rollout.__main__", "services.rollout.engines.embedded.engine")
_OF_TRAINER = ("services.trainer.leader",)
_PACKAGE, _FILE = "pkg://", "file://"


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths, and a pattern's data files in its place.

    Other commands, and processes on other nodes, have another working directory. A run keeps the
    rows that it started with, whatever is added to a folder.
    """
    for key in PATH_KEYS:
        config = _with_absolute(config, key.split("."))
    sources = {
        name: _with_absolute(source, ["files"]) for name, source in config.sluice.sources.items()
    }
    replace = msgspec.structs.replace
    sources = {
        name: replace(part, files=_matched_files(part.files)) for name, part in sources.items()
    }
    data = config.data
    data = replace(
        data, train_files=_matched_files(data.train_files), val_files=_matched_files(data.val_files)
    )
    return replace(config, data=data, sluice=replace(config.sluice, sources=sources))


def _matched_files(files: FileList | None) -> FileList | None:
    matches = file_list(files)
    return files if matches == ([files] if isinstance(files, str) else files or []) else matches


def _with_absolute(section: PartT, names: Sequence[str]) -> PartT:
    name, *below = names
    value = getattr(section, name)
    changed = _with_absolute(value, below) if below else _absolute_path(value)
    return msgspec.structs.replace(section, **{name: changed})


def _absolute_path(path: str | list[str] | None) -> str | list[str] | None:
    if isinstance(path, list):
        return [str(_absolute_path(item)) for item in path]
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
    """Return the plan of a run on this machine."""
    return LaunchPlan(
        config,
        local_services(config, config_file),
        lambda number: rollout_service(config, config_file, number),
        this_machine(config),
    )


def this_machine(config: RunConfig, environment: Mapping[str, str] = os.environ) -> ProcessHost:
    """Return what starts the processes: by forks, where all compute on the CPU with torch."""
    has_devices = gpu_numbers(environment) or device_numbers(environment)
    is_embedded = config.actor_rollout_ref.rollout.name == "torch"
    if has_devices or not is_embedded or not sys.platform.startswith("linux"):
        return ThisMachine()
    imports: tuple[str, ...] = _OF_REPLICAS
    threads = config.sluice.rollout.torch_threads
    if not config.sluice.evaluation.benchmarks:
        imports, threads = (*_OF_TRAINER, *imports), config.sluice.trainer.torch_threads
    return ForkingMachine(_FORKED, imports, threads)
