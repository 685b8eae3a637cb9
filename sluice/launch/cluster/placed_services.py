"""Run a launcher's processes on the nodes of a cluster, each hosted by a `ServiceHost` there.

It waits for resources, hosts, and files that nodes lack. Before the run begins a failure is an
error that names what each node lacks; later it is a repeated warning, while the others continue.
The cluster restarts a host that died, on another node if its own is lost. A replica whose host is
permanently dead, or broken, gives its resources back and gets others. A trainer or reward service
then ends the run, because the others know them by their address.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sluice.concurrency.waits import deadline
from sluice.config.loading.yaml_text import dump_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError, PeerDefectError, PeerError
from sluice.launch.cluster.nodes import NodeStatus, ServicePlan, spec_on
from sluice.launch.cluster.placement import (
    Cluster,
    HostCalls,
    HostLostError,
    Placement,
    PlacementPlan,
    shortage,
)
from sluice.launch.network_layout import Kind
from sluice.launch.processes.child import Child
from sluice.launch.service_spec import ServiceSpec

logger = logging.getLogger(__name__)

_RETRY_S, _LOOK_AGAIN_S, _REMIND_S = 0.5, 10.0, 30.0
# Longer than a network hiccup: by then the process has ended with its host, or its node is lost.
_SILENCE_S = 10.0

# Errors of a host that a retry does not fix.
_UNFIT = (HostLostError, PeerDefectError)


class RemoteChild(Child):
    """A process hosted on another node; if the host dies, the process dies with it."""

    def __init__(self, name: str, pid: int, host: HostCalls) -> None:
        super().__init__(name, pid)
        self._host = host
        self._code: int | None = None
        self._asking = asyncio.Lock()

    @property
    def has_ended(self) -> bool:
        return self._code is not None

    async def lines(self) -> AsyncIterator[str]:
        while True:
            try:
                lines, is_over = await self._host.call("lines", self.pid)
            except HostLostError:
                return
            except PeerError:
                if self.has_ended:
                    return
                # Try again: the process blocks in its next line once the pipe is full.
                await asyncio.sleep(_RETRY_S)
                continue
            for line in lines:
                yield str(line)
            if is_over:
                return

    async def wait(self) -> int:
        async with self._asking:
            if self._code is None:
                self._code = await self._exit_code()
            return self._code

    def terminate(self) -> None:
        self._host.send("terminate", self.pid)

    def _send_kill(self) -> None:
        self._host.send("kill", self.pid)

    async def _exit_code(self) -> int:
        """Return the exit code; minus SIGKILL if its host is lost, since it ended with the host."""
        silent_since_s: float | None = None
        while True:
            asked_s = time.monotonic()
            try:
                return int(await self._host.call("ended", self.pid))
            except HostLostError as error:
                logger.warning("%s", error)
                return -signal.SIGKILL
            except PeerError as error:
                now_s = time.monotonic()
                if silent_since_s is None or now_s - asked_s > _SILENCE_S:
                    silent_since_s = now_s
                    logger.warning("%s", error)
                if now_s - silent_since_s > _SILENCE_S:
                    return -signal.SIGKILL
            await asyncio.sleep(_RETRY_S)


@dataclass(frozen=True, slots=True)
class NodePorts:
    """The node that a host is on, with free ports of its address."""

    address: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """The configuration of a run as its services receive it.

    Args:
        config: the configuration with the addresses of trainer and reward service.
        file: its path on every node.
        mark: a file of the run's folder, which only nodes that share the folder see.
        variables: environment variables of the launcher that its services need too.
    """

    config: RunConfig
    file: Path
    mark: Path
    variables: dict[str, str] = field(default_factory=dict, repr=False)

    def plan(self, kind: Kind) -> ServicePlan:
        """Return the plan of a service of that kind."""
        text = dump_config(self.config)
        return ServicePlan(kind, str(self.file), text, str(self.mark))


class PlacedServices:
    """The hosts of a run's processes, by process name.

    Args:
        cluster: gives them resources.
        plan_of: returns the plan of a service that is added while the run is active.
        patience_s: seconds for the placement of the first processes, and for a host's answer.
    """

    def __init__(
        self, cluster: Cluster, plan_of: Callable[[str], PlacementPlan], patience_s: float
    ) -> None:
        self._cluster = cluster
        self._plan_of = plan_of
        self._patience_s = patience_s
        self._placements: dict[str, Placement] = {}
        self._addresses: dict[str, str] = {}
        self._shared: SharedConfig | None = None

    async def place(self, plans: Sequence[PlacementPlan], advice: str = "") -> None:
        """Reserve resources for all processes that the run begins with.

        Args:
            plans: in the order of start.
            advice: of the error; the split that the cluster has devices for.

        Raises:
            ConfigError: resources are lacking; the error names resource and node.
        """
        for plan in plans:
            self._reserve(plan)
        until_s = asyncio.get_running_loop().time() + self._patience_s
        for plan in plans:
            left_s = max(0.0, until_s - asyncio.get_running_loop().time())
            if not await self._cluster.is_reserved(plan, left_s):
                raise ConfigError(
                    f"no capacity in the Ray cluster within {self._patience_s:g} s: "
                    f"{shortage(plan, self._cluster.nodes())}\n{advice}".rstrip()
                )

    async def node_of(self, name: str, num_ports: int) -> NodePorts:
        """Return the node that will run a service.

        Raises:
            ConfigError: its host cannot be started there.
            DeadlineError: it does not answer.
        """
        placement = self._placements[name]
        async with deadline(
            self._patience_s,
            peer=f"host of {name}",
            phase="starting on its node",
            remedy="Ray starts it with the Python and the runtime environment of that node",
        ):
            while True:
                try:
                    address, ports = await placement.host.call("place", num_ports)
                except _UNFIT as error:
                    raise ConfigError(f"{error}; is sluice installed there?") from error
                except PeerError:
                    await asyncio.sleep(_RETRY_S)
                    continue
                return NodePorts(address, tuple(ports))

    async def prepare(self, shared: SharedConfig) -> None:
        """Prepare every node for its service.

        Raises:
            ConfigError: nodes lack something; the error names all of them, with paths.
            DeadlineError: a host does not answer.
        """
        self._shared = shared
        lacking: list[str] = []
        for name, placement in self._placements.items():
            async with deadline(self._patience_s, peer=f"host of {name}", phase="looking around"):
                try:
                    facts = await self._node_status(placement)
                except _UNFIT as error:
                    raise ConfigError(str(error)) from error
            if placement.plan.kind != "rollout":
                self._addresses[name] = facts.address
            lacking += [f"\n  {facts.address} ({name}): {problem}" for problem in facts.problems]
        if lacking:
            raise ConfigError(f"nodes are not ready for their services:{''.join(lacking)}")

    async def start(self, spec: ServiceSpec) -> RemoteChild:
        """Start a process on its node; first place a process that is added later.

        A replica that its node cannot run is placed again, after a pause and with a warning.

        Raises:
            ConfigError: it can never be started so.
        """
        while True:
            placement = (
                self._placements.get(spec.name) or self._reserve(self._plan_of(spec.name))[0]
            )
            try:
                return await self._start_on(placement, spec)
            except _UNFIT as error:
                if placement.plan.kind != "rollout":
                    raise ConfigError(str(error)) from error
                logger.warning(
                    "%s; %s is placed again in %g s, the others continue",
                    error,
                    spec.name,
                    _LOOK_AGAIN_S,
                )
            self.release(spec.name)
            await asyncio.sleep(_LOOK_AGAIN_S)

    def release(self, name: str) -> None:
        """Release the resources of a service and its group."""
        placement = self._placements.pop(name, None)
        if placement is not None and not any(
            other_placement.plan.name == placement.plan.name
            for other_placement in self._placements.values()
        ):
            self._cluster.release(placement.plan)

    def close(self) -> None:
        """Release everything."""
        for name in list(self._placements):
            self.release(name)

    def _reserve(self, plan: PlacementPlan) -> Sequence[Placement]:
        placements = self._cluster.reserve(plan)
        self._placements |= {placement.name: placement for placement in placements}
        return placements

    async def _start_on(self, placement: Placement, spec: ServiceSpec) -> RemoteChild:
        """Start a process on a node once the node is ready for it."""
        assert self._shared is not None, "prepare comes first"
        while True:
            facts = await self._wait_until_ready(placement)
            self._refuse_move(spec.name, facts)
            node_spec = spec_on(spec, placement.plan.kind, self._shared.config, facts)
            variables = {**self._shared.variables, **node_spec.environment}
            try:
                pid, problem = await placement.host.call(
                    "start", spec.name, list(node_spec.command), variables
                )
            except _UNFIT:
                raise
            except PeerError as error:
                logger.warning("%s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            if problem:
                raise PeerDefectError(facts.address, f"starting {spec.name}", problem)
            return RemoteChild(spec.name, pid, placement.host)

    async def _wait_until_ready(self, placement: Placement) -> NodeStatus:
        """Return the facts of a node that has everything the service needs, once there is one."""
        while True:
            while not await self._cluster.is_reserved(placement.plan, _REMIND_S):
                missing = shortage(placement.plan, self._cluster.nodes())
                logger.warning("%s waits for capacity: %s", placement.name, missing)
            try:
                async with asyncio.timeout(self._patience_s):
                    facts = await self._node_status(placement)
            except TimeoutError:
                logger.warning("%s: its host does not answer", placement.name)
                continue
            if not facts.problems:
                return facts
            for problem in facts.problems:
                logger.warning("%s cannot run on %s: %s", placement.name, facts.address, problem)
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _node_status(self, placement: Placement) -> NodeStatus:
        """Return the facts that the host finds, once it answers.

        Raises:
            HostLostError, PeerDefectError: it will never answer.
        """
        assert self._shared is not None
        plan = msgspec.json.encode(self._shared.plan(placement.plan.kind))
        while True:
            try:
                facts = await placement.host.call("look", plan)
                return msgspec.json.decode(facts, type=NodeStatus)
            except _UNFIT:
                raise
            except PeerError:  # it is being started
                await asyncio.sleep(_RETRY_S)

    def _refuse_move(self, name: str, facts: NodeStatus) -> None:
        old_address = self._addresses.get(name, facts.address)
        if old_address != facts.address:
            raise ConfigError(
                f"{name}: its node {old_address} is lost, and on {facts.address} the other "
                "services would not find it; start the run again, it resumes from its last "
                "checkpoint (trainer.save_freq, trainer.resume_mode=auto)"
            )
