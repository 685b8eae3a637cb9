"""One started process: its output line by line, its end, and the end of all that it started."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Protocol

from sluice.concurrency.process import SUPERVISOR_VARIABLE
from sluice.errors import ConfigError
from sluice.launch.service_spec import ServiceSpec

logger = logging.getLogger(__name__)

_LINE_LIMIT_BYTES = 1 << 20
# A process that SIGKILL does not end within these seconds waits in the kernel, as for a dead disk.
KILLED_S = 30.0
"""A killed process ends at once, unless the kernel holds it: a dead disk, a device's driver."""


def seconds_left(killed_s: float | None) -> float:
    """Return the seconds until a process that was killed then (`time.monotonic`) is given up."""
    return KILLED_S if killed_s is None else max(killed_s + KILLED_S - time.monotonic(), 0.0)


class ChildProcess:
    """A running process that leads a session of its own, so that Ctrl-C reaches its parent alone.

    Output and exit are watched apart: a process that it started may keep its output open after it
    has ended, and that must not hide the end.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output: asyncio.StreamReader,
        pipe: asyncio.BaseTransport,
    ) -> None:
        self._process = process
        self._output = output
        self._pipe = pipe
        self._killed_s: float | None = None

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its session and group."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has an exit code."""
        return self._process.returncode is not None

    async def lines(self) -> AsyncIterator[str]:
        """Yield standard output and error together, until all holders of them have ended."""
        while True:
            try:
                raw = await self._output.readline()
            except ValueError:  # the reader has dropped it and continues
                yield f"[a line of more than {_LINE_LIMIT_BYTES} bytes is left out]"
                continue
            if not raw:
                return
            yield raw.decode(errors="replace").rstrip()

    async def wait(self) -> int:
        """Return the exit code; negative: minus the signal that ended it."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the process alone: it ends what it started, in its own order."""
        if not self.has_ended:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process and to what is left of its group, ended or not."""
        self._killed_s = time.monotonic() if self._killed_s is None else self._killed_s
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    async def end(self, grace_s: float) -> bool:
        """Send SIGTERM, then SIGKILL after `grace_s` seconds; return whether it had to be killed.

        A process that does not end then is left to the kernel, and `has_ended` stays false.
        """
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
                "process %d has not ended %g s after SIGKILL: the kernel holds it (its state is in "
                "/proc/%d/stat); it is left behind",
                *(self.pid, KILLED_S, self.pid),
            )
        self._pipe.close()
        return killed


async def start_child(spec: ServiceSpec) -> ChildProcess:
    """Start a process.

    Raises:
        ConfigError: its program cannot be run.
    """
    environment = {**os.environ, **spec.environment, "PYTHONUNBUFFERED": "1"}
    environment[SUPERVISOR_VARIABLE] = str(os.getpid())
    read_end, write_end = os.pipe()
    output = asyncio.StreamReader(limit=_LINE_LIMIT_BYTES)
    pipe: asyncio.BaseTransport | None = None
    try:
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(read_end, "rb", 0)
        )
        process = await asyncio.create_subprocess_exec(
            *spec.command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            start_new_session=True,
        )
    except (OSError, asyncio.CancelledError) as error:
        if pipe is not None:  # else the loop has closed it
            pipe.close()
        if isinstance(error, OSError):
            raise ConfigError(
                f"{spec.name}: {spec.command[0]} cannot be started ({error.strerror})"
            ) from error
        raise
    finally:
        os.close(write_end)
    return ChildProcess(process, output, pipe)


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
        """Yield its output."""
        ...

    async def wait(self) -> int:
        """Return the exit code; negative: minus the signal that ended it."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        ...

    def kill(self) -> None:
        """Send SIGKILL to the process and to all that it has started."""
        ...

    async def end(self, grace_s: float, /) -> bool:
        """Send SIGTERM, after `grace_s` seconds SIGKILL; return whether it had to be killed."""
        ...


class ProcessHost(Protocol):
    """Starts processes, and keeps what they run on."""

    async def start(self, spec: ServiceSpec, /) -> Child:
        """Start a process; wait for resources, until the caller cancels.

        Raises:
            ConfigError: it can never start.
        """
        ...

    def release(self, name: str, /) -> None:
        """Free what a process had that has ended and does not start again."""
        ...


class ThisMachine:
    """Processes are children of this one."""

    async def start(self, spec: ServiceSpec) -> Child:
        """Start it at once."""
        return await start_child(spec)

    def release(self, name: str) -> None:
        """Do nothing: nothing was kept for it."""
