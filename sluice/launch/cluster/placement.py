"""The resources of each process of a run, and the interface of a cluster that provides them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from sluice.config.derived import replica_devices
from sluice.config.run import RunConfig
from sluice.errors import ConfigError, PeerError
from sluice.launch.network_layout import KINDS, Kind
from sluice.launch.service_spec import REWARD, rank_name, replica_name

Resources = Mapping[str, float]
Demands = Mapping[Kind, Resources]
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

CPU, GPU, NPU = "CPU", "GPU", "NPU"
MEMORY = "memory"
"""Memory in bytes, by Ray's name."""
# Resources that Ray keeps for itself.
_RAYS_OWN = ("object_store_memory", "bundle")
_RESOURCE_OF = {"cuda": GPU, "npu": NPU}


@dataclass(frozen=True, slots=True)
class PlacedProcess:
    """A process of a group: its bundle, and the resources that it takes from the bundle."""

    name: str
    bundle: int
    resources: Resources


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """One group.

    Args:
        name: unique in the run.
        kind: the kind of its processes.
        bundles: the resources of each bundle.
        strategy: how the bundles are placed on nodes.
        members: the processes.
    """

    name: str
    kind: Kind
    bundles: tuple[Resources, ...]
    strategy: Strategy
    members: tuple[PlacedProcess, ...]


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """A live node: its address, and the total and free amount of each resource."""

    address: str
    total: Resources
    free: Resources


def accelerator(device: str | None, cluster: Resources) -> str | None:
    """Return the resource that a process with this ``device`` key takes; None for CPUs.

    Args:
        device: as configured; None or ``auto`` takes what the cluster has, and NPUs first.
        cluster: resources of all nodes.
    """
    if device is None or device == "auto":
        return next((name for name in (NPU, GPU) if cluster.get(name, 0.0) >= 1), None)
    return _RESOURCE_OF.get(device.partition(":")[0])


def plans(config: RunConfig, cluster: Resources, extra: Demands) -> tuple[PlacementPlan, ...]:
    """Return the groups of a run, in the order of its processes' start.

    Args:
        cluster: resources of all nodes, for device keys that take the available device.
        extra: resources that each process of a kind takes too, or in place of the same ones.
    """
    replicas = range(config.sluice.rollout.replicas)
    return (
        reward_plan(extra),
        trainer_plan(config, cluster, extra),
        *(replica_plan(config, cluster, extra, number) for number in replicas),
    )


def reward_plan(extra: Demands) -> PlacementPlan:
    """Return the group of the reward service.

    Raises:
        ConfigError: nothing is left of what it takes; as the other plans.
    """
    return _single_process_plan(REWARD, "reward", _demand("reward", {CPU: 1.0}, extra))


def trainer_plan(config: RunConfig, cluster: Resources, extra: Demands) -> PlacementPlan:
    """Return the trainer's group: a bundle per node, with all ranks of that node."""
    base = _compute_demand(
        config.sluice.trainer.torch_threads, accelerator(config.trainer.device, cluster), 1
    )
    per_rank = _demand("trainer", base, extra)
    nodes, per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
    per_node_total = {name: amount * per_node for name, amount in per_rank.items()}
    members = tuple(
        PlacedProcess(rank_name(rank), rank // per_node, per_rank)
        for rank in range(nodes * per_node)
    )
    strategy: Strategy = "STRICT_PACK" if nodes == 1 else "STRICT_SPREAD"
    return PlacementPlan("trainer", "trainer", (per_node_total,) * nodes, strategy, members)


def replica_plan(
    config: RunConfig, cluster: Resources, extra: Demands, number: int
) -> PlacementPlan:
    """Return the group of a replica, which comes and goes independently."""
    kind = accelerator(config.sluice.rollout.device, cluster)
    base = _compute_demand(config.sluice.rollout.torch_threads, kind, replica_devices(config))
    return _single_process_plan(replica_name(number), "rollout", _demand("rollout", base, extra))


def parse_demands(entries: Iterable[str]) -> dict[Kind, dict[str, float]]:
    """Return resources by kind of service, from ``rollout=NPU:8`` and the like.

    Raises:
        ConfigError: an entry has another form, or names a resource that Ray reserves.
    """
    demands: dict[Kind, dict[str, float]] = {}
    for text in entries:
        service, _, demand = text.partition("=")
        name, _, amount = demand.rpartition(":")
        kind = next((candidate for candidate in KINDS if candidate == service), None)
        if kind is None or not name or not _is_amount(amount):
            raise ConfigError(
                f"resources {text!r}: write SERVICE=RESOURCE:AMOUNT, such as rollout=NPU:8 or "
                f"trainer=big_memory:1; services are {', '.join(KINDS)}"
            )
        if name in _RAYS_OWN:
            raise ConfigError(
                f"resources {text!r}: Ray keeps {name} for itself; take it out, or ask for "
                f"{kind}={MEMORY}:BYTES"
            )
        demands.setdefault(kind, {})[name] = float(amount)
    return demands


def shortage(plan: PlacementPlan, nodes: Sequence[NodeCapacity]) -> str:
    """Return the resource that keeps a group from being placed, and the node that lacks it."""
    largest_bundle = max(plan.bundles, key=lambda bundle: sum(bundle.values()))
    apart = len(plan.bundles) if plan.strategy == "STRICT_SPREAD" else 1
    node_capacities = [_shortfall(largest_bundle, node) for node in nodes]
    fitting = sum(not missing for missing in node_capacities)
    demand = _as_text(largest_bundle)
    lines = [
        f"\n  {node.address}: {missing or 'has capacity'}"
        for node, missing in zip(nodes, node_capacities, strict=True)
    ]
    spread = "a node" if apart == 1 else f"each of {apart} nodes"
    fit = f"{fitting} of {len(nodes)} nodes {'has' if fitting == 1 else 'have'} capacity"
    return f"{plan.name} takes {demand} on {spread}, and {fit}:{''.join(lines)}"


def _shortfall(bundle: Resources, node: NodeCapacity) -> str:
    return "; ".join(
        f"{name}: {amount:g} wanted, {node.free.get(name, 0.0):g} free of "
        f"{node.total.get(name, 0.0):g}"
        for name, amount in bundle.items()
        if node.free.get(name, 0.0) < amount
    )


def _as_text(resources: Resources) -> str:
    return ", ".join(f"{name}:{amount:g}" for name, amount in resources.items())


def _compute_demand(threads: int, device: str | None, devices: int) -> Resources:
    return {CPU: float(threads)} | ({device: float(devices)} if device else {})


def _demand(kind: Kind, base: Resources, extra: Demands) -> Resources:
    """Return what a process takes; Ray refuses a bundle without anything."""
    additions = extra.get(kind, {})
    demand = {name: amount for name, amount in {**base, **additions}.items() if amount > 0}
    if not demand:
        options = " ".join(f"--resources {kind}={_as_text({name: 0.0})}" for name in additions)
        raise ConfigError(
            f"{options}: nothing is left of what each {kind} process takes, and Ray places no "
            f"process that takes nothing; give a small amount, such as {kind}={CPU}:0.01"
        )
    return demand


def _single_process_plan(name: str, kind: Kind, resources: Resources) -> PlacementPlan:
    return PlacementPlan(name, kind, (resources,), "PACK", (PlacedProcess(name, 0, resources),))


def _is_amount(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False


class HostLostError(PeerError):
    """A host will not come back; a retry cannot succeed."""


class HostCalls(Protocol):
    """A `ServiceHost` on some node."""

    async def call(self, method: str, /, *arguments: object) -> Any:  # noqa: ANN401
        """Call a method, and return what it returns.

        Raises:
            PeerError: the host is away; it may come back, then without its process.
            HostLostError: it will not.
            PeerDefectError: the host is there, and the method itself failed.
        """
        ...

    def send(self, method: str, /, *arguments: object) -> None:
        """Call a method; wait neither for its return nor for its failure."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one process of a run: a placement group, which is released as a unit."""

    name: str
    plan: PlacementPlan
    host: HostCalls


class Cluster(Protocol):
    """Nodes, and groups of resources that are reserved on them."""

    def resources(self) -> Resources:
        """Return the resources of all live nodes together."""
        ...

    def nodes(self) -> Sequence[NodeCapacity]:
        """Return the live nodes."""
        ...

    def reserve(self, plan: PlacementPlan, /) -> Sequence[Placement]:
        """Request a group's resources and a host for each member; they come when they are free."""
        ...

    async def is_reserved(self, plan: PlacementPlan, /, seconds: float) -> bool:
        """Return whether the group's resources are reserved, waiting at most the given seconds."""
        ...

    def release(self, plan: PlacementPlan, /) -> None:
        """End the group's hosts and their processes, and free its resources."""
        ...
