"""A cluster whose hosts are objects of this process: what a launcher sees of Ray, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sluice.errors import PeerError
from sluice.launch.cluster.nodes import ServiceHost
from sluice.launch.cluster.placement import (
    HostLostError,
    NodeCapacity,
    Placement,
    PlacementPlan,
    Resources,
)

POLL_S = 0.01


class InProcessHost:
    """A host that can be lost, restarted elsewhere, and be away meanwhile.

    Attributes:
        log: methods that were called.
    """

    def __init__(self, name: str, address: str | None) -> None:
        self.name, self.log = name, list[str]()
        self.is_dead = False
        self._lost = asyncio.Event()
        self._host = ServiceHost(address) if address else None

    @property
    def is_there(self) -> bool:
        """Whether it has a node, or never will."""
        return self._host is not None or self.is_dead

    async def call(self, method: str, /, *arguments: object) -> Any:
        """As an actor would: it waits without capacity, and fails when the host is lost."""
        self.log.append(method)
        while self._host is None and not self.is_dead:
            if self._lost.is_set():
                raise PeerError(self.name, method, "it is being restarted")
            await asyncio.sleep(POLL_S)
        if self.is_dead:
            raise HostLostError(self.name, method, "it is dead")
        lost = self._lost
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(getattr(self._host, method)(*arguments))
            losing = tasks.create_task(lost.wait())
            await asyncio.wait([work, losing], return_when=asyncio.FIRST_COMPLETED)
            losing.cancel()
            if not work.done():
                work.cancel()
        if work.cancelled():
            raise PeerError(self.name, method, "connection reset")
        return work.result()

    def send(self, method: str, /, *arguments: object) -> None:
        """The methods that are sent do not wait, so that one step of them is all of them."""
        if self._host is not None:
            work = getattr(self._host, method)(*arguments)
            try:
                work.send(None)
            except StopIteration:
                return

    def lose(self) -> None:
        """The host dies, and its process with it."""
        child = self._host._child if self._host is not None else None
        if child is not None:
            child.kill()
        self._host = None
        self._lost.set()

    def come_back(self, address: str) -> None:
        """Another host is started in its place."""
        self._host, self._lost = ServiceHost(address), asyncio.Event()


class InProcessCluster:
    """Nodes with as much capacity as they are given.

    Args:
        node_capacities: of each node; a group takes a whole one per bundle.
    """

    def __init__(self, node_capacities: Sequence[NodeCapacity]) -> None:
        self.node_capacities = list(node_capacities)
        self.hosts: dict[str, InProcessHost] = {}
        self.plans: dict[str, PlacementPlan] = {}
        self.given_back: list[str] = []
        self._taken = 0

    def resources(self) -> Resources:
        """Of all nodes."""
        names = {name for capacity in self.node_capacities for name in capacity.total}
        return {
            name: sum(capacity.total.get(name, 0.0) for capacity in self.node_capacities)
            for name in names
        }

    def nodes(self) -> Sequence[NodeCapacity]:
        """All."""
        return self.node_capacities

    def reserve(self, plan: PlacementPlan) -> Sequence[Placement]:
        """On the next node; without capacity the hosts wait for `come_back`."""
        address = (
            self.node_capacities[self._taken].address
            if self._taken < len(self.node_capacities)
            else None
        )
        self._taken += 1
        self.plans[plan.name] = plan
        for member in plan.members:
            self.hosts[member.name] = InProcessHost(member.name, address)
        return [Placement(member.name, plan, self.hosts[member.name]) for member in plan.members]

    async def is_reserved(self, plan: PlacementPlan, seconds: float) -> bool:
        """Whether it has a node; a claim that was given back has none."""
        hosts = [self.hosts[member.name] for member in plan.members]
        try:
            async with asyncio.timeout(seconds):
                while not all(host.is_there for host in hosts):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return False
        return True

    def release(self, plan: PlacementPlan) -> None:
        """Notes it, and ends the hosts."""
        self.given_back.append(plan.name)
        for member in plan.members:
            self.hosts[member.name].lose()
            self.hosts[member.name].is_dead = True
