"""Keep one replica registered with the trainer, and report whether its engine answers and has
weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.rollout.engines.protocol import EngineLoad
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.api.trainer.v1 import trainer_pb2_grpc
from sluice.codec.messages import counters_to_fields, replica_to_proto
from sluice.concurrency.waits import Wait, waiting_for
from sluice.errors import DeadlineError, NotFoundError, PeerError, SluiceError
from sluice.rpc.client import unary_call
from sluice.telemetry.process import process_age_s
from sluice.types import ReplicaInfo

_PROBE_INTERVAL_S = 1.0


class ProbedEngine(Protocol):
    """What is asked; see `Engine`."""

    async def probe(self) -> EngineLoad:
        """Answers from inside the engine's loop."""
        ...


class EngineHeartbeat:
    """Asks an engine for ever.

    Args:
        engine: which.
        interval_s: between an answer and the next question.
    """

    def __init__(self, engine: ProbedEngine, interval_s: float = _PROBE_INTERVAL_S) -> None:
        self._engine, self._interval_s = engine, interval_s
        self._turns = 1  # it has started

    @property
    def turns(self) -> int:
        """Answers so far, the start included."""
        return self._turns

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self._engine.probe()
            self._turns += 1
            await asyncio.sleep(self._interval_s)


# Has health say, under a name of its own, whether this replica has weights to draw with.
#
# Consumes: the engine's load. Waits for: weights, for as long as the trainer takes. Unblocked
# by: a version that serves; it looks every so often. Produces: one named answer of health. On
# failure: a broken engine's error ends the replica. On shutdown: cancelled; the server then
# answers that nothing serves.
#
# The process as a whole is healthy before that: it has to be kept, and found, while it waits.

_HEALTH_INTERVAL_S = 0.5


class NotifyHealth(Protocol):
    """Where the answer goes; see `RpcServer.set_named`."""

    def __call__(self, *, serving: bool) -> Awaitable[None]:
        """What health answers from now on."""
        ...


class WeightsHealth:
    """Looks for ever.

    Args:
        load: the engine's latest counters.
        tell: takes each change, the first answer included.
        interval_s: between two looks.
    """

    def __init__(
        self,
        load: Callable[[], EngineLoad],
        notify: NotifyHealth,
        interval_s: float = _HEALTH_INTERVAL_S,
    ) -> None:
        self._load, self._notify, self._interval_s = load, notify, interval_s
        self._reported: bool | None = None

    async def run(self) -> None:
        """Never returns."""
        while True:
            has_weights = self._load().version is not None
            if has_weights is not self._reported:
                await self._notify(serving=has_weights)
                self._reported = has_weights
            await asyncio.sleep(self._interval_s)


# Keeps one replica registered with the trainer.
#
# Consumes the engine's load; waits for the trainer; unblocked by its answers or their deadlines;
# produces a registration and a heartbeat an interval; a lost trainer is tried again for ever (it
# may restart), a trainer that does not know the replica is registered with anew; on shutdown one
# last heartbeat says that the replica is draining.
#
# A trainer that is away for a moment is no news: it starts after its replicas and, at the end of
# a run, leaves before them.

logger = logging.getLogger(__name__)

_RETRY_INTERVAL_S = 0.5
_NEWS_AFTER_S = 10.0


class Registration:
    """Registers and sends heartbeats until cancelled.

    Args:
        stub: the trainer.
        replica: who we are.
        layout_digest: digest of the names, dtypes and shapes of our weights.
        load: the engine's latest counters.
        turns: questions that the engine's loop has answered; 0: nobody counts.
    """

    def __init__(
        self,
        stub: trainer_pb2_grpc.TrainerServiceAsyncStub,
        replica: ReplicaInfo,
        layout_digest: str,
        load: Callable[[], EngineLoad],
        turns: Callable[[], int] = lambda: 0,
    ) -> None:
        self._stub, self._replica, self._layout_digest = stub, replica, layout_digest
        self._load, self._turns = load, turns
        self._absence = _Absence()

    async def run(self) -> None:
        """Never returns; raises InvalidRequestError when the trainer refuses the replica."""
        while True:
            try:
                interval_s = await self._register()
                self._absence.end()
                await self._beat(interval_s)
            except NotFoundError:
                logger.info("the trainer does not know this replica; registering again")
            except (PeerError, DeadlineError) as error:
                self._absence.keep_waiting(error)
                await asyncio.sleep(_RETRY_INTERVAL_S)

    async def announce_drain(self) -> None:
        """Tells the trainer that this replica is going away; a lost trainer need not know."""
        try:
            await self._send_heartbeat(draining=True)
        except (NotFoundError, PeerError, DeadlineError) as error:
            logger.debug("the trainer was not told of the drain: %s", error)

    async def _register(self) -> float:
        answer = await unary_call(
            self._stub.RegisterReplica,
            trainer.RegisterReplicaRequest(
                replica=replica_to_proto(self._replica, 0),
                weights_layout_digest=self._layout_digest,
            ),
            name="TrainerService/RegisterReplica",
            peer="trainer",
            phase="registering a replica",
        )
        logger.info("registered as %s", self._replica.name)
        return answer.heartbeat_interval_seconds

    async def _beat(self, interval_s: float) -> None:
        while True:
            await self._send_heartbeat(draining=False)
            await asyncio.sleep(interval_s)

    async def _send_heartbeat(self, *, draining: bool) -> None:
        load = self._load()
        await unary_call(
            self._stub.Heartbeat,
            trainer.HeartbeatRequest(
                name=self._replica.name,
                instance_id=self._replica.instance_id,
                policy_version=load.version,
                **counters_to_fields(load, process_age_s()),
                draining=draining,
                engine_turns=self._turns(),
            ),
            name="TrainerService/Heartbeat",
            peer="trainer",
            phase="sending a heartbeat",
        )


class _Absence:
    """How long the trainer has been out of reach; told once, when it has lasted."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._is_reported = False
        self._wait: Wait | None = None

    def keep_waiting(self, error: SluiceError) -> None:
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        self._wait = self._wait or waiting_for("trainer", "coming back into reach")
        if now_s - self._since_s >= _NEWS_AFTER_S and not self._is_reported:
            logger.warning("trainer out of reach for %g s, trying on: %s", _NEWS_AFTER_S, error)
            self._is_reported = True

    def end(self) -> None:
        if self._is_reported:
            logger.info("the trainer is back")
        if self._wait is not None:
            self._wait.end()
        self._since_s, self._is_reported, self._wait = None, False, None
