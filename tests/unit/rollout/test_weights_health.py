"""A replica's health has a name for its weights, which serves with the first ones, not before."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rollout.registration import report_weights
from sluice.rpc.client import open_channel
from sluice.service_contract import WEIGHTS_HEALTH
from tests.support.rpc_server import LIMIT_BYTES, REWARD, serving

WAIT_S = 10.0
STATES = health_pb2.HealthCheckResponse


class Engine:
    """Has the version that it is given."""

    def __init__(self) -> None:
        self.version: int | None = None

    def load(self) -> Any:
        return SimpleNamespace(version=self.version)


async def answer(channel: grpc.aio.Channel, name: str) -> Any:
    """None: the name is not known yet."""
    request = health_pb2.HealthCheckRequest(service=name)
    try:
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_S)).status
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        return None


async def becomes(channel: grpc.aio.Channel, wanted: Any) -> None:
    while await answer(channel, WEIGHTS_HEALTH) != wanted:
        await asyncio.sleep(0.001)


async def test_weights_serve_with_the_first_version_and_the_process_before_it() -> None:
    engine = Engine()
    async with (
        asyncio.timeout(WAIT_S),
        serving() as server,
        open_channel(server.address, max_message_bytes=LIMIT_BYTES) as channel,
        asyncio.TaskGroup() as tasks,
    ):
        notify = partial(server.set_named, WEIGHTS_HEALTH)
        reporting = tasks.create_task(report_weights(engine.load, notify, 0.001))
        await becomes(channel, STATES.NOT_SERVING)
        assert [await answer(channel, name) for name in ("", REWARD)] == [STATES.SERVING] * 2
        engine.version = 0
        await becomes(channel, STATES.SERVING)
        reporting.cancel()


async def test_only_changes_are_told() -> None:
    engine, reported = Engine(), list[bool]()
    heard = asyncio.Event()

    async def notify(*, serving: bool) -> None:
        reported.append(serving)
        heard.set()

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        reporting = tasks.create_task(report_weights(engine.load, notify, 0.0))
        await heard.wait()
        for version in (None, 0, 1, 2):
            engine.version = version
            for _ in range(5):
                await asyncio.sleep(0)
        reporting.cancel()
    assert reported == [False, True]
