"""Where a launcher's processes run: on this machine, or on one of a cluster's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from sluice.launch.child_process import start_child
from sluice.launch.service_spec import ServiceSpec


class Child(Protocol):
    """A started process, wherever it is; see `ChildProcess`."""

    @property
    def pid(self) -> int:
        """Its process id on its machine."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether it has an exit code."""
        ...

    def lines(self) -> AsyncIterator[str]:
        """Its output."""
        ...

    async def wait(self) -> int:
        """The exit code; negative: minus the signal that ended it."""
        ...

    def terminate(self) -> None:
        """SIGTERM to the process."""
        ...

    def kill(self) -> None:
        """SIGKILL to the process and to what it has started."""
        ...

    async def end(self, grace_s: float, /) -> bool:
        """SIGTERM, then SIGKILL after `grace_s` seconds; whether it had to be killed."""
        ...


class ProcessHost(Protocol):
    """Starts processes, and keeps what they run on."""

    async def start(self, spec: ServiceSpec, /) -> Child:
        """Starts a process; may wait for room. Cancelled when the process is not wanted any more.

        Raises:
            ConfigError: it can never be started so.
        """
        ...

    def release(self, name: str, /) -> None:
        """The process of that name has ended and is not started again."""
        ...


class ThisMachine:
    """Processes are children of this one."""

    async def start(self, spec: ServiceSpec) -> Child:
        """At once."""
        return await start_child(spec)

    def release(self, name: str) -> None:
        """Nothing was kept for it."""
