"""Serve RewardService: decode a request, call the service, encode the result."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import grpc

from services.reward.app import RewardApp
from services.reward.episodes.leases import LeaseManager
from services.reward.group_table import GroupState, PromptOutcome
from services.reward.groups.settings import validation_sampling
from services.reward.groups.validation import FinishedValidation, ValidationOrder
from services.reward.ledger.leases import PostedEnd
from services.reward.prompts.submissions import Receipt, SubmissionSession
from sluice import version_difference
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.api.reward.v1 import reward_pb2_grpc
from sluice.codec.bounds import check_fields
from sluice.codec.messages import (
    announced_from_proto,
    announced_to_proto,
    check_submitted_images,
    present_waits_to_proto,
)
from sluice.codec.reward import (
    PROMPT_END_TO_PROTO,
    chat_answer_to_proto,
    check_announcement,
    check_prompt,
    check_score,
    conversation_of,
    extra_info_of,
    lease_to_proto,
    progress_from_proto,
    reward_of,
    score_to_proto,
)
from sluice.codec.train_batch import outline_to_proto, pack_messages, sample_messages
from sluice.concurrency.waits import waiting_for
from sluice.config.schema.actor_rollout_ref import RolloutConfig
from sluice.config.schema.service import LimitsConfig
from sluice.data.scoring import ScorerInput
from sluice.errors import InvalidRequestError, LeaseEndedError, SluiceError
from sluice.rpc.metadata import caller_context, caller_of
from sluice.rpc.policy import CALL_POLICIES
from sluice.security.token_file import TokenSource
from sluice.telemetry.tracing import TRACER
from sluice.types import ChatMessage, Failed, Prompt, PromptOrigin, Scored
from sluice.vision.image_limits import DEFAULT_LIMITS, ImageLimits

logger = logging.getLogger(__name__)

ANSWER_MARGIN_S = 0.5
"""Seconds before the caller's deadline at which a wait ends with an error that names its cause."""

_REPLACED = (
    "TakeSamples sends images and experts with their samples; use the protocol files of the "
    "service's version"
)

Context = grpc.aio.ServicerContext[Any, Any]


class _HasDeadline(Protocol):
    def time_remaining(self) -> float | None: ...


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Serves the reward service over gRPC.

    Args:
        app: the service's parts.
        rollout: default parameters of validation sampling.
        max_response_length: longest response, tokens.
        limits: limits of clients' messages.
        images: limits of images; ``None`` if the model reads none.
        tokens: the accepted tokens, which identify clients; ``None`` lets clients name themselves.
    """

    def __init__(
        self,
        app: RewardApp,
        rollout: RolloutConfig,
        max_response_length: int,
        limits: LimitsConfig | None = None,
        tokens: TokenSource | None = None,
        images: ImageLimits | None = DEFAULT_LIMITS,
    ) -> None:
        self._app, self._rollout, self._limits = app, rollout, limits or LimitsConfig()
        self._max_response_length, self._tokens = max_response_length, tokens
        self._images = images
        self._trainer = ""  # the trainer instance that announced last

    async def SubmitPrompts(  # type: ignore[override]
        self, request_iterator: AsyncIterator[reward.SubmitPromptsRequest], context: Context
    ) -> None:
        """Send a receipt when a prompt is in the ledger, and its outcome when it ends."""
        client = caller_of(context, self._tokens)
        with (
            self._app.submissions.session(client) as session,
            TRACER.within(caller_context(context)),
        ):
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(
                    self._read_prompts(request_iterator, session), name="submitted prompts"
                )
                await self._write_events(session, context)
                reading.cancel()  # the service ends, but the client may send nothing for hours
        # Raise it when no write is running: gRPC accepts no status during a write.
        if not reading.cancelled() and (refusal := reading.result()) is not None:
            raise refusal

    async def TakeBatch(
        self, request: reward.TakeBatchRequest, context: Context
    ) -> reward.TakeBatchResponse:
        """Lease the next train batch."""
        check_fields(request)
        batch = await self._app.loop.batches.take(
            request.step, request.policy_version, _seconds(context, "TakeBatch")
        )
        await self._app.ledger.durable()
        message = outline_to_proto(batch)
        for group in message.groups:
            group.traceparent = self._app.traces.traceparent(group.prompt_id)
        return reward.TakeBatchResponse(batch=message)

    async def TakeSamples(  # type: ignore[override]
        self, request: reward.TakeSamplesRequest, context: Context
    ) -> None:
        """Send samples of the leased batch and their prompts."""
        check_fields(request)
        batch = self._app.loop.batches.batch(request.batch_id)
        for message in pack_messages(sample_messages(batch, request.rows)):
            with waiting_for("trainer", "taking samples of a batch"):
                await context.write(message)

    async def TakeImages(  # type: ignore[override]
        self, request: reward.TakeImagesRequest, context: Context
    ) -> None:
        """Refuse the call of earlier releases."""
        raise InvalidRequestError(_REPLACED)

    async def TakeRouting(  # type: ignore[override]
        self, request: reward.TakeRoutingRequest, context: Context
    ) -> None:
        """Refuse the call of earlier releases."""
        raise InvalidRequestError(_REPLACED)

    async def AcknowledgeBatch(
        self, request: reward.AcknowledgeBatchRequest, context: Context
    ) -> reward.AcknowledgeBatchResponse:
        """Close a lease."""
        check_fields(request)
        groups = self._app.loop.batches.acknowledge(request.batch_id, request.step)
        # Before `durable`: a call that repeats this one, after a slow disk, gets no groups to
        # write.
        await self._app.dumps.write_trained(groups, request.step)
        await self._app.ledger.durable()
        return reward.AcknowledgeBatchResponse()

    async def AnnouncePolicy(
        self, request: reward.AnnouncePolicyRequest, context: Context
    ) -> reward.AnnouncePolicyResponse:
        """Adopt a version and its fleet."""
        check_announcement(request)
        is_new = request.trainer_instance_id != self._trainer
        if is_new and (mismatch := version_difference(request.sluice_version)):
            logger.warning("trainer %s %s", request.trainer_instance_id, mismatch)
        self._trainer = request.trainer_instance_id
        await self._app.loop.announce(
            request.trainer_instance_id,
            request.policy_version,
            [announced_from_proto(replica) for replica in request.replicas],
            progress_from_proto(request.resume_from) if request.HasField("resume_from") else None,
            request.rolled_back_to if request.HasField("rolled_back_to") else None,
        )
        await self._app.ledger.durable()
        return reward.AnnouncePolicyResponse()

    async def Score(self, request: reward.ScoreRequest, context: Context) -> reward.ScoreResponse:
        """Grade responses."""
        self._app.score_requests.check_size(len(request.items))
        check_score(request)
        items = [self._item(item, index) for index, item in enumerate(request.items)]
        client = caller_of(context, self._tokens)
        outcomes = await self._app.score_requests.score(items, client)
        return reward.ScoreResponse(results=[_result_to_proto(outcome) for outcome in outcomes])

    async def Evaluate(
        self, request: reward.EvaluateRequest, context: Context
    ) -> reward.EvaluateResponse:
        """Validate the announced version, or one that replicas are held at."""
        with TRACER.unrecorded():
            result = await self._app.validation.run(
                self._order_from_proto(request), _seconds(context, "Evaluate")
            )
        return _validation_to_proto(result)

    async def LeaseSamples(
        self, request: reward.LeaseSamplesRequest, context: Context
    ) -> reward.LeaseSamplesResponse:
        """Lease samples to a program."""
        check_fields(request)
        async with self._leases().leasing(
            request.count, request.wait_s, request.holder, request.keep_alive_s
        ) as episodes:
            # Before the wait: if a group is given up during it, its leases are refused later.
            leases = [
                lease_to_proto(
                    episode.task.prompt,
                    lease_id=episode.lease_id,
                    sample_index=episode.task.sample_index,
                    deadline_s=episode.task.timeout_s,
                )
                for episode in episodes
            ]
            await self._app.ledger.durable()
        return reward.LeaseSamplesResponse(leases=leases)

    async def Chat(self, request: reward.ChatRequest, context: Context) -> reward.ChatResponse:
        """Answer the program that works on a sample."""
        messages, tools = conversation_of(request)
        with waiting_for("reward loop", "answering an agent"):
            try:
                reply = await self._leases().chat(
                    request.lease_id,
                    request.request_digest,
                    messages,
                    tools,
                    request.ByteSize(),
                )
            except LeaseEndedError:  # programs rely on this, too
                await self._app.ledger.durable()
                raise
        await self._app.ledger.durable()
        return chat_answer_to_proto(
            reply.answer,
            reply.finish,
            num_read=reply.num_read,
            num_sampled=reply.num_sampled,
            turn=reply.turn,
        )

    async def EndEpisode(
        self, request: reward.EndEpisodeRequest, context: Context
    ) -> reward.EndEpisodeResponse:
        """Note how a program ended its sample."""
        end = PostedEnd(reward_of(request), request.failure)
        self._leases().end(request.lease_id, end)
        await self._app.ledger.durable()
        return reward.EndEpisodeResponse()

    async def GetStatus(
        self, request: reward.GetStatusRequest, context: Context
    ) -> reward.GetStatusResponse:
        """Return counters and waits."""
        return _status_to_proto(self._app)

    def _leases(self) -> LeaseManager:
        if self._app.leases is None:
            raise InvalidRequestError(
                "this run leases no samples; start it with sluice.environment.agents=true"
            )
        return self._app.leases

    def _submit(self, request: reward.SubmitPromptsRequest, session: SubmissionSession) -> None:
        limits = self._limits
        try:
            check_prompt(request, limits.max_prompt_turns)
            check_submitted_images(request, self._images)
            prompt = _prompt_from_proto(
                request,
                extra_info_of(request.extra_info, "extra_info", limits.max_extra_info_kb << 10),
            )
        except InvalidRequestError as error:
            session.put(Receipt.refusal(request.prompt_id, error))
            return
        self._app.submissions.submit(prompt, session)

    async def _read_prompts(
        self, requests: AsyncIterator[reward.SubmitPromptsRequest], session: SubmissionSession
    ) -> SluiceError | None:
        """Read all requests of the client; return the reason if they end early."""
        try:
            async for request in requests:
                await session.wait_to_receive()
                if session.is_ended:
                    return None
                self._submit(request, session)
        except SluiceError as error:
            session.end()
            return error
        session.close_input()
        return None

    async def _write_events(self, session: SubmissionSession, context: Context) -> None:
        while (event := await session.next_event()) is not None:
            await context.write(_event_to_proto(event))
            if isinstance(event, Receipt):
                self._app.traces.receipt_sent(event.prompt_id)

    def _item(self, item: reward.ScoreItem, index: int) -> ScorerInput:
        extra_info = extra_info_of(
            item.extra_info, f"items[{index}].extra_info", self._limits.max_extra_info_kb << 10
        )
        return ScorerInput(
            item.data_source, item.response, item.ground_truth, extra_info, item.question
        )

    def _order_from_proto(self, request: reward.EvaluateRequest) -> ValidationOrder:
        check_fields(request)
        temperature = request.temperature if request.HasField("temperature") else None
        num_samples = request.n if request.HasField("n") else self._rollout.val_kwargs.n
        return ValidationOrder(
            request.policy_version,
            num_samples,
            validation_sampling(self._rollout, self._max_response_length, temperature),
            request.examples,
        )


def _seconds(context: _HasDeadline, method: str) -> float:
    """Return how long a call may take for its error to arrive before the caller gives up,
    seconds."""
    remaining = context.time_remaining()
    if remaining is None:
        return CALL_POLICIES[f"RewardService/{method}"].deadline_s
    return max(remaining - min(ANSWER_MARGIN_S, 0.1 * remaining), 0.0)


def _prompt_from_proto(
    request: reward.SubmitPromptsRequest, extra_info: Mapping[str, object]
) -> Prompt:
    return Prompt(
        prompt_id=request.prompt_id,
        sequence=0,  # the ledger numbers it
        messages=tuple(ChatMessage(turn.role, turn.content) for turn in request.messages),
        data_source=request.data_source,
        ground_truth=request.ground_truth,
        origin=PromptOrigin.CLIENT,
        position=None,
        extra_info=extra_info,
        images=tuple(request.images),
    )


def _event_to_proto(event: Receipt | PromptOutcome) -> reward.SubmitPromptsResponse:
    if isinstance(event, Receipt):
        receipt = reward.PromptReceipt(
            prompt_id=event.prompt_id,
            sequence=event.sequence,
            refused_because=event.refused_because,
            retryable=event.is_retryable,
        )
        return reward.SubmitPromptsResponse(receipt=receipt)
    outcome = reward.PromptOutcome(
        prompt_id=event.prompt_id,
        end=PROMPT_END_TO_PROTO[event.end],
        step=event.step,
        rewards=event.rewards,
        detail=event.detail,
        samples=event.samples,
    )
    return reward.SubmitPromptsResponse(outcome=outcome)


def _result_to_proto(outcome: Scored | Failed) -> reward.ScoreResult:
    if isinstance(outcome, Failed):
        return reward.ScoreResult(failure=f"{outcome.kind}: {outcome.detail}")
    return reward.ScoreResult(score=score_to_proto(outcome))


def _validation_to_proto(result: FinishedValidation) -> reward.EvaluateResponse:
    return reward.EvaluateResponse(
        metrics=result.metrics,
        examples=[
            reward.EvaluationExample(
                prompt=example.prompt,
                response=example.response,
                ground_truth=example.ground_truth,
                score=example.score,
            )
            for example in result.examples
        ],
        generated_tokens=result.num_generated_tokens,
        standard_errors=result.standard_errors,
    )


def _status_to_proto(app: RewardApp) -> reward.GetStatusResponse:
    loop, ledger = app.loop, app.ledger
    awaited = loop.waits().values()
    replicas: list[common.Replica] = [
        announced_to_proto(replica) for replica in app.queue.fleet.announced
    ]
    return reward.GetStatusResponse(
        prompts_submitted=ledger.num_submitted,
        prompts_by_end={end.value: count for end, count in ledger.by_end.items()},
        prompts_pending=len(app.groups),
        groups_generating=app.groups.counts[GroupState.GENERATING],
        groups_grading=app.groups.counts[GroupState.GRADING],
        groups_kept=app.groups.num_kept,
        dataset_rows=app.dataset_rows,
        policy_version=app.groups.policy_version,
        replicas=replicas,
        awaited=[
            reward.Awaited(peer=wait.peer, phase=wait.phase, seconds=wait.seconds)
            for wait in awaited
        ],
        statistics=app.statistics(),
        wait_report=present_waits_to_proto(awaited),
    )
