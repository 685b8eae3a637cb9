"""A replica's registration and heartbeats, its liveness checks, and the health of its weights."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rollout import registration
from services.rollout.engines.protocol import EngineLoad
from services.rollout.registration import Registration, report_weights
from sluice import own_version
from sluice.api.trainer.v1 import trainer_pb2
from sluice.errors import EngineError, InvalidRequestError, NotFoundError, SluiceError
from sluice.rpc import client, retries
from sluice.rpc.client import open_channel
from sluice.rpc.status import status_of
from sluice.service_contract import WEIGHTS_HEALTH
from sluice.types import ReplicaInfo, TensorSpec, layout_digest
from tests.support.rpc_server import LIMIT_BYTES, REWARD, serving

AWAY = grpc.StatusCode.UNAVAILABLE
REPLICA = ReplicaInfo("rollout-0", "instance-0", "host:1", 8)
LAYOUT = (TensorSpec("weight", "float32", (2, 3)),)
NOTHING: Any = None


class Trainer:
    """Answers by script: ``True`` well, a code or an error badly; then cancels the replica."""

    def __init__(self) -> None:
        self.registrations: list[Any] = []
        self.heartbeats: list[trainer_pb2.HeartbeatRequest] = []
        self.script: list[tuple[str, Any]] = []
        self.over = asyncio.Event()

    async def RegisterReplica(self, request: Any, *, timeout: float | None = None) -> Any:
        await self._answer("register")
        self.registrations.append(request)
        return trainer_pb2.RegisterReplicaResponse(
            heartbeat_interval_seconds=2.5, time_to_live_seconds=9.0
        )

    async def Heartbeat(self, request: Any, *, timeout: float | None = None) -> Any:
        await self._answer("heartbeat")
        self.heartbeats.append(request)
        return trainer_pb2.HeartbeatResponse()

    async def _answer(self, method: str) -> None:
        if not self.script:
            self.over.set()
            await asyncio.Event().wait()
        expected, answer = self.script.pop(0)
        assert method == expected, f"{method} instead of {expected}"
        if isinstance(answer, SluiceError):
            code, details, trailer = status_of(answer)
            raise grpc.aio.AioRpcError(
                code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), details
            )
        if answer is not True:
            raise grpc.aio.AioRpcError(answer, grpc.aio.Metadata(), grpc.aio.Metadata())


class Clock:
    """Stands for `time` and `asyncio`: time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s, self.slept = 0.0, []

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retries, "time", clock)
    for module in (registration, retries, client):
        monkeypatch.setattr(module, "asyncio", clock)
    return clock


def replica(trainer: Trainer, version: int | None = 3) -> Registration:
    def load() -> EngineLoad:
        seconds = {"idle": 2.0}
        load = EngineLoad(
            slots=8,
            slots_busy=5,
            queued=2,
            generated_tokens=1234,
            unsent_tokens=30,
            running_tokens=4,
            busy_seconds=6.5,
            seconds_by_state=seconds,
            version=version,
            weight_digest="digest",
        )
        return replace(load, direct_sent_tokens=60, direct_unsent_tokens=8)

    engine: Any = SimpleNamespace(load=load, weight_layout=LAYOUT)
    return Registration(trainer, REPLICA, engine)  # type: ignore[arg-type]


async def play(trainer: Trainer, *script: tuple[str, Any]) -> None:
    """Runs a replica to the end of the script."""
    trainer.script = list(script)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(replica(trainer).run())
        await trainer.over.wait()
        running.cancel()


async def test_a_replica_registers_and_then_sends_its_load_in_the_trainers_interval(
    clock: Clock,
) -> None:
    trainer = Trainer()
    await play(trainer, ("register", True), ("heartbeat", True), ("heartbeat", True))
    (registered,) = trainer.registrations
    assert registered.sluice_version == own_version()
    assert registered.replica.name == "rollout-0"
    assert registered.weights_layout_digest == layout_digest(LAYOUT)
    beat = trainer.heartbeats[0]
    assert (beat.name, beat.instance_id, beat.policy_version) == ("rollout-0", "instance-0", 3)
    assert (beat.slots_busy, beat.queued, beat.generated_tokens) == (5, 2, 1234)
    assert (beat.busy_seconds, beat.draining) == (6.5, False)
    assert (beat.unsent_tokens, beat.running_tokens) == (30, 4)
    assert (beat.direct_sent_tokens, beat.direct_unsent_tokens) == (60, 8)
    assert dict(beat.seconds_by_state) == {"idle": 2.0}
    assert beat.wall_seconds > 0
    assert clock.slept == [2.5, 2.5]


async def test_a_trainer_that_does_not_know_the_replica_gets_a_new_registration(
    clock: Clock,
) -> None:
    trainer = Trainer()
    unknown = NotFoundError("unknown; register again")
    await play(trainer, ("register", True), ("heartbeat", unknown), ("register", True))
    assert len(trainer.registrations) == 2
    assert clock.slept == []


async def test_a_registration_that_is_not_found_is_repeated(clock: Clock) -> None:
    trainer = Trainer()
    await play(trainer, ("register", NotFoundError("no such route")), ("register", True))
    assert len(trainer.registrations) == 1
    assert clock.slept[0] > 0  # a proxy that answers so is not called in a tight loop


async def test_a_replica_registers_again_when_a_lost_trainer_is_back(clock: Clock) -> None:
    trainer = Trainer()
    away = [("register", AWAY)] * 9
    await play(trainer, ("register", True), ("heartbeat", AWAY), *away, ("register", True))
    assert len(trainer.registrations) == 2


async def test_a_trainer_that_starts_a_little_later_is_no_news(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await play(Trainer(), *[("register", AWAY)] * 6, ("register", True))
    assert [record.message for record in caplog.records] == ["registered as rollout-0"]


async def test_a_long_absence_is_logged_once_and_so_is_its_end(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    # Each registration makes three tries.
    with caplog.at_level(logging.INFO):
        await play(Trainer(), *[("register", AWAY)] * 120, ("register", True))
    reported = [record.message for record in caplog.records]
    assert len(reported) == 3
    assert reported[0].startswith(
        "trainer out of reach for 10 s, trying again: trainer: failed while"
    )
    assert sorted(reported[1:]) == ["registered as rollout-0", "trainer is back"]


async def test_a_refused_replica_ends_with_the_trainers_reason(clock: Clock) -> None:
    trainer = Trainer()
    trainer.script = [("register", InvalidRequestError("its weights have other shapes"))]
    with pytest.raises(InvalidRequestError, match="its weights have other shapes"):
        await replica(trainer).run()


async def test_the_last_heartbeat_says_that_the_replica_drains() -> None:
    trainer = Trainer()
    trainer.script = [("heartbeat", True)]
    await replica(trainer, version=None).announce_drain()
    (beat,) = trainer.heartbeats
    assert beat.draining
    assert not beat.HasField("policy_version")


@pytest.mark.parametrize("answer", [AWAY, NotFoundError("unknown")])
async def test_a_trainer_that_left_first_need_not_know_of_the_drain(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer()
    trainer.script = [("heartbeat", answer)]
    with caplog.at_level(logging.INFO):
        await replica(trainer).announce_drain()
    assert not caplog.records


WAIT_S = 60.0


class Engine:
    """Answers while its gate is open."""

    def __init__(self) -> None:
        self.gate, self.asked = asyncio.Event(), asyncio.Event()
        self.error: EngineError | None = None

    async def check_alive(self) -> Any:
        self.asked.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error


async def test_a_hung_engine_adds_no_turn_and_one_that_answers_does() -> None:
    engine: Any = Engine()
    registration = Registration(NOTHING, REPLICA, engine)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        checking = tasks.create_task(registration.check_engine(0.001))
        await engine.asked.wait()
        await asyncio.sleep(0.02)
        assert registration.turns == 1
        engine.gate.set()
        while registration.turns < 4:
            await asyncio.sleep(0.001)
        checking.cancel()


async def test_the_error_of_a_broken_engine_is_not_kept_back() -> None:
    engine: Any = Engine()
    engine.error = EngineError("out of memory")
    engine.gate.set()
    with pytest.raises(EngineError, match="out of memory"):
        await Registration(NOTHING, REPLICA, engine).check_engine()


STATES = health_pb2.HealthCheckResponse


class WeightsHealthEngine:
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
    engine = WeightsHealthEngine()
    async with (
        asyncio.timeout(WAIT_S),
        serving() as server,
        open_channel(server.address, max_message_bytes=LIMIT_BYTES) as channel,
        asyncio.TaskGroup() as tasks,
    ):
        reporting = tasks.create_task(
            report_weights(
                engine.load, lambda has: server.set_named(WEIGHTS_HEALTH, serving=has), 0.001
            )
        )
        await becomes(channel, STATES.NOT_SERVING)
        assert [await answer(channel, name) for name in ("", REWARD)] == [STATES.SERVING] * 2
        engine.version = 0
        await becomes(channel, STATES.SERVING)
        reporting.cancel()


async def test_only_changes_are_notified() -> None:
    engine, reported = WeightsHealthEngine(), list[bool]()
    heard = asyncio.Event()

    async def notify(serving: bool) -> None:
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
