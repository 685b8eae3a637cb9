"""A started process: its output line by line, its end, and the end of all processes that it
started."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol

from sluice.concurrency.process import SHORTAGES, SUPERVISOR_VARIABLE
from sluice.concurrency.waits import ends_within
from sluice.errors import ConfigError
from sluice.launch.service_spec import ServiceSpec

logger = logging.getLogger(__name__)

_LINE_LIMIT_BYTES = 1 << 20
KILLED_S = 30.0
"""A killed process ends at once, unless the kernel holds it: a dead disk, a device's driver."""


class Child(ABC):
    """A started process, on this machine or on another one."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self._killed_s: float | None = None

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether its exit code is known."""

    @abstractmethod
    def lines(self) -> AsyncIterator[str]:
        """Yield standard output and error together, until the process and its children ended."""

    @abstractmethod
    async def wait(self) -> int:
        """Return the exit code; negative: minus the signal that ended it."""

    @abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM to the process alone, which ends its children in order."""

    def kill(self) -> None:
        """Send SIGKILL to the process and to the rest of its group, ended or not."""
        self._killed_s = self._killed_s or time.monotonic()
        self._send_kill()

    @abstractmethod
    def _send_kill(self) -> None: ...

    async def end(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL after `grace_s` seconds.

        A process that does not end then is left to the kernel, and `has_ended` stays false.
        """
        if not self.has_ended:
            self.terminate()
        await ends_within(grace_s if self._killed_s is None else 0.0, self.wait())
        self.kill()
        since_s = self._killed_s or time.monotonic()
        if not await ends_within(max(0.0, since_s + KILLED_S - time.monotonic()), self.wait()):
            logger.warning(
                "%s: process %d has not ended %g s after SIGKILL: the kernel holds it (its state "
                "is in /proc/%d/stat on its machine); it is left behind",
                self.name,
                self.pid,
                KILLED_S,
                self.pid,
            )


class Process(Protocol):
    """The part of `asyncio.subprocess.Process` that a child needs."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


class LocalChild(Child):
    """A process of this machine that leads its own session, so that Ctrl-C reaches its parent only.

    Output and exit are watched separately: a child may keep the output open after the process has
    ended, which must not hide the end.
    """

    def __init__(
        self,
        name: str,
        process: Process,
        output: asyncio.StreamReader,
        pipe: asyncio.BaseTransport,
    ) -> None:
        super().__init__(name, process.pid)
        self._process = process
        self._output = output
        self._pipe = pipe

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def lines(self) -> AsyncIterator[str]:
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
        return await self._process.wait()

    def terminate(self) -> None:
        if not self.has_ended:
            self._process.send_signal(signal.SIGTERM)

    def _send_kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def end(self, grace_s: float) -> None:
        await super().end(grace_s)
        self._pipe.close()


async def piped_output() -> tuple[asyncio.StreamReader, asyncio.BaseTransport, int]:
    """Return a reader, its transport, and the descriptor that a process writes to; close both."""
    read_end, write_end = os.pipe()
    output = asyncio.StreamReader(limit=_LINE_LIMIT_BYTES)
    try:
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(read_end, "rb", 0)
        )
    except BaseException:  # the loop has closed the reading end
        os.close(write_end)
        raise
    return output, pipe, write_end


async def start_child(spec: ServiceSpec) -> LocalChild:
    """Start a process.

    Raises:
        ConfigError: its program cannot be run.
        OSError: this machine has no process, memory or descriptor for it at present.
    """
    environment = {**os.environ, **spec.environment, "PYTHONUNBUFFERED": "1"}
    environment[SUPERVISOR_VARIABLE] = str(os.getpid())
    output, pipe, write_end = await piped_output()
    try:
        process = await asyncio.create_subprocess_exec(
            *spec.command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            start_new_session=True,
        )
    except (OSError, asyncio.CancelledError) as error:
        pipe.close()
        if isinstance(error, OSError) and error.errno not in SHORTAGES:
            raise ConfigError(
                f"{spec.name}: {spec.command[0]} cannot be started ({error.strerror})"
            ) from error
        raise
    finally:
        os.close(write_end)
    return LocalChild(spec.name, process, output, pipe)


class ProcessHost(Protocol):
    """Starts processes, and holds their resources."""

    async def start(self, spec: ServiceSpec, /) -> Child:
        """Start a process; wait for resources, until the caller cancels.

        Raises:
            ConfigError: it can never start.
            OSError: it cannot start at present.
        """
        ...

    def release(self, name: str, /) -> None:
        """Free the resources of a process that has ended and does not start again."""
        ...


class ThisMachine:
    """Processes are children of this one."""

    async def start(self, spec: ServiceSpec) -> Child:
        """Start the process at once."""
        return await start_child(spec)

    def release(self, name: str) -> None:
        """Do nothing: it held no resources."""
