"""The trainer's calls to the reward service. They wait out a service that is away for a while,
and announce the policy again to one that restarted. Announcements come one at a time, in order.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial

from services.trainer.fleet.members import Fleet
from services.trainer.loop.run_state import RunState
from services.trainer.metrics.sinks import Example, ValidationReport
from sluice import own_version
from sluice.algorithm.routing import AnnouncedReplica
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.api.reward.v1 import reward_pb2_grpc
from sluice.codec.messages import announced_to_proto
from sluice.codec.reward import progress_to_proto, service_progress
from sluice.codec.train_batch import outline_from_proto
from sluice.concurrency.waits import while_progressing
from sluice.config.addresses import peer_address
from sluice.config.derived import message_mb
from sluice.config.run import RunConfig
from sluice.errors import (
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PeerDefectError,
    PeerError,
    SluiceError,
)
from sluice.rpc.client import (
    RequestT,
    ResponseT,
    UnaryMethod,
    open_channel,
    reward_stub,
    unary_call,
)
from sluice.rpc.credentials import Credentials
from sluice.rpc.retries import Retries, RetryPolicy, is_absence
from sluice.types import DataProgress, TrainBatch

logger = logging.getLogger(__name__)

_PEER = "reward service"
# Each call for a batch ends after this long, so that progress can be checked.
_POLL_S = 15.0
_PAUSE_S = 0.5
_COUNTERS_WITHIN_S = 2.0
# If the service fails this many times during one validation, or while it sends the samples of one
# batch, that work is the cause.
_MAX_FAILURES = 6
# A service that answers INTERNAL this many times in a row does not recover without help.
_MAX_DEFECTS = 3
_COUNTS_OF_ITS_OWN = ("groups_acknowledged", "prompts_lost")


def _is_restart(error: SluiceError) -> bool:
    return isinstance(error, PeerError) and not isinstance(error, PeerDefectError)


class RewardClient:
    """Typed calls to the reward service.

    Args:
        instance_id: of this trainer process; a new one resets leases.
        batch_timeout_s: a wait for a batch or an evaluation fails after so many seconds without
            progress; the other calls, after so many with the service out of reach.
    """

    def __init__(
        self,
        stub: reward_pb2_grpc.RewardServiceAsyncStub,
        instance_id: str,
        batch_timeout_s: float,
    ) -> None:
        self._stub = stub
        self._instance_id = instance_id
        self._batch_timeout_s = batch_timeout_s
        self._announcement: Callable[[], reward.AnnouncePolicyRequest] | None = None
        self._announcing = asyncio.Lock()

    async def wait_until_up(self, timeout_s: float) -> int:
        """Wait until the service answers, and return the rows of the training data set.

        Raises:
            DeadlineError: it does not answer in time.
            PeerDefectError: it answered several times in a row that it is broken.
        """
        logger.info("waiting for the reward service")
        retries = Retries(
            _retry_policy(math.inf),
            _PEER,
            "starting",
            deadline_s=timeout_s,
            retries_on=is_absence,
            max_defects=_MAX_DEFECTS,
        )
        return (await retries.call(self._status)).dataset_rows

    async def announce(
        self,
        version: int,
        replicas: Sequence[AnnouncedReplica],
        progress: Callable[[], DataProgress | None] = lambda: None,
        rolled_back_to: int | None = None,
    ) -> None:
        """Announce the policy version, its replicas and the position in the data set.

        The announcement is repeated to a service that restarts before the next one.

        Args:
            replicas: those in use, each with its version.
            progress: returns the position in the data set; called for each announcement.
            rolled_back_to: the version has the weights of this earlier one, and what was sampled
                in between is dropped; ``None``: it was trained.

        Raises:
            DeadlineError, PeerError: the service was out of reach for `batch_timeout_s`, or
                answered several times in a row that it is broken.
        """
        reported = [announced_to_proto(replica) for replica in replicas]

        def request() -> reward.AnnouncePolicyRequest:
            position = progress()
            return reward.AnnouncePolicyRequest(
                trainer_instance_id=self._instance_id,
                policy_version=version,
                replicas=reported,
                resume_from=progress_to_proto(position) if position else None,
                rolled_back_to=rolled_back_to,
                sluice_version=own_version(),
            )

        self._announcement = request
        await self._retry_absence(self._announce, self._batch_timeout_s)

    async def take_batch(
        self,
        step: int,
        version: int,
        generated_tokens: Callable[[], int],
        take_samples: Callable[[TrainBatch, int], Awaitable[str]],
    ) -> TrainBatch:
        """Return the next batch, whose tokens are absent here.

        Wait while the service, or the fleet for it, makes progress. Cancelling the wait loses
        nothing: the next call returns the batch that is leased.

        Args:
            generated_tokens: returns the tokens that the fleet has generated so far.
            take_samples: lets the ranks read the samples of a batch for a step; returns why they
                did not come, to take the batch again.

        Raises:
            DataExhaustedError: the data set has ended before the batch was full.
            BatchUnfillableError: the service cannot fill any further batch.
            PeerError: the answer is no batch, or the samples were lost several times.
            PeerDefectError: the service answered several times in a row that it is broken.
            DeadlineError: nothing moved for `batch_timeout_s`. The error names the cause of the
                service's wait.
        """
        request = reward.TakeBatchRequest(step=step, policy_version=version)
        phase = f"taking the batch of step {step}"
        retries = Retries(
            _retry_policy(self._batch_timeout_s),
            _PEER,
            f"filling the batch of step {step}",
            retries_on=is_absence,
            max_defects=_MAX_DEFECTS,
        )
        losses = Retries(
            _retry_policy(math.inf), _PEER, phase, retries_on=is_absence, max_failures=_MAX_FAILURES
        )

        async def progress() -> str | None:
            of_service = await self._progress()
            # Tokens alone bring no batch while the service does not answer.
            return of_service and f"{generated_tokens()} {of_service}"

        while True:
            answer = await retries.call(
                lambda: self._call(self._stub.TakeBatch, request, phase, _POLL_S), progress
            )
            retries.note_progress()  # earlier failures must not count after a lost stream
            batch = _decode_batch(answer.batch, step)
            lost = await take_samples(batch, step)
            if not lost:
                return batch
            # The service restarted, or a stream broke: it leases the batch once more.
            await losses.wait_after(PeerError(_PEER, phase, lost), progress)

    async def acknowledge(self, batch_id: str, step: int) -> None:
        """Report a batch as trained. A service that restarted since has lost its lease.

        Raises:
            DeadlineError, PeerError: the service was out of reach for `batch_timeout_s`, or
                answered several times in a row that it is broken.
        """
        request = reward.AcknowledgeBatchRequest(batch_id=batch_id, step=step)
        call = partial(self._call, self._stub.AcknowledgeBatch, request, "acknowledging a batch")
        try:
            await self._retry_absence(call, self._batch_timeout_s)
        except NotFoundError as error:
            logger.warning("batch %s was trained but its lease is gone: %s", batch_id, error)

    async def evaluate(
        self, version: int, examples: int, generated_tokens: Callable[[], int]
    ) -> ValidationReport:
        """Validate a policy. Wait while the fleet or the service makes progress.

        Args:
            version: the announced policy version, or the one that replicas are held at.
            examples: most responses to return with the metrics.

        Raises:
            DeadlineError: nothing moved for `batch_timeout_s`, or the service went away for as
                long.
            SluiceError: the error that the service answered.
        """
        request = reward.EvaluateRequest(policy_version=version, examples=examples)
        phase = f"evaluating version {version}"
        retries = Retries(
            _retry_policy(self._batch_timeout_s),
            _PEER,
            phase,
            retries_on=_is_restart,
            max_failures=_MAX_FAILURES,
            warns_after_s=0.0,
        )

        async def progress() -> str:
            return f"{generated_tokens()} {await self._progress()}"

        async def evaluated() -> reward.EvaluateResponse:
            retries.note_progress()  # patience is for an absence; a validation may take any time
            return await while_progressing(
                self._call(self._stub.Evaluate, request, phase),
                progress,
                stall_s=self._batch_timeout_s,
                interval_s=min(_POLL_S, self._batch_timeout_s / 4),
                peer=_PEER,
                phase=phase,
            )

        answer = await retries.call(evaluated, self._progress)
        return ValidationReport(
            dict(answer.metrics),
            tuple(Example(e.prompt, e.response, e.ground_truth, e.score) for e in answer.examples),
            answer.generated_tokens,
            dict(answer.standard_errors),
        )

    async def accounts(self, patience_s: float | None = None) -> Mapping[str, float]:
        """Return prompt counts: submitted, pending, and one for each end.

        With them come ``groups_acknowledged``, groups of batches that trainers have acknowledged,
        and ``prompts_lost``, prompts that the service itself lost.

        Args:
            patience_s: most seconds to wait for an absent service; ``None``: `batch_timeout_s`.

        Raises:
            DeadlineError, PeerError: the service was out of reach for so long, or answered several
                times in a row that it is broken.
        """
        within_s = self._batch_timeout_s if patience_s is None else patience_s
        status = await self._retry_absence(self._status, within_s)
        return {
            "submitted": float(status.prompts_submitted),
            "pending": float(status.prompts_pending),
            **{name: float(count) for name, count in status.prompts_by_end.items()},
            **{name: status.statistics[f"reward/{name}"] for name in _COUNTS_OF_ITS_OWN},
        }

    async def counters(self) -> Mapping[str, float]:
        """Return the service's counters and gauges by metric name, from one short try.

        Raises:
            SluiceError: the service does not answer.
        """
        phase = "asking for its counters"
        request = reward.GetStatusRequest()
        answer = await self._call(self._stub.GetStatus, request, phase, _COUNTERS_WITHIN_S)
        return dict(answer.statistics)

    async def _retry_absence(
        self, call: Callable[[], Awaitable[ResponseT]], patience_s: float
    ) -> ResponseT:
        policy = _retry_policy(patience_s)
        retries = Retries(
            policy, _PEER, retries_on=is_absence, max_defects=_MAX_DEFECTS, warns_after_s=0.0
        )
        return await retries.call(call)

    async def _announce(self) -> object:
        """Announce the newest policy; an older one must not come after it."""
        async with self._announcing:
            assert self._announcement is not None
            request = self._announcement()
            return await self._call(self._stub.AnnouncePolicy, request, "announcing a policy")

    async def _status(self) -> reward.GetStatusResponse:
        request = reward.GetStatusRequest()
        return await self._call(self._stub.GetStatus, request, "asking for its status")

    async def _progress(self) -> str | None:
        """Return `service_progress`; None without an answer.

        A service that has restarted knows no policy and can do nothing without one, so this
        announces it again.
        """
        try:
            status = await self._status()
            if self._announcement is not None and not status.HasField("policy_version"):
                logger.warning("the reward service has restarted; announcing the policy again")
                await self._announce()
        except (DeadlineError, PeerError):
            return None
        return service_progress(status)

    async def _call(
        self,
        method: UnaryMethod[RequestT, ResponseT],
        request: RequestT,
        phase: str,
        deadline_s: float | None = None,
    ) -> ResponseT:
        return await unary_call(method, request, peer=_PEER, phase=phase, deadline_s=deadline_s)


class PolicyAnnouncer:
    """The reward service's knowledge of the current version and its replicas.

    A version is announced only after the batch that it was trained on is acknowledged, and never an
    older version after a newer one.

    Args:
        progress: returns the position in the data set, with the batch in hand counted as trained;
            read for each announcement. A restarted reward service continues there and samples no
            prompt of that batch again; a service that did not restart ignores it.
    """

    def __init__(
        self,
        reward: RewardClient,
        fleet: Fleet,
        state: RunState,
        progress: Callable[[], DataProgress | None],
    ) -> None:
        self._reward = reward
        self._fleet = fleet
        self._state = state
        self._progress = progress
        self._one_at_a_time = asyncio.Lock()
        self._last: tuple[int, tuple[AnnouncedReplica, ...]] | None = None
        self._rollback = (-1, -1)  # a version, and the one whose weights it has

    async def announce(
        self,
        *,
        preparation: Callable[[], Awaitable[None]] | None = None,
        rolled_back_to: int | None = None,
    ) -> None:
        """Announce a changed version or changed replicas; do nothing before the first version.

        Args:
            preparation: awaited first, while no other announcement can be made.
            rolled_back_to: the version has the weights of this earlier one. Later announcements of
                the same version repeat it, for a service that restarts.
        """
        async with self._one_at_a_time:
            if preparation is not None:
                await preparation()
            # Read under the lock: an announcement that had to wait reports the newest version.
            version = self._state.version
            if version is None:
                return
            current = (version, self._fleet.announced_replicas())
            if current == self._last:
                return
            if rolled_back_to is not None:
                self._rollback = (version, rolled_back_to)
            restored = self._rollback[1] if self._rollback[0] == version else None
            await self._reward.announce(*current, self._progress, restored)
            self._last = current


def _retry_policy(seconds: float) -> RetryPolicy:
    return RetryPolicy(first_s=_PAUSE_S, max_s=_PAUSE_S, patience_s=seconds)


def _decode_batch(message: reward.TrainBatch, step: int) -> TrainBatch:
    try:
        return outline_from_proto(message)
    except InvalidRequestError as error:
        detail = f"batch {message.batch_id}: {error}; the batch is refused and was not trained"
        raise PeerError(_PEER, f"handing out the batch of step {step}", detail) from error


async def connect_reward(
    config: RunConfig, credentials: Credentials, instance_id: str, stack: AsyncExitStack
) -> RewardClient:
    """Return a client of the run's reward service; `stack` closes its channel."""
    address = peer_address(config.sluice.reward.endpoint, "sluice.reward.endpoint")
    limit = message_mb(config) << 20
    channel = open_channel(address, max_message_bytes=limit, credentials=credentials)
    stub = reward_stub(await stack.enter_async_context(channel))
    return RewardClient(stub, instance_id, config.sluice.trainer.batch_timeout_s)
