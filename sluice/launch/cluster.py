"""What a launcher asks of a cluster of nodes, whoever manages it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sluice.errors import PeerError
from sluice.launch.placement import NodeCapacity, PlacementPlan, Resources


class HostLostError(PeerError):
    """A host will not come back; asking again cannot succeed."""


class HostCalls(Protocol):
    """A `ServiceHost` on some node."""

    async def call(self, method: str, /, *arguments: object) -> Any:  # noqa: ANN401
        """What a method returns.

        Raises:
            PeerError: the host is away; it may come back, then without its process.
            HostGoneError: it will not.
            PeerDefectError: the host is there, and the method itself failed.
        """
        ...

    def send(self, method: str, /, *arguments: object) -> None:
        """Calls a method, and does not wait for it to return, or to fail."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one process of a run is: its group, which gives back its resources as a whole."""

    name: str
    plan: PlacementPlan
    host: HostCalls


class Cluster(Protocol):
    """Nodes, and groups of resources that are reserved on them."""

    def resources(self) -> Resources:
        """Of all live nodes together."""
        ...

    def nodes(self) -> Sequence[NodeCapacity]:
        """The live nodes."""
        ...

    def reserve(self, plan: PlacementPlan, /) -> Sequence[Placement]:
        """Asks for a group's resources and for a host for each member; they come when they can."""
        ...

    async def is_reserved(self, plan: PlacementPlan, /, seconds: float) -> bool:
        """Whether the group's resources are there, at the latest after so many seconds."""
        ...

    def give_back(self, plan: PlacementPlan, /) -> None:
        """Ends the group's hosts, with what they run, and frees its resources."""
        ...
