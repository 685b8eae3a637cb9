"""Plan a run on a Ray cluster: first place its groups, which determines the addresses."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sluice.config.derived import checkpoint_folder
from sluice.config.loading.loader import KeySettings
from sluice.config.loading.yaml_text import write_config
from sluice.config.run import RunConfig
from sluice.config.schema.service import EndpointConfig
from sluice.errors import ConfigError
from sluice.launch.cluster.nodes import endpoint_on
from sluice.launch.cluster.placed_services import NodePorts, PlacedServices, SharedConfig
from sluice.launch.cluster.placement import (
    Cluster,
    Demands,
    NodeCapacity,
    PlacementPlan,
    Resources,
    accelerator,
    plans,
    replica_plan,
)
from sluice.launch.cluster.ray_cluster import ray_cluster
from sluice.launch.device_plan import DevicePlan, LaunchDevices, device_plan
from sluice.launch.network_layout import Kind
from sluice.launch.plan import LaunchPlan
from sluice.launch.service_spec import (
    REWARD,
    TRAINER,
    placed_replica,
    placed_trainer,
    replica_number,
    reward_service,
)
from sluice.rpc.credentials import TOKEN_VARIABLE
from sluice.service_contract import checkpoint_mark

logger = logging.getLogger(__name__)

_MARK_FOLDER = "launch"


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How a run uses a cluster.

    Args:
        address: address of its head, or `auto`.
        extra: resources that each process of a kind takes in addition to its devices and threads.
        patience_s: seconds for the placement of the run.
        keys: keys of the launch as the user set them; ``None`` to leave devices undivided.
    """

    address: str = "auto"
    extra: Demands = field(default_factory=dict)
    patience_s: float = 300.0
    keys: KeySettings | None = None


@asynccontextmanager
async def ray_plan(
    config: RunConfig, config_file: Path, options: RayOptions
) -> AsyncIterator[LaunchPlan]:
    """Connect to the cluster and place a run there; nothing of it is left after the block.

    Args:
        config: with absolute paths; addresses and ports are set here.
        config_file: where to write it. All nodes read it by this path.

    Raises:
        ConfigError: there is no cluster, it has no capacity, or its nodes lack files.
        DeadlineError: a node does not answer.
    """
    with ray_cluster(options.address) as cluster:
        async with placed_run(config, config_file, options, cluster) as plan:
            yield plan


@asynccontextmanager
async def placed_run(
    config: RunConfig, config_file: Path, options: RayOptions, cluster: Cluster
) -> AsyncIterator[LaunchPlan]:
    """Place a run on a cluster that is there; see `ray_plan`."""
    total = cluster.resources()
    devices, extra = divide_devices(config, options, total, cluster.nodes())
    config = devices.config

    def plan_of_added(name: str) -> PlacementPlan:
        number = replica_number(name)
        assert number is not None, "only replicas are added"
        return replica_plan(config, total, extra, number)

    services = PlacedServices(cluster, plan_of_added, options.patience_s)
    try:
        await services.place(plans(config, total, extra), devices.shortage)
        reward = await services.node_of(REWARD, 1)
        trainer = await services.node_of(TRAINER, 2)
        addressed = with_addresses(config, reward, trainer)
        meeting = (trainer.address, trainer.ports[1])
        with _write_shared_config(addressed, config_file) as shared:
            await services.prepare(shared)
            yield _plan(addressed, config_file, meeting, services)
    finally:
        services.close()


def divide_devices(
    config: RunConfig, options: RayOptions, total: Resources, nodes: Sequence[NodeCapacity]
) -> tuple[DevicePlan, Demands]:
    """Divide the cluster's devices; return the plan, and what processes take besides.

    Raises:
        ConfigError: no split is possible.
    """
    kind, replica_kind = (
        accelerator(name, total) for name in (config.trainer.device, config.sluice.rollout.device)
    )
    if options.keys is None or kind is None or kind != replica_kind:
        return DevicePlan(config), options.extra
    by_node = tuple(int(node.total.get(kind, 0)) for node in nodes if node.total.get(kind, 0) >= 1)
    devices = LaunchDevices(kind, int(total.get(kind, 0)), are_elsewhere=True, by_node=by_node)
    plan = device_plan(config, options.keys, devices)
    if plan.shortage and not plan.line:
        raise ConfigError(plan.shortage)
    logger.info(plan.line)
    if plan.shortage:  # the cluster may grow
        logger.warning("%s", plan.shortage)
    if not plan.is_shared:
        return plan, options.extra
    halves: dict[Kind, Resources] = {
        service: {kind: 0.5, **options.extra.get(service, {})} for service in ("trainer", "rollout")
    }
    return plan, {**options.extra, **halves}


def with_addresses(config: RunConfig, reward: NodePorts, trainer: NodePorts) -> RunConfig:
    """Return the configuration with trainer and reward service at their nodes' addresses."""
    service = config.sluice

    def placed(endpoint: EndpointConfig, node: NodePorts) -> EndpointConfig:
        moved = endpoint_on(endpoint, node.address)
        return msgspec.structs.replace(moved, port=moved.port or node.ports[0])

    replace = msgspec.structs.replace
    return replace(
        config,
        sluice=replace(
            service,
            reward=replace(service.reward, endpoint=placed(service.reward.endpoint, reward)),
            trainer=replace(service.trainer, endpoint=placed(service.trainer.endpoint, trainer)),
        ),
    )


def _plan(
    config: RunConfig,
    config_file: Path,
    meeting: tuple[str, int],
    services: PlacedServices,
) -> LaunchPlan:
    mark = checkpoint_mark(Path(checkpoint_folder(config)))
    replicas = range(config.sluice.rollout.replicas)
    specs = (
        reward_service(config, config_file),
        *placed_trainer(config, config_file, mark, meeting),
        *(placed_replica(config, config_file, number) for number in replicas),
    )
    return LaunchPlan(
        config, specs, lambda number: placed_replica(config, config_file, number), services
    )


@contextmanager
def _write_shared_config(config: RunConfig, config_file: Path) -> Iterator[SharedConfig]:
    """Write the configuration into the run's folder, with a mark of this run alone."""
    write_config(config, config_file)
    mark = config_file.parent / _MARK_FOLDER / f"{uuid.uuid4().hex}.mark"
    mark.parent.mkdir(exist_ok=True)
    mark.touch()
    token = os.environ.get(TOKEN_VARIABLE)
    try:
        yield SharedConfig(
            config, config_file, mark, {TOKEN_VARIABLE: token} if token is not None else {}
        )
    finally:
        mark.unlink(missing_ok=True)
