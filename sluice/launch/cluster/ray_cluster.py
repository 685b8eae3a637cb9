"""A Ray cluster as a launcher uses it. The only file that imports Ray (the extra `ray`).

Groups are placement groups, hosts are actors in them. Neither is detached: Ray ends them with this
process, however it ends, and the services end with their actors.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sluice.errors import ConfigError, PeerDefectError, PeerError
from sluice.launch.cluster.nodes import ServiceHost
from sluice.launch.cluster.placement import (
    CPU,
    GPU,
    MEMORY,
    HostLostError,
    NodeCapacity,
    PlacedProcess,
    Placement,
    PlacementPlan,
    Resources,
)

_SLICE_S = 1.0


class RayServiceHost(ServiceHost):
    """A host whose node's address is Ray's."""

    def __init__(self) -> None:
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        super().__init__(str(addresses[node_id]))


class RayHost:
    """Calls to one actor."""

    def __init__(self, name: str, actor: Any) -> None:  # noqa: ANN401 Ray's own types are partial
        self._name = name
        self.actor = actor

    async def call(self, method: str, /, *arguments: object) -> Any:  # noqa: ANN401
        """Call a method, and return what it returns.

        Raises:
            PeerError: the actor is restarting.
            HostLostError: it is permanently dead.
            PeerDefectError: the method raised an exception; the actor lives.
        """
        from ray import exceptions

        peer, phase = f"host of {self._name}", f"in its call {method}"
        try:
            return await getattr(self.actor, method).remote(*arguments)
        except exceptions.ActorUnavailableError as error:
            raise PeerError(peer, phase, _first_line(error)) from error
        except exceptions.RayActorError as error:
            if self._is_dead():
                raise HostLostError(peer, phase, _error_text(error)) from error
            raise PeerError(peer, phase, _first_line(error)) from error
        except exceptions.RayTaskError as error:
            raise PeerDefectError(peer, phase, _error_text(error)) from error
        except exceptions.RayError as error:
            raise HostLostError(peer, phase, str(error)) from error

    def send(self, method: str, /, *arguments: object) -> None:
        """Call a method and do not wait."""
        getattr(self.actor, method).remote(*arguments)

    def _is_dead(self) -> bool:
        from ray._private.state import actors

        state = actors(actor_id=self.actor._actor_id.hex())
        return str(state.get("State", "DEAD")) == "DEAD"


class RayCluster:
    """The cluster that this process is connected to; see `Cluster` and `ray_cluster`."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}
        self._hosts: dict[str, list[RayHost]] = {}
        # Names of actors have to be unique among all runs.
        self._run = uuid.uuid4().hex[:8]

    def resources(self) -> Resources:
        import ray

        return {str(name): float(amount) for name, amount in ray.cluster_resources().items()}

    def nodes(self) -> Sequence[NodeCapacity]:
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        node_capacities = [
            NodeCapacity(
                str(node["NodeManagerAddress"]), node["Resources"], free.get(node["NodeID"], {})
            )
            for node in ray.nodes()
            if node["Alive"]
        ]
        return sorted(node_capacities, key=lambda capacity: capacity.address)

    def reserve(self, plan: PlacementPlan) -> Sequence[Placement]:
        """Create a placement group, and an actor in it for each member."""
        from ray.util import placement_group

        group = placement_group(
            [dict(bundle) for bundle in plan.bundles],
            strategy=plan.strategy,
            name=f"sluice-{self._run}-{plan.name}",
        )
        self._groups[plan.name] = group
        hosts = [RayHost(member.name, self._create_actor(group, member)) for member in plan.members]
        self._hosts[plan.name] = hosts
        return [
            Placement(member.name, plan, host)
            for member, host in zip(plan.members, hosts, strict=True)
        ]

    async def is_reserved(self, plan: PlacementPlan, seconds: float) -> bool:
        group = self._groups[plan.name]
        until_s = asyncio.get_running_loop().time() + seconds
        while not await asyncio.to_thread(group.wait, timeout_seconds=_SLICE_S):
            if asyncio.get_running_loop().time() > until_s:
                return False
        return True

    def release(self, plan: PlacementPlan) -> None:
        """Kill the actors, which ends what they run, and remove the group."""
        import ray
        from ray.util import remove_placement_group

        for host in self._hosts.pop(plan.name, []):
            ray.kill(host.actor, no_restart=True)
        if (group := self._groups.pop(plan.name, None)) is not None:
            remove_placement_group(group)

    def _create_actor(self, group: Any, member: PlacedProcess) -> Any:  # noqa: ANN401
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # Ray takes these three as options, and refuses them among the others.
        custom = {
            name: amount
            for name, amount in member.resources.items()
            if name not in (CPU, GPU, MEMORY)
        }
        actor_class: Any = ray.remote(RayServiceHost)
        return actor_class.options(
            name=f"sluice-{self._run}-{member.name}",
            num_cpus=member.resources.get(CPU, 0),
            num_gpus=member.resources.get(GPU, 0),
            memory=member.resources.get(MEMORY),
            resources=custom,
            # Ray keeps the host alive; what it runs is started again by its specification.
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=member.bundle
            ),
        ).remote()


@contextmanager
def ray_cluster(address: str) -> Iterator[RayCluster]:
    """Connect to a cluster while the block runs.

    Args:
        address: host:port of its head; `auto`: the one that this machine is a node of, or that
            RAY_ADDRESS names.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(f"Ray: {error}; install it with pip install 'sluice[ray]'") from error
    try:
        ray.init(address=address, log_to_driver=False, namespace="sluice")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"Ray: no cluster answers at {address!r} ({_first_line(error)}); start one with "
            "deploy/ray/start_node.sh on each machine and run this on one of them; a cluster that "
            "requires a token (RAY_AUTH_MODE=token) needs the same one here (RAY_AUTH_TOKEN)"
        ) from error
    try:
        yield RayCluster()
    finally:
        ray.shutdown()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _error_text(error: BaseException) -> str:
    """Return what Ray reports about an actor's death, without the actor's particulars."""
    lines = str(error).strip().splitlines()
    return " ".join(dict.fromkeys((lines[0], lines[-1])))
