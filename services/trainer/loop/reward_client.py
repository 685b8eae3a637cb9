"""The trainer's calls to the reward service."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

from services.trainer.metrics.step_metrics import Example, ValidationReport
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.api.reward.v1 import reward_pb2_grpc
from sluice.codec.messages import replica_to_proto
from sluice.codec.reward import progress_to_proto, train_batch_from_proto, with_group_images
from sluice.concurrency.deadlines import advance, while_progressing
from sluice.errors import (
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PeerDefectError,
    PeerError,
)
from sluice.rpc.client import stream_call, unary_call
from sluice.types import DataProgress, ReplicaInfo, TrainBatch

AnswerT = TypeVar("AnswerT")

logger = logging.getLogger(__name__)

_PEER = "reward service"
_POLL_S = 15.0
_PAUSE_S = 0.5
# Of a call whose service has died of something: five times is no accident.
_MAX_REPEATS = 5
# In a row; a service that answers in this way does not get well by itself.
_MAX_DEFECTS = 3


class RewardClient:
    """Typed calls with deadlines.

    Args:
        stub: the reward service.
        instance: of this trainer process; a new one resets leases.
        batch_timeout_s: seconds without any progress after which waiting for a batch or for an
            evaluation fails.
        absence_s: seconds the service may be out of reach when it has to be told something.
    """

    def __init__(
        self,
        stub: reward_pb2_grpc.RewardServiceAsyncStub,
        instance_id: str,
        batch_timeout_s: float,
        absence_s: float = 30.0,
    ) -> None:
        self._stub, self._instance_id = stub, instance_id
        self._batch_timeout_s, self._absence_s = batch_timeout_s, absence_s
        self._announced: Callable[[], reward.AnnouncePolicyRequest] | None = None

    async def wait_until_up(self, timeout_s: float) -> int:
        """Rows of the training data set, as soon as the service answers.

        Raises:
            DeadlineError: it does not answer in time.
            PeerDefectError: it answered several times in a row that it is broken.
        """
        ends_s, defects = time.monotonic() + timeout_s, 0
        while True:
            try:
                return (await self._status()).dataset_rows
            except (PeerError, DeadlineError) as error:
                defects = defects + 1 if isinstance(error, PeerDefectError) else 0
                if defects == _MAX_DEFECTS:
                    raise
                if time.monotonic() > ends_s:
                    raise DeadlineError(_PEER, "starting", timeout_s, str(error)) from error
            await asyncio.sleep(_PAUSE_S)

    async def announce(
        self,
        version: int,
        replicas: Sequence[ReplicaInfo],
        progress: Callable[[], DataProgress | None] = lambda: None,
    ) -> None:
        """Tells the current version, who serves it and where the data set stands.

        A service that starts anew before the next announcement is told this one again.

        Args:
            version: the current one.
            replicas: who serves it.
            progress: where the data set stands; asked each time this is told.

        Raises:
            DeadlineError, PeerError: the service was out of reach for `absence_s`.
        """
        reported = [replica_to_proto(replica, version) for replica in replicas]

        def request() -> reward.AnnouncePolicyRequest:
            stands_at = progress()
            return reward.AnnouncePolicyRequest(
                trainer_instance_id=self._instance_id,
                policy_version=version,
                replicas=reported,
                resume_from=progress_to_proto(stands_at) if stands_at else None,
            )

        self._announced = request
        await self._until_reached(lambda: self._announce(request()))

    async def take_batch(
        self, step: int, version: int, generated_tokens: Callable[[], int]
    ) -> TrainBatch:
        """The next batch. Waits as long as the service, or the fleet for it, makes progress.

        Cancelling the wait loses nothing: asked again, the service gives the batch it has leased.

        Args:
            step: to be trained with it.
            version: the announced one.
            generated_tokens: tokens the fleet has generated so far.

        Raises:
            DataExhaustedError: the data set has ended before the batch was full.
            BatchUnfillableError: it says that no batch can be filled any more.
            PeerError: what it sent is no batch.
            PeerDefectError: it answered several times in a row that it is broken.
            DeadlineError: nothing moved for `batch_timeout_s`, or none of the batch's images came
                for as long; says what the service waits for.
        """
        request = reward.TakeBatchRequest(step=step, policy_version=version)
        seen, seen_s, why, defects = "", time.monotonic(), "", 0
        while True:
            is_leased = False
            try:
                answer = await unary_call(
                    self._stub.TakeBatch,
                    request,
                    name="RewardService/TakeBatch",
                    peer=_PEER,
                    phase=f"taking the batch of step {step}",
                    deadline_s=_POLL_S,
                )
                is_leased = True
                images = await self._images(answer.batch, step)
            except (DeadlineError, PeerError) as error:
                defects = defects + 1 if isinstance(error, PeerDefectError) else 0
                if defects == _MAX_DEFECTS or (is_leased and isinstance(error, DeadlineError)):
                    raise
                why = str(error)
                if isinstance(error, PeerError):
                    await self._reported_again()
            else:
                return _decoded(answer.batch, images, step)
            now_s = time.monotonic()
            progress = await self._progress()
            # Tokens for a service that cannot be asked bring no batch.
            if progress and (progress := f"{generated_tokens()} {progress}") != seen:
                seen, seen_s = progress, now_s
                advance()
            if now_s - seen_s > self._batch_timeout_s:
                raise DeadlineError(_PEER, f"filling the batch of step {step}", now_s - seen_s, why)

    async def acknowledge(self, batch_id: str, step: int) -> None:
        """Reports a batch as trained; a service that lost the lease has restarted since.

        Raises:
            DeadlineError, PeerError: the service was out of reach for `absence_s`.
        """
        try:
            await self._until_reached(
                lambda: unary_call(
                    self._stub.AcknowledgeBatch,
                    reward.AcknowledgeBatchRequest(batch_id=batch_id, step=step),
                    name="RewardService/AcknowledgeBatch",
                    peer=_PEER,
                    phase="acknowledging a batch",
                )
            )
        except NotFoundError as error:
            logger.warning("batch %s was trained but its lease is gone: %s", batch_id, error)

    async def evaluate(
        self, version: int, examples: int, generated_tokens: Callable[[], int]
    ) -> ValidationReport:
        """Validates the announced policy. Waits as long as fleet or service make progress.

        Args:
            version: the announced one.
            examples: responses to bring along, at most.
            generated_tokens: tokens the fleet has generated so far.

        Raises:
            DeadlineError: nothing moved for `batch_timeout_s`.
            SluiceError: as the service failed.
        """
        request = reward.EvaluateRequest(policy_version=version, examples=examples)
        answer = await self._over_an_absence(lambda: self._evaluate(request, generated_tokens))
        return ValidationReport(
            dict(answer.metrics),
            tuple(Example(e.prompt, e.response, e.ground_truth, e.score) for e in answer.examples),
            answer.generated_tokens,
        )

    async def _evaluate(
        self, request: reward.EvaluateRequest, generated_tokens: Callable[[], int]
    ) -> reward.EvaluateResponse:
        async def progress() -> str:
            return f"{generated_tokens()} {await self._progress()}"

        phase = f"evaluating version {request.policy_version}"
        return await while_progressing(
            unary_call(
                self._stub.Evaluate,
                request,
                name="RewardService/Evaluate",
                peer=_PEER,
                phase=phase,
            ),
            progress,
            stall_s=self._batch_timeout_s,
            interval_s=min(_POLL_S, self._batch_timeout_s / 4),
            peer=_PEER,
            phase=phase,
        )

    async def accounts(self) -> Mapping[str, float]:
        """Prompt counts: submitted, pending, and one entry for each end.

        Where the service tells them: ``groups_acknowledged``, groups of batches that trainers have
        acknowledged, and ``prompts_lost``, prompts that it has lost itself.

        Raises:
            DeadlineError, PeerError: the service was out of reach for `absence_s`.
        """
        status = await self._until_reached(self._status)
        reported = {
            name: status.statistics[f"reward/{name}"]
            for name in ("groups_acknowledged", "prompts_lost")
            if f"reward/{name}" in status.statistics
        }
        ends = {name: float(count) for name, count in status.prompts_by_end.items()}
        return {
            "submitted": float(status.prompts_submitted),
            "pending": float(status.prompts_pending),
            **ends,
            **reported,
        }

    async def _images(self, batch: reward.TrainBatch, step: int) -> Mapping[str, Sequence[bytes]]:
        """Images of the batch's groups, by prompt id.

        Raises:
            PeerError: the lease is gone.
            DeadlineError: the next group's did not come within `batch_timeout_s`.
        """
        wanted = sum(group.num_images > 0 for group in batch.groups)
        if not wanted:
            return {}
        phase = f"taking the images of step {step}"
        stream = stream_call(
            self._stub.TakeImages,
            reward.TakeImagesRequest(batch_id=batch.batch_id),
            name="RewardService/TakeImages",
            peer=_PEER,
            phase=phase,
            deadline_s=(wanted + 1) * self._batch_timeout_s,  # the one below comes first
        )
        images: dict[str, Sequence[bytes]] = {}
        now_s, seconds = asyncio.get_running_loop().time, self._batch_timeout_s
        try:
            async with asyncio.timeout(seconds) as scope, aclosing(stream) as answers:
                async for answer in answers:
                    images[answer.prompt_id] = answer.images
                    scope.reschedule(now_s() + seconds)
                    advance()
        except NotFoundError as error:  # it has started anew since
            raise PeerError(_PEER, phase, str(error)) from error
        except TimeoutError as error:
            detail = f"{len(images)} of {wanted} groups' images had come"
            raise DeadlineError(_PEER, phase, seconds, detail) from error
        return images

    async def _announce(self, request: reward.AnnouncePolicyRequest) -> object:
        return await unary_call(
            self._stub.AnnouncePolicy,
            request,
            name="RewardService/AnnouncePolicy",
            peer=_PEER,
            phase="announcing a policy",
        )

    async def _until_reached(self, call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Repeats an idempotent call over a short absence of the service."""
        ends_s = time.monotonic() + self._absence_s
        is_reported = False
        while True:
            try:
                return await call()
            except (PeerError, DeadlineError) as error:
                if time.monotonic() > ends_s:
                    raise
                if not is_reported:
                    logger.warning("trying on for %g s: %s", self._absence_s, error)
                is_reported = True
            await asyncio.sleep(_PAUSE_S)

    async def _over_an_absence(self, call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Repeats a call that a service which has started anew since was working on."""
        for _ in range(_MAX_REPEATS):
            try:
                return await call()
            except PeerError as error:
                if isinstance(error, PeerDefectError) or not await self._reported_again():
                    raise
                logger.warning("asking once more: %s", error)
        return await call()

    async def _reported_again(self) -> bool:
        """Waits until the service answers, for `absence_s` at most; one that has started anew is
        told the policy, without which it can do nothing. Whether it answers."""
        ends_s = time.monotonic() + self._absence_s
        while time.monotonic() < ends_s:
            await asyncio.sleep(_PAUSE_S)
            if await self._progress():
                return True
        return False

    async def _status(self) -> reward.GetStatusResponse:
        return await unary_call(
            self._stub.GetStatus,
            reward.GetStatusRequest(),
            name="RewardService/GetStatus",
            peer=_PEER,
            phase="asking for its status",
        )

    async def _progress(self) -> str:
        """Something that differs whenever the service got on; empty when it cannot be asked."""
        try:
            status = await self._status()
            if self._announced is not None and not status.HasField("policy_version"):
                logger.warning("the reward service has started anew; it is told the policy again")
                await self._announce(self._announced())
        except (DeadlineError, PeerError):
            return ""
        ended = sorted(status.prompts_by_end.items())
        return f"{status.prompts_submitted} {ended} {status.groups_kept} {dict(status.statistics)}"


def _decoded(
    message: reward.TrainBatch, images: Mapping[str, Sequence[bytes]], step: int
) -> TrainBatch:
    try:
        with_group_images(message, images)
        return train_batch_from_proto(message)
    except InvalidRequestError as error:
        detail = f"batch {message.batch_id}: {error}; the batch is refused and was not trained"
        raise PeerError(_PEER, f"handing out the batch of step {step}", detail) from error
