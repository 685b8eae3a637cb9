"""Programs that work on leased samples: one process for each.

Consumes: leases. Each program gets its task as a line of JSON, and the address of a server.
Produces: the end of each lease, from the program's exit code and the last line of its output. Waits
for: programs, until their leases expire; a reward service that is away, while a program has time,
and a while longer. On shutdown: cancelling `run` ends the leases as failures at once, and the
programs with the processes of their groups by SIGTERM, after seconds by SIGKILL.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from sluice.client.agent_program import (
    AgentFailedError,
    AgentLateError,
    AgentProgram,
    program_of,
)
from sluice.client.leases import LeasedSample, Leases
from sluice.concurrency.waits import waiting_for
from sluice.errors import (
    ConfigError,
    DeadlineError,
    ExhaustedError,
    LeaseEndedError,
    NotReadyError,
    PeerError,
    SluiceError,
)

_KEEP_ALIVE_S = 60.0
"""Without a sign of life for so long, as after SIGKILL, the samples of the programs fail."""
_SIGNS = 3  # in that time
_TAKE_S, _PAUSE_S, _REPORT_S, _LAST_CALL_S = 5.0, 1.0, 10.0, 5.0
_AWAY = (PeerError, DeadlineError, ExhaustedError)
"""What a reward service answers, or does not, that may soon answer otherwise."""


class _ProgramEnd(NamedTuple):
    """How a program ended.

    Args:
        reward: the reward that the run accepted.
        failure: why it failed; empty if it did not.
        is_stopped: nobody waits for its end.
    """

    reward: float | None = None
    failure: str = ""
    is_stopped: bool = False


_STOPPED = _ProgramEnd(failure="sluice agents run was stopped", is_stopped=True)


@dataclass(slots=True)
class AgentCounts:
    """What a command's programs have done.

    Attributes:
        running: programs that run now.
        ended: programs that ended with exit code 0.
        failed: all other programs.
        stopped: by the end of the command, or the run did not take their ends, such as of samples
            that had been given up.
        rewards: number of printed rewards that the run accepted.
        reward_sum: of these rewards.
    """

    running: int = 0
    ended: int = 0
    failed: int = 0
    stopped: int = 0
    rewards: int = 0
    reward_sum: float = 0.0

    def __str__(self) -> str:
        stopped = f", {self.stopped} stopped" if self.stopped else ""
        mean = f"; mean reward {self.reward_sum / self.rewards:.3f}" if self.rewards else ""
        return f"{self.running} agents run, {self.ended} ended, {self.failed} failed{stopped}{mean}"


class AgentRunner:
    """Runs a program for each leased sample until the run ends.

    Args:
        leases: the run's leases.
        command: the program with its arguments, as a shell splits them.
        parallel: most programs at once.
        base_url: address of the server that they call, without a path.
        say: prints a line of progress.
        has_ended: whether the run has reached its end.
        wait_s: how long to wait for a reward service that is away once no program has time left.

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
        has_ended: Callable[[], Awaitable[bool]],
        wait_s: float = 300.0,
    ) -> None:
        self._leases, self._parallel, self._base_url, self._say = leases, parallel, base_url, say
        self._has_ended, self._wait_s = has_ended, wait_s
        self._away_since: float | None = None
        self._arguments = program_of(command)
        self._max_failures = max(16, 2 * parallel)
        self._failures_in_a_row = 0
        self._freed = asyncio.Event()
        self.counts = AgentCounts()

    async def run(self) -> None:
        """Lease samples, and run a program for each, until the run has ended.

        Raises:
            ExceptionGroup: of ConfigError, if the program failed for many samples in a row; of
                NotReadyError, if the reward service has been away for too long; of another
                SluiceError, if the run leases no samples.
        """
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(self._lease_samples(), name="leases")
            living = tasks.create_task(self._keep_leases_alive(), name="sign of life")
            await self._report_until_over()
            working.cancel()
            living.cancel()

    async def _report_until_over(self) -> None:
        """Report progress until the run has ended. Raise NotReadyError if it is away for long."""
        loop = asyncio.get_running_loop()
        reported, reported_s = "", loop.time()
        while True:
            await asyncio.sleep(_PAUSE_S)
            is_due = loop.time() - reported_s >= _REPORT_S
            if is_due:
                reported_s = loop.time()
                if reported != str(self.counts):
                    reported = str(self.counts)
                    self._say(reported)
            since = self._away_since
            if (is_due or since is not None) and await self._has_ended():
                return
            if since is None or self.counts.running:  # a lease may outlive a long absence
                continue
            if (away_s := loop.time() - since) >= self._wait_s:
                raise NotReadyError(
                    f"run: its reward service has been away for {away_s:.0f} s, though the run has "
                    f"not ended; start this command again once it is back ({self.counts})"
                )

    async def _keep_leases_alive(self) -> None:
        """Keep the leases alive, also while no further one is taken."""
        while True:
            await asyncio.sleep(_KEEP_ALIVE_S / _SIGNS)
            with suppress(*_AWAY):
                await self._leases.take(0, _PAUSE_S, _KEEP_ALIVE_S)

    async def _lease_samples(self) -> None:
        """Start a program for each sample, without end."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._wait_for_capacity()
                try:
                    free = self._parallel - self.counts.running
                    leases = await self._leases.take(min(free, 1024), _TAKE_S, _KEEP_ALIVE_S)
                except _AWAY as error:
                    if self._away_since is None:
                        self._away_since = loop.time()
                        self._say(f"waiting for the reward service: {error}")
                    await asyncio.sleep(_PAUSE_S)
                    continue
                if self._away_since is not None:
                    self._away_since = None
                    self._say("the reward service answers again")
                for lease in leases:
                    self.counts.running += 1
                    tasks.create_task(self._work_on(lease), name=f"agent of {lease.prompt_id}")

    async def _wait_for_capacity(self) -> None:
        while self.counts.running >= self._parallel:
            self._freed.clear()
            with waiting_for("agents", "ending"):
                await self._freed.wait()

    async def _work_on(self, lease: LeasedSample) -> None:
        outcome = _STOPPED
        try:
            outcome = await self._run_program(lease)
        finally:
            self.counts.running -= 1
            self._freed.set()
            self._count_outcome(outcome)

    async def _run_program(self, lease: LeasedSample) -> _ProgramEnd:
        """Run a program for a sample, and post its end."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + lease.deadline_s
        program, outcome = None, _STOPPED
        try:
            try:
                program = await AgentProgram.start(self._arguments, self._variables(lease))
                outcome = _ProgramEnd(await program.result(task_line(lease), lease.deadline_s))
                await program.stop()  # what it has left behind need not wait for the post
            except AgentLateError as error:  # the run knows, since the lease has expired
                return _ProgramEnd(failure=str(error))
            except AgentFailedError as error:
                outcome = _ProgramEnd(failure=str(error))
            return await self._post_end(lease, outcome, ends_at)
        except asyncio.CancelledError:
            if program is not None:
                program.interrupt()
            if self._away_since is None:
                await self._post_end(lease, outcome, loop.time() + _LAST_CALL_S)
            raise
        finally:
            if program is not None:
                await program.stop()

    async def _post_end(
        self, lease: LeasedSample, outcome: _ProgramEnd, ends_at: float
    ) -> _ProgramEnd:
        """Post an end, again while the reward service is away; return what the run took of it."""
        try:
            async with asyncio.timeout_at(ends_at):
                while True:
                    try:
                        await self._leases.end(
                            lease.lease_id, reward_value=outcome.reward, failure=outcome.failure
                        )
                    except _AWAY:
                        with waiting_for("reward", "answering again, to end a sample"):
                            await asyncio.sleep(_PAUSE_S)
                    else:
                        return outcome
        except LeaseEndedError:  # the program has posted its end, which counts
            return outcome._replace(reward=None)
        except (SluiceError, TimeoutError):
            return _STOPPED

    def _count_outcome(self, outcome: _ProgramEnd) -> None:
        if outcome.is_stopped:
            self.counts.stopped += 1
            return
        if not outcome.failure:
            self.counts.ended += 1
            self._failures_in_a_row = 0
            if outcome.reward is not None:
                self.counts.rewards += 1
                self.counts.reward_sum += outcome.reward
            return
        self.counts.failed += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row == 1:
            self._say(f"an agent failed: {outcome.failure}")
        if self._failures_in_a_row >= self._max_failures:
            raise ConfigError(
                f"--command: {self._failures_in_a_row} agents in a row failed, the last: "
                f"{outcome.failure}; run it by hand with a task on its standard input"
            )

    def _variables(self, lease: LeasedSample) -> Mapping[str, str]:
        return {
            "OPENAI_BASE_URL": f"{self._base_url}/s/{lease.lease_id}/v1",
            "OPENAI_API_KEY": lease.lease_id,
            "OPENAI_MODEL": "policy",
        }


def task_line(lease: LeasedSample) -> bytes:
    """Return the task as a line of JSON: messages, data_source, ground_truth and extra_info."""
    messages = [{"role": turn.role, "content": turn.content} for turn in lease.messages]
    return json.dumps({"messages": messages, **json.loads(lease.row_json)}).encode() + b"\n"
