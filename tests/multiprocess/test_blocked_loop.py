"""A service whose event loop hangs cannot say so itself; its watchdog does, and ends it."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.concurrency.watchdog import EXIT_STALLED
from tests.support.reward_process import LISTENING, REPOSITORY, START_TIMEOUT_S
from tests.support.reward_scenarios import mixed

# The real service, but for a status call that blocks the thread of the event loop.
BLOCKING = """
import sys, time
from services.reward import __main__ as service
from services.reward.servicer import RewardServicer
from sluice.concurrency import watchdog

# A busy machine may keep a thread from running: before the call that is no stall, and after it the
# reports are waited for.
watchdog._MAX_INTERVAL_S, watchdog.REPORT_TIMEOUT_S = 0.1, 600.0

async def block_the_loop(self, request, context):
    (judge,) = watchdog._watching
    judge._stall_s, judge._give_up_s = 0.5, 2.0
    time.sleep(3600)

RewardServicer.GetStatus = block_the_loop
sys.exit(service.main())
"""
NOTHING_MOVES = re.compile(r"no progress for \d+ s, and the event loop has been blocked for \d+ s")


async def test_a_service_whose_event_loop_hangs_ends_with_its_own_exit_code_and_its_stacks(
    configure: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    watchdog = {"stall_s": 900.0, "give_up_s": 1800.0}
    config = configure(mixed(8), sluice__watchdog=watchdog)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BLOCKING, "--config", str(config)),
        cwd=REPOSITORY,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        code, log = await _ended_after_the_call(process)
    finally:
        if process.returncode is None:
            process.kill()
    assert code == EXIT_STALLED, log
    assert len(NOTHING_MOVES.findall(log)) == 2, log
    assert f"the process ends with exit code {EXIT_STALLED}" in log
    stacks = (tmp_path / "run" / "logs" / "reward.stacks.txt").read_text(encoding="utf-8")
    assert "block_the_loop" in stacks
    assert "\n  reward loop\n" in stacks
    assert f"stacks of all threads and tasks: {tmp_path}" in log


async def _ended_after_the_call(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Exit code and log of the service, which is asked for its status once it listens."""
    assert process.stderr is not None
    lines: list[str] = []
    async with asyncio.timeout(START_TIMEOUT_S):
        while not (found := LISTENING.search("".join(lines[-1:]))):
            line = (await process.stderr.readline()).decode()
            assert line, "".join(lines)
            lines.append(line)
        async with grpc.aio.insecure_channel(found.group(1)) as channel:
            stub: Any = reward_pb2_grpc.RewardServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetStatus(reward_pb2.GetStatusRequest(), timeout=START_TIMEOUT_S)
        rest = (await process.stderr.read()).decode()
        return await process.wait(), "".join(lines) + rest
