"""The node's side of a service: prepare the node, and host the service's process, in an actor.

A specification is made where the run is launched. Its node determines the Python that runs it, the
address for its peers, the variables of its devices and the paths that it opens; a host process
there reports them to the launcher.

The host decides nothing. The launcher decides what starts and when it ends, and fetches output and
exit code by calls that wait. When this host dies, the kernel ends the process with it; a restarted
host reports such a process as ended by SIGKILL.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from sluice import UNINSTALLED, own_version
from sluice.config.addresses import bare_host
from sluice.config.loading.loader import load_config
from sluice.config.loading.override_values import format_override_value
from sluice.config.run import RunConfig
from sluice.config.schema.service import FILE_FIELDS, EndpointConfig
from sluice.config.sources import prompt_files
from sluice.device.host import launch_environment
from sluice.errors import ConfigError
from sluice.launch.network_layout import Kind
from sluice.launch.processes.child import LocalChild, start_child
from sluice.launch.service_spec import ServiceSpec, free_ports
from sluice.whole_file import write_whole

# Lines that arrive together are sent together.
_GATHER_S = 0.02

_EVERY_INTERFACE = {"0.0.0.0", "::"}  # noqa: S104 recognised, not bound


def paths_of(kind: Kind, config: RunConfig) -> dict[str, str]:
    """Return the paths that must exist before a service starts, by the key that names each."""
    return dict(_paths(kind, config))


def missing_paths(paths: Mapping[str, str]) -> list[str]:
    """Return the paths that are missing on this node, as ``key = path``."""
    return [f"{key} = {path}" for key, path in paths.items() if not Path(path).exists()]


def _paths(kind: Kind, config: RunConfig) -> Iterator[tuple[str, str]]:
    if kind != "reward":
        yield "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
    if kind == "trainer":
        if config.trainer.resume_mode == "resume_path" and config.trainer.resume_from_path:
            yield "trainer.resume_from_path", config.trainer.resume_from_path
        if config.critic.model.path:
            yield "critic.model.path", config.critic.model.path
    if kind == "reward":
        for key, files in prompt_files(config).items():
            yield from ((f"{key}[{number}]", file) for number, file in enumerate(files))
        path = config.reward.custom_reward_function.path
        if path and not path.startswith("pkg://"):
            yield "reward.custom_reward_function.path", path
        turns = config.actor_rollout_ref.rollout.multi_turn
        played = {
            "sluice.environment.path": config.sluice.environment.path,
            "actor_rollout_ref.rollout.multi_turn.function_tool_path": turns.function_tool_path,
            "actor_rollout_ref.rollout.multi_turn.tool_config_path": turns.tool_config_path,
        }
        yield from ((key, file) for key, file in played.items() if file)
    for name in FILE_FIELDS:
        if path := getattr(config.sluice.security, name):
            yield f"sluice.security.{name}", path


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """A service that a node must prepare for.

    Args:
        kind: the kind of the service.
        config_file: the service's path to its configuration.
        config_text: the configuration, for nodes that do not see that file.
        mark_file: a file of the run's folder, which only nodes that share the folder see.
        version: of this package where the run is launched.
    """

    kind: Kind
    config_file: str
    config_text: str
    mark_file: str
    version: str = field(default_factory=own_version)


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The state of a node, as found for a service.

    Args:
        address: the address for peers.
        python: the program that runs the service.
        environment: variables that its devices need.
        problems: why the service cannot run there; each names the missing thing.
    """

    address: str
    python: str
    environment: Mapping[str, str]
    problems: tuple[str, ...]


def prepare_node(plan: ServicePlan, address: str) -> NodeStatus:
    """Prepare this node for a service, which includes writing the configuration."""
    problems = [_version_problem(plan), _sharing_problem(plan)]
    environment: dict[str, str] = {}
    try:
        config = _write_config(plan)
    except OSError as error:
        problems.append(f"{plan.config_file} cannot be written ({error.strerror or error})")
    else:
        missing = missing_paths(paths_of(plan.kind, config))
        problems += [f"{path} does not exist" for path in missing]
        endpoint = endpoint_on(getattr(config.sluice, plan.kind).endpoint, address)
        devices = {
            "trainer": config.trainer.device,
            "rollout": config.sluice.rollout.device,
            "reward": "cpu",
        }
        environment = launch_environment(config, devices[plan.kind], endpoint, os.environ)
    return NodeStatus(address, sys.executable, environment, tuple(filter(None, problems)))


def spec_on(spec: ServiceSpec, kind: Kind, config: RunConfig, facts: NodeStatus) -> ServiceSpec:
    """Return the specification of a service for its node.

    A replica listens at its node's address; trainer and reward service have theirs in the
    configuration, since all others find them by it.
    """
    command = (facts.python, *spec.command[1:])
    if kind == "rollout":
        endpoint = msgspec.structs.replace(config.sluice.rollout.endpoint, advertise=None)
        node_endpoint = endpoint_on(endpoint, facts.address)
        key = "sluice.rollout.endpoint"
        settings = {"host": node_endpoint.host, "advertise": node_endpoint.advertise}
        command += tuple(
            f"{key}.{name}={format_override_value(value)}" for name, value in settings.items()
        )
    return replace(spec, command=command, environment={**facts.environment, **spec.environment})


def endpoint_on(endpoint: EndpointConfig, address: str) -> EndpointConfig:
    """Return an endpoint of a service on the node with that address.

    It listens only there, unless it is configured to listen on every interface.
    """
    if bare_host(endpoint.host) in _EVERY_INTERFACE:
        return msgspec.structs.replace(endpoint, advertise=endpoint.advertise or address)
    return msgspec.structs.replace(endpoint, host=address)


def _version_problem(plan: ServicePlan) -> str:
    version = own_version()
    if version == UNINSTALLED:
        return "sluice runs from a source tree, whose version is unknown; install it on every node"
    if version == plan.version:
        return ""
    return f"sluice {version} is installed, and the run has {plan.version}"


def _sharing_problem(plan: ServicePlan) -> str:
    if plan.kind == "rollout" or Path(plan.mark_file).is_file():
        return ""
    return (
        f"sluice.run_dir = {Path(plan.config_file).parent} is another folder there, and the "
        f"{plan.kind} service keeps its state in it; mount the same one"
    )


def _write_config(plan: ServicePlan) -> RunConfig:
    """Write the configuration unless the file holds it already; return it."""
    file = Path(plan.config_file)
    if not file.is_file() or file.read_text(encoding="utf-8") != plan.config_text:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, plan.config_text.encode())
    return load_config(file, ())


class ServiceHost:
    """Hosts at most one process.

    Args:
        address: this node's address for peers.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._child: LocalChild | None = None
        self._starting = asyncio.Lock()

    async def place(self, num_ports: int) -> tuple[str, list[int]]:
        """Return the address of the node, and free ports there."""
        return self._address, free_ports([self._address] * num_ports)

    async def look(self, plan: bytes) -> bytes:
        """Prepare the node for a service; take a `ServicePlan` and return `NodeStatus`, as JSON."""
        service = msgspec.json.decode(plan, type=ServicePlan)
        return msgspec.json.encode(prepare_node(service, self._address))

    async def start(
        self, name: str, command: list[str], environment: dict[str, str]
    ) -> tuple[int, str]:
        """Start a process, replacing one that may be left; return its id, or 0 and the reason."""
        async with self._starting:  # a call whose answer was lost is repeated, perhaps beside it
            if self._child is not None:
                await self._child.end(0.0)
                if not self._child.has_ended:
                    pid = self._child.pid
                    return 0, f"process {pid}, started before, does not end after SIGKILL"
            try:
                self._child = await start_child(ServiceSpec(name, tuple(command), environment))
            except ConfigError as error:
                return 0, str(error)
            return self._child.pid, ""

    async def lines(self, pid: int) -> tuple[list[str], bool]:
        """Return its next lines of output, and whether they were the last; for one caller only."""
        child = self._child_of(pid)
        if child is None:
            return [], True
        lines: list[str] = []
        has_line = asyncio.Event()

        async def read() -> None:
            async for line in child.lines():
                lines.append(line)
                has_line.set()

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read(), name="output")
            waiting = tasks.create_task(has_line.wait(), name="first line")
            await asyncio.wait([reading, waiting], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([reading], timeout=_GATHER_S)
            is_over = reading.done()
            reading.cancel()
            waiting.cancel()
        return lines, is_over

    async def ended(self, pid: int) -> int:
        """Return its exit code, once it has one."""
        child = self._child_of(pid)
        return -signal.SIGKILL if child is None else await child.wait()

    async def terminate(self, pid: int) -> None:
        """Send SIGTERM to the process."""
        child = self._child_of(pid)
        if child is not None:
            with suppress(ProcessLookupError):
                child.terminate()

    async def kill(self, pid: int) -> None:
        """Send SIGKILL to the process and all processes that it started."""
        child = self._child_of(pid)
        if child is not None:
            child.kill()

    def _child_of(self, pid: int) -> LocalChild | None:
        child = self._child
        return child if child is not None and child.pid == pid else None
