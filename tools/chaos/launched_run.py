"""The run under chaos: `sluice up` in a process of its own, and one replica behind the cable.

Signals go to the ids that the launcher reports at that moment, so that they hit only processes of
this run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from sluice.api.launch.v1 import launch_pb2, launch_pb2_grpc
from sluice.concurrency.process import SUPERVISOR_VARIABLE
from sluice.config.run import RunConfig
from sluice.errors import SluiceError
from sluice.launch.servicer import launcher_of
from sluice.rpc.client import open_channel, unary_call
from tools.chaos.cable import Cable

FAR = "rollout-far"
_END_S, _RESTART_S = 90.0, 0.5


@dataclass(frozen=True, slots=True)
class Process:
    """A running process; `restarts` in a row as the launcher counts them."""

    name: str
    pid: int
    restarts: int
    is_draining: bool


class LaunchedRun:
    """The run's processes.

    Args:
        config: of the run.
        up: the process of `sluice up`.
    """

    def __init__(self, config: RunConfig, up: asyncio.subprocess.Process) -> None:
        self.config, self.up = config, up
        self.run_dir = Path(config.sluice.run_dir)
        self.far: asyncio.subprocess.Process | None = None

    async def processes(self) -> dict[str, Process]:
        """Return those that run now, by name; nothing before the launcher serves."""
        with suppress(SluiceError):
            launcher = launcher_of(self.run_dir)
            async with open_channel(
                launcher.address, max_message_bytes=1 << 20, credentials=launcher.credentials
            ) as channel:
                stub = cast(
                    "launch_pb2_grpc.LaunchServiceAsyncStub",
                    launch_pb2_grpc.LaunchServiceStub(channel),
                )
                answer = await unary_call(
                    stub.GetServices,
                    launch_pb2.GetServicesRequest(),
                    name="LaunchService/GetServices",
                    peer="launcher",
                    phase="asking for its processes",
                )
            found = {
                one.name: Process(one.name, one.pid, one.restarts, one.draining)
                for one in answer.services
                if one.pid
            }
            if self.far is not None and self.far.returncode is None:
                found[FAR] = Process(FAR, self.far.pid, 0, is_draining=False)
            return found
        return {}

    async def ended(self) -> int:
        """Return the exit code of `sluice up`, once all has ended."""
        try:
            async with asyncio.timeout(_END_S):
                return await self.up.wait()
        except TimeoutError:
            self.up.send_signal(signal.SIGTERM)
            return -1


@asynccontextmanager
async def launched_run(
    config: RunConfig, config_file: Path, cable: Cable | None
) -> AsyncIterator[LaunchedRun]:
    """Start the run; end all that is left of it with the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    with (config_file.parent / "up.log").open("wb") as log:
        up = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sluice.cli.main", "up", str(config_file)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    run = LaunchedRun(config, up)
    try:
        async with asyncio.TaskGroup() as tasks:
            keeping = None
            if cable is not None:
                keeping = tasks.create_task(_keep_far(run, config_file, cable), name=FAR)
            try:
                yield run
            finally:
                if keeping is not None:
                    keeping.cancel()
    finally:
        if up.returncode is None:
            up.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await up.wait()
        if up.returncode is None:  # its processes end with it
            up.kill()
            await up.wait()


async def _keep_far(run: LaunchedRun, config_file: Path, cable: Cable) -> None:
    """Keep the replica at the far end running, as a launcher on that machine would."""
    command = cable.inside(
        (
            *(sys.executable, "-m", "services.rollout", "--config", str(config_file)),
            *("--name", FAR, f"sluice.rollout.endpoint.host={cable.far}"),
        )
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", SUPERVISOR_VARIABLE: str(os.getpid())}
    log_file = config_file.parent / f"{FAR}.log"
    while True:
        with log_file.open("ab") as log:
            run.far = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        try:
            await run.far.wait()
        finally:
            await _end(run.far)
        await asyncio.sleep(_RESTART_S)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(20.0):
                await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
