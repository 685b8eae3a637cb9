"""The process of one agent's program: its task goes in, the ends of its outputs come out.

Waits for: the program, within the deadline of its sample. On failure: `AgentFailedError`, with the
end of what it printed. However it ends, nothing of its process group is left.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from sluice.concurrency.waits import waiting_for
from sluice.errors import ConfigError, SluiceError
from sluice.types import LARGEST_NUMBER

_KEPT_BYTES = 1 << 16
_MAX_OUTPUT_CHARS = 400
_MAX_BYTES = 2000
"""Of a failure; a run takes no more."""
_LAST_OUTPUT_S, _GRACE_S, _KILLED_S = 1.0, 3.0, 5.0


class AgentFailedError(SluiceError):
    """A program failed; its sample has no reward.

    Args:
        detail: why. It may hold what a program has printed, so only what can be sent is kept.
    """

    def __init__(self, detail: str) -> None:
        sent = detail.encode(errors="replace")[:_MAX_BYTES]  # half a surrogate pair cannot be
        super().__init__(sent.decode(errors="ignore"))


class AgentLateError(AgentFailedError):
    """A program has used the time of its sample."""


def program_of(command: str) -> list[str]:
    """Split a command. Raise ConfigError if its program does not exist."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--command {command!r}: {error}") from error
    if not arguments or shutil.which(arguments[0]) is None:
        raise ConfigError(f"--command {command!r}: no such program; give one that PATH has")
    return arguments


def printed_reward(output: str) -> float | None:
    """Return the reward in the last line of an output; ``None``: it is no object with one.

    Raises:
        AgentFailedError: the line has a failure, or its reward is no finite number.
    """
    # Not `splitlines`: a text of JSON may hold some of the characters at which that splits.
    last_line = output.strip().replace("\r", "\n").rpartition("\n")[2]
    try:
        result = json.loads(last_line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(result, dict):
        return None
    if (failure := result.get("failure")) is not None:  # an empty one, too, as where it is posted
        raise AgentFailedError(str(failure) or "failed")
    reward = result.get("reward")
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise AgentFailedError(f"reward: {reward!r} is no number")
    try:
        value = float(reward)
    except OverflowError:
        value = math.inf
    if not abs(value) <= LARGEST_NUMBER:
        raise AgentFailedError(
            f"reward: {value} is not a finite number of at most {LARGEST_NUMBER:.2g}"
        )
    return value


class AgentProgram:
    """A program that runs.

    Args:
        transport: of the leader of a process group of its own, with pipes.
        protocol: its streams.
    """

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: _Streams) -> None:
        self._transport, self._protocol = transport, protocol
        self._is_interrupted = self._is_stopped = False

    @classmethod
    async def start(cls, arguments: Sequence[str], variables: Mapping[str, str]) -> AgentProgram:
        """Start a program.

        Args:
            arguments: the program first.
            variables: added to this process's environment.

        Raises:
            AgentFailedError: the system refuses.
        """
        try:
            transport, protocol = await asyncio.get_running_loop().subprocess_exec(
                _Streams,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        except OSError as error:
            raise AgentFailedError(f"it did not start: {error}") from error
        return cls(transport, protocol)

    async def result(self, task: bytes, deadline_s: float) -> float | None:
        """Send the task and wait for the end; return the reward that it prints last, if any.

        Raises:
            AgentFailedError: it ran too long, its exit code is not 0, or it printed a failure.
        """
        try:
            async with asyncio.timeout(deadline_s):
                with waiting_for("agent", "working on a sample"):
                    output, errors = await self._communicate(task)
        except TimeoutError:
            detail = f"stopped: it ran for sluice.environment.episode_timeout_s={deadline_s:g}"
            raise AgentLateError(detail) from None
        if code := self._transport.get_returncode():
            output_end = (errors.strip() or output.strip())[-_MAX_OUTPUT_CHARS:]
            raise AgentFailedError(f"exit code {code}: {output_end}")
        return printed_reward(output)

    def interrupt(self) -> None:
        """Send SIGTERM to the program and to what it started, once."""
        if not (self._is_interrupted or self._is_stopped):
            self._is_interrupted = True
            self._signal(signal.SIGTERM)

    async def stop(self) -> None:
        """Let the program end within seconds, then kill what is left of its group, once.

        Later another group may have its number. Cancelling ends the wait, not the kill.
        """
        if self._is_stopped:
            return
        try:
            if not self._protocol.exited.is_set():
                self.interrupt()
                await self._wait_for_exit("ending after SIGTERM", _GRACE_S)
        finally:
            self._signal(signal.SIGKILL)
            try:  # one that the system holds, such as in a lost file system, does not end
                await self._wait_for_exit("ending after SIGKILL", _KILLED_S)
            finally:
                self._close()

    async def _wait_for_exit(self, phase: str, within_s: float) -> None:
        """Wait for the end of the program, but not for long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                with waiting_for("agent", phase):
                    await self._protocol.exited.wait()

    def _close(self) -> None:
        self._is_stopped = True
        self._transport.close()  # a process that left the group may hold its pipes
        stdin = self._protocol.stdin
        if stdin is not None and stdin.transport.get_write_buffer_size():  # nobody will read it
            stdin.transport.abort()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._transport.get_pid(), number)

    async def _communicate(self, task: bytes) -> tuple[str, str]:
        """Send the task; return the ends of both outputs once the program has ended."""
        streams = self._protocol
        stdin, outputs = streams.stdin, (streams.stdout, streams.stderr)
        assert stdin is not None
        tails = [_Tail(), _Tail()]
        async with asyncio.TaskGroup() as tasks:
            readers = []
            for tail, stream in zip(tails, outputs, strict=True):
                assert stream is not None
                readers.append(tasks.create_task(tail.read(stream)))
            sending = tasks.create_task(_send_task(stdin, task))
            await self._protocol.exited.wait()
            sending.cancel()
            # What it started and left behind may hold its outputs open.
            await asyncio.wait(readers, timeout=_LAST_OUTPUT_S)
            for reader in readers:
                reader.cancel()
        output, errors = (tail.kept.decode(errors="replace") for tail in tails)
        return output, errors


async def _send_task(stdin: asyncio.StreamWriter, task: bytes) -> None:
    """Write the task, which a program need not read, and close its input."""
    try:
        with suppress(ConnectionError):
            stdin.write(task)
            await stdin.drain()
        stdin.close()
    finally:
        if not stdin.is_closing():  # the program has ended; what it started may keep the pipe
            stdin.transport.abort()


class _Streams(asyncio.subprocess.SubprocessStreamProtocol):
    """The streams of a program, and its end, for which `Process.wait` waits too long: until
    everybody has closed them."""

    def __init__(self) -> None:
        super().__init__(limit=_KEPT_BYTES, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class _Tail:
    """The end of an output, whatever its size."""

    def __init__(self) -> None:
        self.kept = b""

    async def read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(_KEPT_BYTES):
            self.kept = (self.kept + chunk)[-_KEPT_BYTES:]
