"""Calls to the launcher of a run: list its processes, and set the number of replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from sluice.api.launch.v1 import launch_pb2
from sluice.rpc.client import launch_stub, open_channel, unary_call
from sluice.rpc.credentials import OPEN, Credentials

_PEER = "launcher"
_MAX_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Scaling:
    """The names of the replicas that start, and of those that leave."""

    started: tuple[str, ...]
    drained: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """A process of a run; `pid` is 0 while it waits for its restart, `is_draining`: it leaves."""

    name: str
    pid: int
    restarts: int
    is_draining: bool
    max_restarts: int = 0

    @property
    def restart_text(self) -> str:
        """Such as ``trainer is being restarted (try 1 of 5)``; empty if it was not restarted."""
        if not self.restarts:
            return ""
        state = "was restarted" if self.pid else "is being restarted"
        return f"{self.name} {state} (try {self.restarts} of {self.max_restarts})"


class Launcher:
    """Calls to the launcher at host:port. Use it as a context manager."""

    def __init__(self, address: str, credentials: Credentials = OPEN) -> None:
        self._channel = open_channel(
            address, max_message_bytes=_MAX_MESSAGE_BYTES, credentials=credentials
        )
        self._stub = launch_stub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    async def set_replicas(self, count: int) -> Scaling:
        """Start or drain replicas until `count` remain; return at once.

        Raises:
            InvalidRequestError: a run cannot have as many.
            PeerError, DeadlineError: the launcher does not answer.
        """
        answer = await unary_call(
            self._stub.SetReplicas,
            launch_pb2.SetReplicasRequest(replicas=count),
            peer=_PEER,
            phase="asking it for another number of replicas",
        )
        return Scaling(tuple(answer.started), tuple(answer.drained))

    async def services(self) -> tuple[LaunchedProcess, ...]:
        """Return all processes that run or will be restarted."""
        answer = await unary_call(
            self._stub.GetServices,
            launch_pb2.GetServicesRequest(),
            peer=_PEER,
            phase="asking for its processes",
        )
        return tuple(
            LaunchedProcess(
                service.name, service.pid, service.restarts, service.draining, service.max_restarts
            )
            for service in answer.services
        )
