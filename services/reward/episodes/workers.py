"""Start, watch and replace the processes that run the user's environment.

Consumes: an environment's source. Waits for: the end of a worker, and twice a second its report of
its oldest call. Produces: the address of a live worker for each episode. On failure: a worker that
dies, or whose call does not end after sluice.environment.call_timeout_s, is killed with all
processes that it started, and replaced; only its episodes fail. On shutdown: all workers are killed
and reaped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec

from services.reward.episodes.client import WorkerProbe
from services.reward.episodes.drivers import EpisodeFailedError, server_of
from services.reward.episodes.worker_main import WorkerReply, WorkerSetup
from services.reward.grading.containment import end_marked, family_of, new_mark
from services.reward.grading.scorer_worker import (
    END_TIMEOUT_S,
    LoadingEndedError,
    clean_environment,
    kill_session,
    start_with_retries,
)
from sluice.concurrency.process import ending_text
from sluice.concurrency.waits import deadline, run_beside
from sluice.config.schema.service import EnvironmentConfig
from sluice.environment.source import EnvironmentSource
from sluice.errors import ConfigError, DeadlineError, SluiceError

logger = logging.getLogger(__name__)

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
PEER = "environment worker"
START_TIMEOUT_S = 120.0
LOOK_INTERVAL_S = 0.5
CANCEL_S = 3.0
"""Seconds for a call to end after it was given up: a coroutine does, a thread does not."""
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 10.0
_MODULE = "services.reward.episodes.worker_main"


@dataclass(slots=True, eq=False)
class _Worker:
    """A running process.

    Attributes:
        mark: identifies the process and all that it started.
    """

    process: asyncio.subprocess.Process
    mark: str
    address: str
    probe: WorkerProbe

    async def end(self) -> None:
        """Kill the process and all that it started.

        Raises:
            DeadlineError: a process is left (it hangs in the kernel).
        """
        kill_session(self.process)
        await self.probe.close()
        async with deadline(END_TIMEOUT_S, peer=PEER, phase="ending after SIGKILL"):
            await end_marked(self.mark)
            await self.process.wait()


@dataclass(slots=True, eq=False)
class _Slot:
    """The place of a worker; empty while the worker is replaced."""

    number: int
    worker: _Worker | None = None


class EnvironmentWorkers:
    """`settings.workers` processes. Made by `running_workers`.

    Args:
        folder: holds the sockets; only this user may enter it.
        family: see `containment.family_of`.
    """

    def __init__(
        self,
        source: EnvironmentSource,
        settings: EnvironmentConfig,
        folder: Path,
        family: str,
        variables: Mapping[str, str],
    ) -> None:
        # Each thread's malloc arena would take part of the limited address space.
        self._variables = {**variables, "MALLOC_ARENA_MAX": "4"}
        self._setup = WorkerSetup(source, settings.memory_limit_mb << 20)
        self._call_timeout_s = settings.call_timeout_s
        self._folder, self._family = folder, family
        self._slots = [_Slot(number) for number in range(settings.workers)]
        self._num_started = 0
        self.num_replaced = 0
        """Processes that died, or were killed because a call took too long."""

    def address_for(self, episode_id: str) -> str:
        """Return a live worker's address; an episode keeps it while no worker is replaced."""
        live = [slot.worker for slot in self._slots if slot.worker is not None]
        if not live:
            raise EpisodeFailedError(
                f"environment workers: all {len(self._slots)} are being replaced; see the log"
            )
        return live[server_of(episode_id, len(live))].address

    async def start(self) -> None:
        """Start all workers, so that an environment that cannot be loaded fails at once.

        Raises:
            ConfigError: the environment cannot be loaded. DeadlineError: loading takes too long.
        """
        async with asyncio.TaskGroup() as tasks:
            for slot in self._slots:
                start = start_with_retries(partial(self._fill, slot))
                tasks.create_task(start, name=f"environment worker {slot.number}")

    async def watch(self) -> None:
        """Replace workers that die or hang, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for slot in self._slots:
                tasks.create_task(self._keep_worker(slot), name=f"environment worker {slot.number}")

    async def stop(self) -> None:
        """Kill and reap all workers.

        Raises:
            DeadlineError: a process is left.
        """
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        for worker in workers:
            kill_session(worker.process)
        for worker in workers:
            await worker.end()

    async def _keep_worker(self, slot: _Slot) -> None:
        while True:
            worker = slot.worker
            if worker is None:
                await self._refill(slot)
                continue
            fault = await self._fault(worker)
            slot.worker = None
            self.num_replaced += 1
            logger.warning(
                "environment worker %d replaced (%d replaced so far): %s; its open episodes fail",
                *(slot.number, self.num_replaced, fault),
            )
            try:
                await worker.end()
            except DeadlineError as error:
                logger.warning("an environment worker is left behind: %s", error)
            except asyncio.CancelledError:
                slot.worker = worker  # `stop` ends it
                raise

    async def _fault(self, worker: _Worker) -> str:
        """Wait until a worker must be replaced; return why."""
        while True:
            try:
                async with asyncio.timeout(LOOK_INTERVAL_S):
                    return f"it ended with {ending_text(await worker.process.wait())}"
            except TimeoutError:
                pass
            try:
                longest_s = await worker.probe.longest_call_s()
            except SluiceError as error:
                if worker.process.returncode is None:
                    return f"{error}: blocking code in an async method, perhaps"
                continue
            if longest_s > self._call_timeout_s + CANCEL_S:
                return (
                    f"a call takes more than sluice.environment.call_timeout_s = "
                    f"{self._call_timeout_s:g} s"
                )

    async def _refill(self, slot: _Slot) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while slot.worker is None:
            try:
                await self._fill(slot)
            except (SluiceError, OSError) as error:  # also if the system lacks memory or processes
                logger.warning("environment worker %d does not start: %s", slot.number, error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    async def _fill(self, slot: _Slot) -> None:
        self._num_started += 1
        # A new path each time: calls for a dead worker must not reach its successor.
        address = f"unix:{self._folder / f'{self._num_started}.sock'}"
        mark = new_mark(self._family)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _MODULE, str(os.getpid()), address),
            msgspec.json.encode(self._setup).decode(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**clean_environment(mark), **self._variables},
        )
        worker = _Worker(process, mark, address, WorkerProbe(address, self._call_timeout_s))
        try:
            await _wait_until_started(process)
        except BaseException:
            await worker.end()
            raise
        slot.worker = worker


async def _wait_until_started(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    async with deadline(START_TIMEOUT_S, peer=PEER, phase="loading the environment"):
        line = await process.stdout.readline()
        if not line:
            code = await process.wait()
            raise LoadingEndedError(
                f"sluice.environment: the process that loads it ended with {ending_text(code)}; "
                "see its output above, and sluice.environment.memory_limit_mb",
                code,
            )
    reply = msgspec.json.decode(line, type=WorkerReply)
    if reply.error is not None:
        raise ConfigError(reply.error)


@asynccontextmanager
async def running_workers(
    source: EnvironmentSource,
    settings: EnvironmentConfig,
    run_dir: Path | None = None,
    variables: Mapping[str, str] = _NO_VARIABLES,
) -> AsyncIterator[EnvironmentWorkers]:
    """Run workers (arguments as for `EnvironmentWorkers`); no process outlives the block.

    Args:
        run_dir: the run's folder; a later service of the run ends what this one leaves behind.
    """
    folder = Path(tempfile.mkdtemp(prefix="sluice-"))
    workers = EnvironmentWorkers(source, settings, folder, family_of(run_dir), variables)
    try:
        try:
            await workers.start()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        async with run_beside(workers.watch(), "environment workers"):
            yield workers
    finally:
        try:
            await workers.stop()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
