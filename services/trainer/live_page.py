"""The dashboard's process next to a run."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sluice.concurrency.process import SUPERVISOR_VARIABLE
from sluice.config.loading.yaml_text import write_config
from sluice.config.run import RunConfig
from sluice.service_contract import CONFIG_NAME

logger = logging.getLogger(__name__)

_END_S = 5.0


@asynccontextmanager
async def live_page(config: RunConfig) -> AsyncIterator[None]:
    """Serve the run's page during the block, if `sluice.dashboard.port` is set.

    The page has its own process and ends with the trainer. Training never waits for it: a page
    that cannot start or ends early leaves a log line.
    """
    process = await _start_page(config)
    if process is None:
        yield
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_log_end(process), name="dashboard")
            try:
                yield
            finally:
                watching.cancel()
    finally:
        await _end(process)


async def _start_page(config: RunConfig) -> asyncio.subprocess.Process | None:
    page = config.sluice.dashboard
    if page.port is None:
        return None
    command = ["-m", "sluice.cli.main", "dashboard", config.sluice.run_dir]
    command += ["--host", page.host, "--port", str(page.port)]
    environment = {**os.environ, SUPERVISOR_VARIABLE: str(os.getpid())}
    try:
        # `sluice up` has written the configuration, which the page reads; torchrun has not.
        file = Path(config.sluice.run_dir) / CONFIG_NAME
        if not file.exists():
            write_config(config, file)
        return await asyncio.create_subprocess_exec(
            sys.executable, *command, env=environment, stdin=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        logger.warning("the dashboard cannot be started: %s", error)
        return None


async def _log_end(process: asyncio.subprocess.Process) -> None:
    code = await process.wait()
    logger.warning(
        "the dashboard has ended with exit code %d and training continues; `sluice dashboard` with "
        "the run's folder shows the page again",
        code,
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """Send SIGTERM, then SIGKILL if the process does not end in time."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
