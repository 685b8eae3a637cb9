"""Programs that work on leased samples: one process for each.

Consumes: leases. Each program gets its task as a line of JSON, and the address of a front.
Produces: the end of each lease, from the program's exit code and the last line of its output. Waits
for: programs, until their leases expire. On shutdown: cancelling `run` kills the programs with the
processes of their groups, and ends their leases as failures.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from sluice.client.leases import LeasedSample, Leases
from sluice.concurrency.waits import waiting_for
from sluice.errors import (
    ConfigError,
    DeadlineError,
    ExhaustedError,
    LeaseEndedError,
    NotFoundError,
    PeerError,
    SluiceError,
)

_TAKE_S, _AWAY_S, _PAUSE_S, _REPORT_S, _LAST_CALL_S = 5.0, 60.0, 1.0, 10.0, 5.0
_KEPT_BYTES = 1 << 16
_MOST_DETAIL = 400


@dataclass(slots=True)
class AgentCounts:
    """What a command's programs have done.

    Attributes:
        running: now.
        ended: with exit code 0.
        failed: all others.
        rewards: how many rewards they printed.
        reward_sum: of these rewards.
    """

    running: int = 0
    ended: int = 0
    failed: int = 0
    rewards: int = 0
    reward_sum: float = 0.0

    def __str__(self) -> str:
        mean = f"; mean reward {self.reward_sum / self.rewards:.3f}" if self.rewards else ""
        return f"{self.running} agents run, {self.ended} ended, {self.failed} failed{mean}"


class AgentFailedError(SluiceError):
    """A program failed; its sample has no reward."""


class AgentRunner:
    """Runs a program for each leased sample until the run ends.

    Args:
        leases: of the run.
        command: the program with its arguments, as a shell splits them.
        parallel: most programs at once.
        base_url: of the front that they call, without a path.
        say: prints a line of progress.

    Raises:
        ConfigError: the program does not exist.
    """

    def __init__(
        self,
        leases: Leases,
        command: str,
        parallel: int,
        base_url: str,
        say: Callable[[str], None],
    ) -> None:
        self._leases, self._parallel, self._base_url, self._say = leases, parallel, base_url, say
        self._arguments = program_of(command)
        self._most_failures = max(16, 2 * parallel)
        self._failures_in_a_row = 0
        self._freed = asyncio.Event()
        self.counts = AgentCounts()

    async def run(self) -> None:
        """Lease samples, and run a program for each.

        Return once the reward service has been away for a minute: the run has ended.

        Raises:
            ConfigError: the program failed for many samples in a row.
            SluiceError: the run leases no samples.
        """
        loop = asyncio.get_running_loop()
        answered_s = said_s = loop.time()
        try:
            async with asyncio.TaskGroup() as tasks:
                while loop.time() - answered_s < _AWAY_S:
                    if loop.time() - said_s >= _REPORT_S:
                        said_s = loop.time()
                        self._say(str(self.counts))
                    await self._wait_for_capacity()
                    try:
                        free = self._parallel - self.counts.running
                        found = await self._leases.take(min(free, 1024), _TAKE_S)
                    except (PeerError, DeadlineError, ExhaustedError):
                        await asyncio.sleep(_PAUSE_S)
                        continue
                    answered_s = loop.time()
                    for lease in found:
                        self.counts.running += 1
                        tasks.create_task(self._work(lease), name=f"agent of {lease.prompt_id}")
        except* SluiceError as errors:
            raise errors.exceptions[0] from errors

    async def _wait_for_capacity(self) -> None:
        while self.counts.running >= self._parallel:
            self._freed.clear()
            with waiting_for("agents", "ending"):
                await self._freed.wait()

    async def _work(self, lease: LeasedSample) -> None:
        reward, failure = None, ""
        try:
            reward = await self._result(lease)
        except AgentFailedError as error:
            failure = str(error)
        except asyncio.CancelledError:
            await self._end(lease, None, "sluice agents run was stopped", _LAST_CALL_S)
            raise
        finally:
            self.counts.running -= 1
            self._freed.set()
        await self._end(lease, reward, failure)
        self._count(reward, failure)

    def _count(self, reward: float | None, failure: str) -> None:
        if not failure:
            self.counts.ended += 1
            self._failures_in_a_row = 0
            if reward is not None:
                self.counts.rewards += 1
                self.counts.reward_sum += reward
            return
        self.counts.failed += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row == 1:
            self._say(f"an agent failed: {failure}")
        if self._failures_in_a_row >= self._most_failures:
            raise ConfigError(
                f"--command: {self._failures_in_a_row} agents in a row failed, the last: {failure}"
                "; run it by hand with a task on its standard input"
            )

    async def _end(
        self, lease: LeasedSample, reward: float | None, failure: str, within_s: float = _AWAY_S
    ) -> None:
        """Post the end; a program may have posted it before, or too late."""
        with suppress(NotFoundError, LeaseEndedError, PeerError, DeadlineError, TimeoutError):
            async with asyncio.timeout(within_s):
                await self._leases.end(lease.lease_id, reward_value=reward, failure=failure)

    async def _result(self, lease: LeasedSample) -> float | None:
        """Run the program; return the reward that it prints last, if any."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **self._variables(lease)},
                start_new_session=True,
            )
        except OSError as error:
            raise AgentFailedError(f"it did not start: {error}") from error
        try:
            async with asyncio.timeout(lease.deadline_s):
                with waiting_for("agent", "working on a sample"):
                    output, errors = await _talk(process, task_line(lease))
                    code = await process.wait()
        except TimeoutError:
            detail = f"killed: it ran for sluice.environment.episode_timeout_s={lease.deadline_s:g}"
            raise AgentFailedError(detail) from None
        finally:
            await _kill(process)
        if code:
            detail = errors.decode(errors="replace").strip()[-_MOST_DETAIL:]
            raise AgentFailedError(f"exit code {code}: {detail}")
        return printed_reward(output.decode(errors="replace"))

    def _variables(self, lease: LeasedSample) -> Mapping[str, str]:
        return {
            "OPENAI_BASE_URL": f"{self._base_url}/s/{lease.lease_id}/v1",
            "OPENAI_API_KEY": lease.lease_id,
            "OPENAI_MODEL": "policy",
        }


def program_of(command: str) -> list[str]:
    """Split a command. Raise ConfigError if its program does not exist."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--command {command!r}: {error}") from error
    if not arguments or shutil.which(arguments[0]) is None:
        raise ConfigError(f"--command {command!r}: no such program; give one that PATH has")
    return arguments


def task_line(lease: LeasedSample) -> bytes:
    """Return the task as a line of JSON: messages, data_source, ground_truth and extra_info."""
    messages = [{"role": turn.role, "content": turn.content} for turn in lease.messages]
    return json.dumps({"messages": messages, **json.loads(lease.row_json)}).encode() + b"\n"


def printed_reward(output: str) -> float | None:
    """Return the reward in the last line of an output; ``None``: it is no object with one.

    Raises:
        AgentFailedError: the line has a failure, or its reward is no finite number.
    """
    lines = output.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    if failure := found.get("failure"):
        raise AgentFailedError(str(failure)[:_MOST_DETAIL])
    reward = found.get("reward")
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise AgentFailedError(f"reward: {str(reward)[:_MOST_DETAIL]!r} is no number")
    if not math.isfinite(reward):
        raise AgentFailedError(f"reward: {reward} is not finite")
    return float(reward)


async def _talk(process: asyncio.subprocess.Process, line: bytes) -> tuple[bytes, bytes]:
    """Send the task; return the ends of both outputs."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.TaskGroup() as tasks:
        output = tasks.create_task(_tail(process.stdout))
        errors = tasks.create_task(_tail(process.stderr))
        with suppress(ConnectionError):  # a program need not read its task
            process.stdin.write(line)
            await process.stdin.drain()
        process.stdin.close()
    return output.result(), errors.result()


async def _tail(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while chunk := await stream.read(_KEPT_BYTES):
        kept = (kept + chunk)[-_KEPT_BYTES:]
    return kept


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the program and what it started in its group, and wait for its end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
