"""Serve RolloutService and WeightSyncService on an engine: decode, call, encode, return."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from services.rollout.engines.protocol import (
    Engine,
    EngineLoad,
    GenerationRequest,
)
from services.rollout.engines.thread import ImageTurn
from services.rollout.generation import GenerationEvent, GenerationRunner, StreamSettings
from services.rollout.telemetry import trace_samples
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.api.rollout.v1 import rollout_pb2_grpc
from sluice.api.weights.v1 import weights_pb2 as weights
from sluice.api.weights.v1 import weights_pb2_grpc
from sluice.codec.bounds import MAX_PRIORITY, check_fields
from sluice.codec.fields import logprobs_to_bytes, token_ids_from_bytes, token_ids_to_bytes
from sluice.codec.messages import (
    check_chat_images,
    counters_to_fields,
    present_waits_to_proto,
    template_kwargs_from_proto,
)
from sluice.codec.rollout import (
    chat_messages_from_proto,
    check_client_priority,
    check_generate,
    check_partials,
    new_messages_from_proto,
    rollout_from_proto,
    rollout_to_proto,
    sampling_from_proto,
    scored_prompt_to_proto,
    within_budget,
    within_sequence,
)
from sluice.codec.tools import tools_from_proto
from sluice.codec.weights import (
    check_join,
    group_spec_from_proto,
)
from sluice.concurrency.process import process_age_s
from sluice.concurrency.waits import Waiting, waiting_for
from sluice.data.prompt_length import PromptLimit, check_context, check_sequence
from sluice.errors import InvalidRequestError, NotReadyError
from sluice.rpc.auth import ClientQuota
from sluice.rpc.metadata import caller_of, is_service_of_run, served_span
from sluice.security.token_file import TokenSource
from sluice.telemetry.tracing import SpanAttribute, SpanName, Timestamp
from sluice.types import Rollout, TokenIds, TransferCertificates
from sluice.vision.image_limits import DEFAULT_LIMITS, ImageLimits

if TYPE_CHECKING:
    import grpc

    from services.rollout.prompt_encoder import PromptEncoder

_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """This replica; `instance_id` is new at each process start."""

    name: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Limits of a prompt's images, and of their bytes in a client's running calls."""

    limits: ImageLimits = DEFAULT_LIMITS
    quota: ClientQuota | None = None


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Sampling.

    Args:
        identity: this replica.
        engine: the engine.
        encoder: the tokenizer.
        generation: runs requests.
        engine_name: for status.
        max_n: most samples in one call.
        training_prompts: limit for prompts of the run's own services, which are trained on; without
            it, and for clients, only the model's context is a limit.
        quota: samples in a client's running calls; ``None``: any number.
        tokens: map tokens to client names; without them clients name themselves.
        max_client_priority: highest priority that clients may request.
        images: limits of images; by default the usual ones.
    """

    def __init__(  # noqa: PLR0913 - everything that a call needs
        self,
        identity: ReplicaIdentity,
        engine: Engine,
        encoder: PromptEncoder,
        generation: GenerationRunner,
        *,
        engine_name: str,
        max_n: int,
        training_prompts: PromptLimit | None = None,
        quota: ClientQuota | None = None,
        tokens: TokenSource | None = None,
        max_client_priority: int = MAX_PRIORITY,
        images: ImageRules | None = None,
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._encoder = encoder
        self._generation = generation
        self._engine_name = engine_name
        self._max_n = max_n
        self._quota = quota
        self._tokens = tokens
        self._training_prompts = training_prompts
        self._images = images or ImageRules()
        self._max_client_priority = max_client_priority
        self._measuring_images = ImageTurn()

    async def Generate(  # type: ignore[override]
        self, request: rollout.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Stream samples of one prompt."""
        check_generate(request, self._max_n)
        check_chat_images(request.prompt.chat, self._images.limits)
        partials = [rollout_from_proto(partial) for partial in request.partials]
        check_partials(partials, self._engine.max_model_len)
        client = caller_of(context, self._tokens)
        if client is not None:
            check_client_priority(request, self._max_client_priority)
        image_bytes = sum(map(len, request.prompt.chat.images))
        with (
            _hold_quota(self._quota, client, len(request.sample_indexes)),
            _hold_quota(self._images.quota, client, image_bytes),
            served_span(SpanName.SERVE, context) as span,
        ):
            span.set(
                {
                    SpanAttribute.REPLICA: self._identity.name,
                    SpanAttribute.REQUEST_ID: request.request_id,
                }
            )
            await self._generate(request, partials, context)

    async def _generate(
        self,
        request: rollout.GenerateRequest,
        partials: Sequence[Rollout],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        is_own = is_service_of_run(context, self._tokens)
        prompt_token_ids = await self._prompt_tokens(request, is_own=is_own)
        decoded = self._decode(request, prompt_token_ids, partials, is_own=is_own)
        # First of all the prompt's tokens: the caller may need them to continue elsewhere.
        await context.write(self._accepted_to_proto(request.prompt, decoded.prompt_token_ids))
        began = Timestamp.now()

        async def send(event: GenerationEvent) -> None:
            trace_samples(began, event.rollouts)
            with waiting_for("caller", "taking samples"):
                for message in _messages(event):
                    await context.write(message)

        await self._generation.run(decoded, self._stream_settings(request), send)

    async def GetStatus(
        self, request: rollout.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> rollout.GetStatusResponse:
        """Return load, capacity and version, by default from inside the engine's loop."""
        load = self._engine.load() if request.without_engine else await self._engine.check_alive()
        return rollout.GetStatusResponse(
            name=self._identity.name,
            instance_id=self._identity.instance_id,
            policy_version=load.version,
            weight_digest=load.weight_digest,
            slots=load.slots,
            **counters_to_fields(load, process_age_s()),
            engine=self._engine_name,
            wait_report=present_waits_to_proto(_first_weights(load)),
        )

    def _accepted_to_proto(
        self, prompt: common.PromptInput, prompt_ids: TokenIds
    ) -> rollout.GenerateResponse:
        version = self._engine.load().version
        if version is None:
            raise NotReadyError(f"{self._identity.name}: no weights yet; try another replica")
        earlier = len(prompt.continuation.token_ids_u32) // 4
        return rollout.GenerateResponse(
            accepted=rollout.PromptAccepted(
                prompt_token_ids_u32=token_ids_to_bytes(prompt_ids),
                policy_version=version,
                continued_text=self._encoder.decode(prompt_ids[earlier:]) if earlier else "",
            )
        )

    def _decode(
        self,
        request: rollout.GenerateRequest,
        prompt_token_ids: TokenIds,
        partials: Sequence[Rollout],
        *,
        is_own: bool,
    ) -> GenerationRequest:
        indexes, sampling = tuple(request.sample_indexes), request.sampling
        return GenerationRequest(
            request_id=request.request_id,
            prompt_token_ids=prompt_token_ids,
            sample_indexes=indexes,
            sampling=within_sequence(
                within_budget(
                    sampling_from_proto(
                        sampling,
                        default_seed=secrets.randbits(_SEED_BITS),
                        longest=self._engine.max_model_len,
                    ),
                    request.token_budget,
                    len(indexes),
                ),
                request.max_sequence_tokens,
                prompt_token_ids.size,
            ),
            priority=request.priority,
            partials=tuple(partials),
            images=tuple(request.prompt.chat.images),
            for_direct_client=not is_own,
            affinity=request.affinity,
            with_routing=request.with_routing,
            with_prompt_logprobs=request.with_prompt_logprobs,
        )

    async def _prompt_tokens(self, request: rollout.GenerateRequest, *, is_own: bool) -> TokenIds:
        """Return the whole prompt; a longer one of the run's own services may be cut, unless it has
        a bound of its own."""
        prompt, longest = request.prompt, self._engine.max_model_len
        max_tokens = request.max_sequence_tokens
        if max_tokens:
            earlier = len(prompt.continuation.token_ids_u32) // 4
            check_sequence(earlier, min(max_tokens, longest))
        ids = await self._encode_prompt(prompt)
        if max_tokens:
            check_sequence(ids.size, min(max_tokens, longest))
            return ids
        is_rendered = prompt.WhichOneof("input") in ("chat", "text")
        if is_own and self._training_prompts is not None and is_rendered:
            ids = self._training_prompts.fit(ids, has_images=bool(prompt.chat.images))
        check_context(ids.size, longest)
        return ids

    async def _encode_prompt(self, prompt: common.PromptInput) -> TokenIds:
        match prompt.WhichOneof("input"):
            case "chat":
                return await self._chat_tokens(prompt)
            case "text":
                adds = not prompt.HasField("add_special_tokens") or prompt.add_special_tokens
                return self._encoder.encode_text(prompt.text, add_special_tokens=adds)
            case "tokens":
                field = "prompt.token_ids_u32"
                return self._check_tokens(
                    token_ids_from_bytes(prompt.tokens.token_ids_u32, field), field
                )
            case "continuation":
                return self._continue_prompt(prompt.continuation)
            case _:
                raise InvalidRequestError(
                    "prompt: not set; send chat, text, tokens or a continuation"
                )

    def _continue_prompt(self, prompt: common.Continuation) -> TokenIds:
        field = "prompt.continuation.token_ids_u32"
        earlier = self._check_tokens(token_ids_from_bytes(prompt.token_ids_u32, field), field)
        # Before anything is rendered for tokens that are too many already.
        check_context(earlier.size, self._engine.max_model_len)
        return self._encoder.encode_continuation(
            earlier,
            new_messages_from_proto(prompt.messages),
            template_kwargs=template_kwargs_from_proto(prompt),
            tools=tools_from_proto(prompt.tools),
        )

    async def _chat_tokens(self, prompt: common.PromptInput) -> TokenIds:
        """Render a chat; with images in a thread, since measuring them is slow, one at a time."""
        encode = functools.partial(
            self._encoder.encode_chat,
            chat_messages_from_proto(prompt.chat.messages),
            tuple(prompt.chat.images),
            template_kwargs=template_kwargs_from_proto(prompt.chat),
            add_special_tokens=prompt.add_special_tokens,
            tools=tools_from_proto(prompt.chat.tools),
        )
        if not prompt.chat.images:
            return encode()
        return await self._measuring_images.read(len(prompt.chat.images), encode)

    def _check_tokens(self, ids: TokenIds, field: str) -> TokenIds:
        if ids.size == 0 or int(ids.max()) >= self._engine.vocab_size:
            raise InvalidRequestError(
                f"{field}: send 1 or more ids below {self._engine.vocab_size}"
            )
        return ids

    def _stream_settings(self, request: rollout.GenerateRequest) -> StreamSettings:
        interval_s = request.partial_interval_ms / 1000
        offered = request.prompt.chat.tools or request.prompt.continuation.tools
        answer_reader = None
        if offered or request.tool_format:
            answer_reader = functools.partial(
                self._encoder.read_answer,
                stops=tuple(request.sampling.stop),
                tool_format=request.tool_format,
                tools=tools_from_proto(offered),
            )
        return StreamSettings(
            every_token=request.stream_mode == rollout.STREAM_MODE_TOKENS,
            partial_interval_s=interval_s if interval_s > 0 else None,
            linger_s=request.linger_ms / 1000,
            read_answer=answer_reader,
        )


def _hold_quota(
    quota: ClientQuota | None, client: str | None, amount: int
) -> AbstractContextManager[None]:
    return nullcontext() if quota is None else quota.hold(client, amount)


def _first_weights(load: EngineLoad) -> tuple[Waiting, ...]:
    if load.version is not None:
        return ()
    return (Waiting("trainer", "sending the first weights", process_age_s()),)


def _messages(event: GenerationEvent) -> Iterator[rollout.GenerateResponse]:
    """Encode an event; each sample with experts in a message of its own: megabytes."""
    routed = [sample for sample in event.rollouts if sample.routing is not None]
    other_samples = [sample for sample in event.rollouts if sample.routing is None]
    if event.deltas or other_samples or event.engine_tokens is not None or event.scored_prompt:
        yield _event_to_proto(event, other_samples)
    for sample in routed:
        yield rollout.GenerateResponse(rollouts=[rollout_to_proto(sample)])


def _event_to_proto(event: GenerationEvent, samples: Sequence[Rollout]) -> rollout.GenerateResponse:
    return rollout.GenerateResponse(
        deltas=[
            rollout.TokenDelta(
                sample_index=delta.chunk.sample_index,
                token_ids_u32=token_ids_to_bytes(delta.chunk.token_ids),
                behavior_logprobs_f32=logprobs_to_bytes(delta.chunk.behavior_logprobs),
                policy_version=delta.chunk.version,
                text=delta.text,
            )
            for delta in event.deltas
        ],
        rollouts=[rollout_to_proto(sample) for sample in samples],
        engine_tokens=event.engine_tokens,
        prompt_logprobs=None
        if event.scored_prompt is None
        else scored_prompt_to_proto(event.scored_prompt),
    )


class WeightSyncServicer(weights_pb2_grpc.WeightSyncServiceServicer):
    """Weight updates of one engine; the engine holds all state.

    Args:
        engine: the engine.
        certificates: for the connection to the trainer's rendezvous store; none: without TLS.
    """

    def __init__(self, engine: Engine, certificates: TransferCertificates | None = None) -> None:
        self._engine = engine
        self._certificates = certificates

    async def JoinGroup(
        self, request: weights.JoinGroupRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> weights.JoinGroupResponse:
        """Join an epoch's transfer group."""
        check_join(request, self._engine.weight_layout)
        spec = replace(group_spec_from_proto(request), certificates=self._certificates)
        digest = await self._engine.join_group(spec)
        return weights.JoinGroupResponse(epoch=request.epoch, plan_digest=digest)

    async def StageUpdate(
        self, request: weights.StageUpdateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> weights.StageUpdateResponse:
        """Receive a version while generation continues."""
        check_fields(request)
        with served_span(SpanName.RECEIVE_WEIGHTS, context) as span:
            span.set({SpanAttribute.VERSION: request.policy_version})
            staged = await self._engine.stage(request.epoch, request.policy_version)
        return weights.StageUpdateResponse(
            policy_version=staged.version,
            digest=staged.digest,
            received_bytes=staged.received_bytes,
            seconds=staged.seconds,
        )

    async def CommitUpdate(
        self, request: weights.CommitUpdateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> weights.CommitUpdateResponse:
        """Swap the staged version in."""
        check_fields(request)
        with served_span(SpanName.SWAP_WEIGHTS, context) as span:
            span.set({SpanAttribute.VERSION: request.policy_version})
            stall_s = await self._engine.commit(
                request.epoch, request.policy_version, request.digest
            )
        return weights.CommitUpdateResponse(
            policy_version=request.policy_version, digest=request.digest, stall_seconds=stall_s
        )

    async def AbortUpdate(
        self, request: weights.AbortUpdateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> weights.AbortUpdateResponse:
        """Discard the staged weights."""
        check_fields(request)
        await self._engine.abort_update(request.epoch, request.reason)
        return weights.AbortUpdateResponse(policy_version=self._engine.load().version)

    async def Sleep(
        self, request: weights.SleepRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> weights.SleepResponse:
        """Free memory of a device that the trainer shares."""
        return weights.SleepResponse(asleep=await self._engine.sleep())
