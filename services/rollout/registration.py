"""Report a replica's state to the trainer and the health service: load, liveness of its engine, and
whether it has weights.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from services.rollout.engines.protocol import Engine, EngineLoad
from sluice import own_version
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.api.trainer.v1 import trainer_pb2_grpc
from sluice.codec.messages import counters_to_fields, replica_to_proto
from sluice.codec.weights import share_to_proto
from sluice.concurrency.process import process_age_s
from sluice.errors import DeadlineError, NotFoundError, PeerError
from sluice.rpc.client import unary_call
from sluice.rpc.retries import Retries, RetryPolicy, is_absence
from sluice.types import ReplicaInfo, layout_digest

_LIVENESS_INTERVAL_S = 1.0
_HEALTH_INTERVAL_S = 0.5
_RETRY_INTERVAL_S = 0.5
_FOREVER = RetryPolicy(first_s=_RETRY_INTERVAL_S, max_s=_RETRY_INTERVAL_S, patience_s=math.inf)
# A shorter absence is usual: a trainer starts after its replicas, and at the end of a run leaves
# before them.
_WARNS_AFTER_S = 10.0

logger = logging.getLogger(__name__)


async def report_weights(
    load: Callable[[], EngineLoad],
    notify: Callable[[bool], Awaitable[None]],
    interval_s: float = _HEALTH_INTERVAL_S,
) -> None:
    """Report to the health service, under a separate name, whether this replica has weights.

    The process as a whole is healthy before that: it must stay, and be found, while it waits.

    Consumes: the engine's load. Waits for: weights, as long as the trainer takes.
    Unblocked by: a version that serves; it looks at intervals.
    Produces: one named answer of health.
    On failure: a broken engine's error ends the replica.
    On shutdown: cancelled; the server then answers that nothing serves.

    Args:
        load: the engine's latest counters.
        notify: called with the first answer and each change.
        interval_s: seconds between two looks.
    """
    reported: bool | None = None
    while True:
        has_weights = load().version is not None
        if has_weights is not reported:
            await notify(has_weights)
            reported = has_weights
        await asyncio.sleep(interval_s)


class Registration:
    """A replica's membership in the trainer's fleet.

    Consumes: the engine's load. Waits for: the trainer.
    Unblocked by: its answers or their deadlines.
    Produces: a registration, and a heartbeat in each interval.
    On failure: it tries a lost trainer again without end, since the trainer may restart, and
        registers again with one that does not know the replica.
    On shutdown: one last heartbeat reports that the replica drains.

    Args:
        stub: the trainer.
        replica: this replica.
        engine: of the replica.

    Attributes:
        turns: liveness checks that the engine's loop has answered; the start counts.
    """

    def __init__(
        self, stub: trainer_pb2_grpc.TrainerServiceAsyncStub, replica: ReplicaInfo, engine: Engine
    ) -> None:
        self._stub = stub
        self._replica = replica
        self._engine = engine
        self.turns = 1

    async def check_engine(self, interval_s: float = _LIVENESS_INTERVAL_S) -> None:
        """Ask the loop that computes tokens, again and again, until cancelled.

        Args:
            interval_s: between an answer and the next check.
        """
        while True:
            await self._engine.check_alive()
            self.turns += 1
            await asyncio.sleep(interval_s)

    async def run(self) -> None:
        """Stay registered without end.

        Raises:
            InvalidRequestError: the trainer refuses the replica.
        """
        while True:
            retries = Retries(
                _FOREVER, "trainer", retries_on=is_absence, warns_after_s=_WARNS_AFTER_S
            )
            try:
                interval_s = await retries.call(self._register)
            except NotFoundError as error:  # a proxy's answer, not the trainer's
                logger.warning("registering again: %s", error)
                await asyncio.sleep(_RETRY_INTERVAL_S)
                continue
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
                weights_layout_digest=layout_digest(self._engine.weight_layout),
                shares=map(share_to_proto, self._replica.shares),
                sluice_version=own_version(),
            ),
            peer="trainer",
            phase="registering a replica",
        )
        logger.info("registered as %s", self._replica.name)
        return answer.heartbeat_interval_seconds

    async def _send_heartbeat(self, *, draining: bool) -> None:
        load = self._engine.load()
        await unary_call(
            self._stub.Heartbeat,
            trainer.HeartbeatRequest(
                name=self._replica.name,
                instance_id=self._replica.instance_id,
                policy_version=load.version,
                **counters_to_fields(load, process_age_s()),
                draining=draining,
                engine_turns=self.turns,
            ),
            peer="trainer",
            phase="sending a heartbeat",
        )
