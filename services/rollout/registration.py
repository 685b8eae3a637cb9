"""Keep one replica registered with the trainer, and report whether its engine answers and has
weights.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.rollout.engines.protocol import EngineLoad
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.api.trainer.v1 import trainer_pb2_grpc
from sluice.codec.messages import replica_to_proto
from sluice.errors import DeadlineError, NotFoundError, PeerError
from sluice.rpc.client import unary_call
from sluice.rpc.retries import Retries, RetryPolicy, is_absence
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


logger = logging.getLogger(__name__)

_RETRY_INTERVAL_S = 0.5
_WARNS_AFTER_S = 10.0
_FOREVER = RetryPolicy(first_s=_RETRY_INTERVAL_S, most_s=_RETRY_INTERVAL_S, patience_s=math.inf)


class Registration:
    """One replica's registration and heartbeats.

    Consumes: the engine's load. Waits for: the trainer. Unblocked by: its answers or their
    deadlines. Produces: a registration, and a heartbeat in each interval. On failure: it tries a
    lost trainer again without end, since the trainer may restart, and registers again with one that
    does not know the replica. On shutdown: one last heartbeat reports that the replica drains.

    A short absence of the trainer is normal: it starts after its replicas and, at the end of a run,
    leaves before them.

    Args:
        stub: the trainer.
        replica: this process.
        layout_digest: digest of the names, dtypes and shapes of its weights.
        load: returns the engine's latest counters.
        turns: returns the probes that the engine's loop has answered; 0: nobody counts.
    """

    def __init__(
        self,
        stub: trainer_pb2_grpc.TrainerServiceAsyncStub,
        replica: ReplicaInfo,
        layout_digest: str,
        load: Callable[[], EngineLoad],
        turns: Callable[[], int] = lambda: 0,
    ) -> None:
        self._stub = stub
        self._replica = replica
        self._layout_digest = layout_digest
        self._load = load
        self._turns = turns

    async def run(self) -> None:
        """Stay registered without end.

        Raises:
            InvalidRequestError: the trainer refuses the replica.
        """
        while True:
            retries = Retries(
                _FOREVER, "trainer", retries_on=is_absence, warns_after_s=_WARNS_AFTER_S
            )
            interval_s = await retries.call(self._register)
            try:
                while True:
                    await self._send_heartbeat(draining=False)
                    await asyncio.sleep(interval_s)
            except NotFoundError:
                logger.info("the trainer does not know this replica; registering again")
            except (PeerError, DeadlineError) as error:
                logger.debug("registering again after a failed heartbeat: %s", error)
                await asyncio.sleep(_RETRY_INTERVAL_S)

    async def announce_drain(self) -> None:
        """Report that this replica leaves. A trainer that is away need not know."""
        try:
            await self._send_heartbeat(draining=True)
        except (NotFoundError, PeerError, DeadlineError) as error:
            logger.debug("the trainer did not learn of the drain: %s", error)

    async def _register(self) -> float:
        answer = await unary_call(
            self._stub.RegisterReplica,
            trainer.RegisterReplicaRequest(
                replica=replica_to_proto(self._replica, 0),
                weights_layout_digest=self._layout_digest,
            ),
            peer="trainer",
            phase="registering a replica",
        )
        logger.info("registered as %s", self._replica.name)
        return answer.heartbeat_interval_seconds

    async def _send_heartbeat(self, *, draining: bool) -> None:
        load = self._load()
        await unary_call(
            self._stub.Heartbeat,
            trainer.HeartbeatRequest(
                name=self._replica.name,
                instance_id=self._replica.instance_id,
                policy_version=load.version,
                slots_busy=load.slots_busy,
                queued=load.queued,
                generated_tokens=load.generated_tokens,
                unsent_tokens=load.unsent_tokens,
                running_tokens=load.running_tokens,
                direct_sent_tokens=load.direct_sent_tokens,
                direct_unsent_tokens=load.direct_unsent_tokens,
                busy_seconds=load.busy_seconds,
                seconds_by_state=load.seconds_by_state,
                wall_seconds=process_age_s(),
                draining=draining,
                engine_turns=self._turns(),
            ),
            peer="trainer",
            phase="sending a heartbeat",
        )
