"""A process on another node, kept by a `ServiceHost` there."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator

from sluice.errors import PeerError
from sluice.launch.child_process import KILLED_S, seconds_left
from sluice.launch.cluster import HostCalls, HostLostError

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5
# Longer than a network hiccup. By then the process has ended with its host, or its node is lost.
_SILENCE_S = 10.0


class RemoteChild:
    """A running process.

    Args:
        name: of the service.
        pid: on its node.
        host: keeps it; if it dies, the process has died with it.
    """

    def __init__(self, name: str, pid: int, host: HostCalls) -> None:
        self._name, self._pid, self._host = name, pid, host
        self._code: int | None = None
        self._killed_s: float | None = None
        self._asking = asyncio.Lock()

    @property
    def pid(self) -> int:
        """Process id on its node."""
        return self._pid

    @property
    def has_ended(self) -> bool:
        """Whether its exit code is known here."""
        return self._code is not None

    async def lines(self) -> AsyncIterator[str]:
        """Its output, until it has ended or its host is lost.

        A host that is away for a moment is asked again: the process blocks in its next line once
        nobody takes them and the pipe is full.
        """
        while True:
            try:
                lines, is_over = await self._host.call("lines", self._pid)
            except HostLostError:
                return
            except PeerError:
                if self.has_ended:
                    return
                await asyncio.sleep(_PAUSE_S)
                continue
            for line in lines:
                yield str(line)
            if is_over:
                return

    async def wait(self) -> int:
        """The exit code; minus SIGKILL if its host is lost, since it ended with that."""
        async with self._asking:
            if self._code is None:
                self._code = await self._asked()
            return self._code

    def terminate(self) -> None:
        """SIGTERM to the process."""
        self._host.send("terminate", self._pid)

    def kill(self) -> None:
        """SIGKILL to the process and to what it started."""
        self._killed_s = time.monotonic() if self._killed_s is None else self._killed_s
        self._host.send("kill", self._pid)

    async def end(self, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL after `grace_s` seconds; whether it had to be killed.

        One that does not end then is left to its node, and `has_ended` stays false.
        """
        if not self.has_ended:
            self.terminate()
        killed = False
        try:
            async with asyncio.timeout(grace_s if self._killed_s is None else 0.0):
                await self.wait()
        except TimeoutError:
            killed = True
        self.kill()
        try:
            async with asyncio.timeout(seconds_left(self._killed_s)):
                await self.wait()
        except TimeoutError:
            logger.warning(
                "%s: process %d on its node has not ended %g s after SIGKILL: the kernel there "
                "holds it, or its host does not say; it is left behind",
                *(self._name, self._pid, KILLED_S),
            )
        return killed

    async def _asked(self) -> int:
        silent_since_s: float | None = None
        while True:
            asked_s = time.monotonic()
            try:
                return int(await self._host.call("ended", self._pid))
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
            await asyncio.sleep(_PAUSE_S)
