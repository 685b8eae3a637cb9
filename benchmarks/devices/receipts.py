"""The reward service's receipts for a train batch of a published run's size: clients' prompts, the
lease, the acknowledgement, and what they leave on disk.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.devices.wire import BATCH
from benchmarks.parts import Part
from benchmarks.reporting import print_line
from services.reward.app import open_prompt_sets, open_run_files
from services.reward.generation.request import GroupRequest
from sluice.codec.train_batch import outline_to_proto
from sluice.config.run import RunConfig
from sluice.telemetry.samples import FOLDER_NAME, archive_files
from sluice.types import FinishReason, Rollout, VersionSpan
from tests.support.reward_app import ScriptedClient, replica, running_app, submit

_CHARS_A_TOKEN = 4
_FILL_S = 300.0
_LAG_S = 0.005  # between two looks at the event loop


def measure() -> Mapping[str, Any]:
    """Let a reward service with its files fill, lease and close one batch; samples share memory.

    The whole service runs in this process, without gRPC; replicas and scorer are scripted.
    """
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder)))


def _rollout(_name: str, request: GroupRequest, index: int) -> Rollout:
    answer = request.prompt.ground_truth if index < BATCH.samples // 2 else "none"
    return Rollout.of_one_turn(
        index,
        _TOKENS,
        _LOGPROBS,
        (VersionSpan(0, 0, BATCH.tokens),),
        FinishReason.STOP,
        f"{_TEXT}\nAnswer: {answer}",
    )


_TOKENS = np.zeros(BATCH.tokens, np.uint32)
_LOGPROBS = np.zeros(BATCH.tokens, np.float32)
_TEXT = "x" * (BATCH.tokens * _CHARS_A_TOKEN)


async def _measure(folder: Path) -> Mapping[str, Any]:
    config = msgspec.convert(
        {
            "data": {"train_batch_size": BATCH.groups},
            "actor_rollout_ref": {"rollout": {"n": BATCH.samples}},
            "algorithm": {"rollout_correction": {"rollout_is": "token"}},
            "sluice": {"run_dir": str(folder), "asynchrony": {"max_staleness": 1}},
        },
        RunConfig,
    )
    with open_run_files(config) as files:
        client = ScriptedClient(make=_rollout)
        async with running_app(config, client, open_prompt_sets(config), files) as app:
            began_s = time.perf_counter()
            submit(app, [f"prompt {number}" for number in range(BATCH.groups)])
            await app.ledger.durable()
            receipts_s = time.perf_counter() - began_s
            everything = replica("a", slots=BATCH.groups * BATCH.samples)
            await app.loop.announce("trainer", 0, [everything], None)
            batch = await app.loop.batches.take(1, 0, _FILL_S)
            await app.ledger.durable()
            outline_mb = outline_to_proto(batch).ByteSize() / (1 << 20)
            written = _ledger_bytes(folder)
            async with _pauses() as pauses:
                began_s = time.perf_counter()
                app.loop.batches.acknowledge(batch.batch_id, 1)
                await app.ledger.durable()
                acknowledge_s = time.perf_counter() - began_s
            written = _ledger_bytes(folder) - written
    archived = sum(
        len(file.read_bytes().splitlines()) for file in archive_files(folder / FOLDER_NAME)
    )
    print_line(json.dumps({"longest_pause_s": round(max(pauses), 3), "ledger_kb": written >> 10}))
    return {
        "receipts_s": receipts_s,
        "acknowledge_s": acknowledge_s,
        "outline_mb": outline_mb,
        "archived_share": archived / BATCH.groups,
    }


def _ledger_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / "reward").glob("ledger*"))


@asynccontextmanager
async def _pauses() -> AsyncIterator[list[float]]:
    """Collect how late the event loop is during the block, in seconds."""
    found = [0.0]

    async def look() -> None:
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(_LAG_S)
            found.append(time.perf_counter() - began_s - _LAG_S)

    async with asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(look())
        await asyncio.sleep(2 * _LAG_S)
        yield found
        await asyncio.sleep(2 * _LAG_S)
        looking.cancel()


PART = Part(
    lambda _: measure(),
    most={"receipts_s": 1.0, "acknowledge_s": 2.0, "outline_mb": 2.0},
    least={"archived_share": 1.0},
)
