"""A scripted run for synchronous programs: its servers have a loop and a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sluice.api.common.v1 import common_pb2
from sluice.api.reward.v1 import reward_pb2
from sluice.client import RunAddress
from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from tests.support.rpc_server import serving
from tests.support.scripted_trainer import ScriptedReward, ScriptedTrainer
from tests.support.token_replica import TokenReplica, token_replicas


class FleetTrainer(ScriptedTrainer):
    """Names a replica that is there."""

    address = ""

    async def GetStatus(self, request: Any, context: Any) -> Any:
        status = await super().GetStatus(request, context)
        status.replicas[0].replica.address = self.address
        return status


class GradingReward(ScriptedReward):
    """Gives 1 to a response that is the ground truth; cannot grade the response ``slow``."""

    async def Score(self, request: Any, context: Any) -> Any:
        return reward_pb2.ScoreResponse(results=[_grade(item) for item in request.items])


def _grade(item: Any) -> Any:
    if item.response == "slow":
        return reward_pb2.ScoreResult(failure="scorer_timeout: 10 s")
    right = float(item.response == item.ground_truth)
    return reward_pb2.ScoreResult(
        score=common_pb2.Score(
            score=right, metrics={"acc": right}, prediction=item.question or None
        )
    )


@contextmanager
def threaded_run(replica: TokenReplica, *, hold_reason: str = "") -> Iterator[RunAddress]:
    """A trainer, a reward service and one replica for the length of the block."""
    opened: list[tuple[RunAddress, asyncio.AbstractEventLoop]] = []
    started, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        trainer = FleetTrainer(hold_reason=hold_reason)
        async with (
            token_replicas(replica) as addresses,
            serving(reward=GradingReward(), trainer=trainer) as server,
        ):
            trainer.address = addresses[0]
            address = RunAddress(server.address, server.address)
            opened.append((address, asyncio.get_running_loop()))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(20)
    address, loop = opened[0]
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)


def folder_of(address: RunAddress, folder: Path) -> Path:
    """A run's folder that leads to these addresses."""
    ports = [str(text).rpartition(":")[2] for text in (address.trainer, address.reward)]
    settings = (
        f"sluice.trainer.endpoint.port={ports[0]}",
        f"sluice.reward.endpoint.port={ports[1]}",
    )
    write_config(load_config(None, settings), folder / "config.yaml")
    return folder
