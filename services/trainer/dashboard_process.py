"""The live page beside rank 0: a process of its own, which training never waits for.

It ends with the trainer, however that ends; that it cannot start, or ends by itself, costs a line
in the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sluice.client.run_address import CONFIG_NAME
from sluice.concurrency.parent_death import SUPERVISOR_VARIABLE
from sluice.config.dump import write_config
from sluice.config.run import RunConfig

logger = logging.getLogger(__name__)

_END_S = 5.0


@asynccontextmanager
async def live_page(config: RunConfig) -> AsyncIterator[None]:
    """Serves the run's page for the length of the block, if `sluice.dashboard.port` is set."""
    process = await _started(config)
    if process is None:
        yield
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_log_end(process), name="live page")
            try:
                yield
            finally:
                watching.cancel()
    finally:
        await _end(process)


async def _started(config: RunConfig) -> asyncio.subprocess.Process | None:
    page = config.sluice.dashboard
    if page.port is None:
        return None
    command = ["-m", "sluice.cli.main", "dashboard", config.sluice.run_dir]
    command += ["--host", page.host, "--port", str(page.port)]
    environment = {**os.environ, SUPERVISOR_VARIABLE: str(os.getpid())}
    try:
        _leave_config(config)
        return await asyncio.create_subprocess_exec(
            sys.executable, *command, env=environment, stdin=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        logger.warning("the live page cannot be started: %s", error)
        return None


def _leave_config(config: RunConfig) -> None:
    """The launcher leaves it in the run's folder; `torchrun` without it does not.

    Raises:
        OSError: the folder cannot be written.
    """
    file = Path(config.sluice.run_dir) / CONFIG_NAME
    if not file.exists():
        write_config(config, file)


async def _log_end(process: asyncio.subprocess.Process) -> None:
    code = await process.wait()
    logger.warning(
        "the live page has ended with exit code %d, training goes on; `sluice dashboard` with the "
        "run's folder shows it again",
        code,
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and SIGKILL if that does not help."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
