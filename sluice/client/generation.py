"""Generate in spite of failures: another replica continues what a failed one began."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field

import numpy as np

from sluice.algorithm.growing_sample import GrowingSample
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.client.channels import ServiceChannels
from sluice.client.fleet import ClientFleet
from sluice.client.generation_types import (
    ChatWithImages,
    Continuation,
    GenerateOptions,
    GenerationEvent,
    GenerationStarted,
    Prompt,
    SampleDelta,
    SampleFinished,
    encode_images,
    is_conversation,
)
from sluice.codec.fields import shorten, token_ids_from_bytes, token_ids_to_bytes, valid_unicode
from sluice.codec.messages import template_kwargs_to_proto
from sluice.codec.rollout import (
    chat_prompt_to_proto,
    continuation_to_proto,
    new_tokens_from_proto,
    rollout_from_proto,
    rollout_to_proto,
    sampling_to_proto,
    scored_prompt_from_proto,
)
from sluice.errors import (
    DeadlineError,
    ExhaustedError,
    InvalidRequestError,
    PeerDefectError,
    PeerError,
    SluiceError,
)
from sluice.rpc.client import rollout_stub, stream_call
from sluice.rpc.retries import Retries, RetryPolicy
from sluice.types import ChatMessage, FinishReason, Rollout, SamplingParams, TokenIds, Tool

_SEED_BITS = 63
# A failed replica costs at most the tokens of this interval.
_PARTIAL_INTERVAL_MS = 500
_PHASE = "generating"
# A call without a deadline of the caller ends after a week.
_LONGEST_S = 604_800.0
_PEER = "the fleet"
_NO_TOKEN_IDS = "token ids must be unsigned integers of 32 bits"


@dataclass(slots=True, eq=False)
class _SampleProgress:
    grown: GrowingSample = field(default_factory=GrowingSample)
    sent_text: str = ""


class GenerationProgress:
    """The unfinished samples of one request: their tokens so far, and the request for the rest.

    Args:
        options: how to generate. Without a seed this class chooses one, so that a sample stays the
            same wherever it is continued.
    """

    def __init__(self, prompt: Prompt, options: GenerateOptions, *, every_token: bool) -> None:
        self._options = options
        self._every_token = every_token
        seed = options.sampling.seed
        # The same fields; only the seed is always set.
        self._sampling = SamplingParams(
            **asdict(options.sampling)
            | {"seed": secrets.randbits(_SEED_BITS) if seed is None else seed}
        )
        self._prompt = _prompt_to_proto(prompt, options)
        self._num_prompt_tokens = 0  # until a replica has accepted the prompt
        self._owes_prompt = options.prompt_logprobs
        first_index = options.first_sample
        self._open = {
            index: _SampleProgress() for index in range(first_index, first_index + options.n)
        }

    @property
    def num_open(self) -> int:
        """Return how many samples have not finished."""
        return len(self._open)

    @property
    def num_tokens(self) -> int:
        """Return how many of their tokens are known."""
        return sum(sample.grown.num_tokens for sample in self._open.values())

    @property
    def traceparent(self) -> str:
        """Return the caller's span; empty: none."""
        return self._options.traceparent

    def request(self) -> rollout.GenerateRequest:
        """Return the request for the rest of all open samples."""
        options = self._options
        return rollout.GenerateRequest(
            request_id=options.request_id,
            prompt=self._prompt,
            sample_indexes=self._open,
            sampling=sampling_to_proto(self._sampling),
            stream_mode=(
                rollout.STREAM_MODE_TOKENS if self._every_token else rollout.STREAM_MODE_SAMPLES
            ),
            partial_interval_ms=_PARTIAL_INTERVAL_MS,
            partials=[
                rollout_to_proto(sample.grown.rollout(index))
                for index, sample in self._open.items()
                if sample.grown.num_tokens
            ],
            priority=options.priority,
            # Each sample keeps its share of the first request.
            token_budget=options.token_budget // options.n * self.num_open,
            tool_format=options.tool_format,
            with_prompt_logprobs=self._owes_prompt,
        )

    def take(
        self, message: rollout.GenerateResponse, replica: str, moved_because: str
    ) -> Iterator[GenerationEvent]:
        """Take a message of a replica, and yield the client's events.

        Raises:
            PeerDefectError: no replica sends such a message.
        """
        try:
            if message.HasField("accepted"):
                yield self._started_event(message.accepted, replica, moved_because)
            if message.HasField("prompt_logprobs"):
                self._owes_prompt = False
                yield scored_prompt_from_proto(message.prompt_logprobs, self._num_prompt_tokens)
            for delta in message.deltas:
                yield from self._grow(delta)
            for finished in message.rollouts:
                yield from self._finish(rollout_from_proto(finished))
        except InvalidRequestError as error:  # the replica's mistake, not the caller's
            raise PeerDefectError(replica, "reading its samples", str(error)) from error

    def _sample(self, index: int) -> _SampleProgress:
        if not self._num_prompt_tokens or index not in self._open:
            raise InvalidRequestError(f"sample {index} is not awaited")
        return self._open[index]

    def _started_event(
        self, accepted: rollout.PromptAccepted, replica: str, moved_because: str
    ) -> GenerationStarted:
        ids = token_ids_from_bytes(accepted.prompt_token_ids_u32, "accepted.prompt_token_ids_u32")
        self._num_prompt_tokens = int(ids.size)
        if not self._prompt.chat.images:
            # The next replica continues these tokens, however it would tokenize the text.
            tools = self._options.tools
            self._prompt = (
                continuation_to_proto(ids, tools=tools) if tools else _tokens_to_proto(ids)
            )
        return GenerationStarted(ids, accepted.policy_version, replica, moved_because)

    def _grow(self, delta: rollout.TokenDelta) -> Iterator[SampleDelta]:
        tokens, sample = new_tokens_from_proto(delta), self._sample(delta.sample_index)
        sample.grown.append(tokens.token_ids, tokens.behavior_logprobs, tokens.version)
        if self._every_token:
            sample.sent_text += delta.text
            yield SampleDelta(
                delta.sample_index,
                tokens.token_ids,
                tokens.behavior_logprobs,
                tokens.version,
                delta.text,
            )

    def _finish(self, rollout: Rollout) -> Iterator[GenerationEvent]:
        sample = self._sample(rollout.sample_index)
        if rollout.finish_reason is FinishReason.ABORTED:  # the replica leaves: continue elsewhere
            sample.grown = GrowingSample()
            sample.grown.adopt(rollout)
            return
        if self._owes_prompt:
            raise InvalidRequestError("a sample without prompt_logprobs; update the replica")
        del self._open[rollout.sample_index]
        # Deltas may lack text, such as a character that two replicas share.
        if self._every_token and rollout.text.startswith(sample.sent_text):
            unsent_text = rollout.text[len(sample.sent_text) :]
            yield from [_text_delta(rollout, unsent_text)] if unsent_text else []
        yield SampleFinished(rollout)


def _text_delta(rollout: Rollout, text: str) -> SampleDelta:
    """Return text that no delta brought, of a sample continued in the middle of a character."""
    version = rollout.version_spans[-1].version if rollout.version_spans else 0
    return SampleDelta(
        rollout.sample_index, rollout.token_ids[:0], rollout.behavior_logprobs[:0], version, text
    )


def _prompt_to_proto(prompt: Prompt, options: GenerateOptions) -> common.PromptInput:
    message = _input_to_proto(prompt, options.tools)
    if options.add_special_tokens is not None:
        message.add_special_tokens = options.add_special_tokens
    arguments = template_kwargs_to_proto(options.chat_template_kwargs)
    kind = message.WhichOneof("input")
    if kind in ("chat", "continuation"):
        if arguments is not None:
            getattr(message, kind).template_kwargs.CopyFrom(arguments)
        return message
    for name, value in (
        ("chat_template_kwargs", dict(options.chat_template_kwargs)),
        ("tools", options.tools),
    ):
        if value:
            raise InvalidRequestError(
                f"{name}: {shorten(value)} for a prompt of {kind}; send turns, or leave it out"
            )
    return message


def _input_to_proto(prompt: Prompt, tools: Sequence[Tool]) -> common.PromptInput:
    with valid_unicode("prompt"):
        if isinstance(prompt, str):
            return common.PromptInput(text=prompt)
        if isinstance(prompt, ChatWithImages):
            return chat_prompt_to_proto(prompt.messages, encode_images("prompt", prompt), tools)
        if isinstance(prompt, Continuation):
            return continuation_to_proto(_token_ids(prompt.token_ids), prompt.messages, tools)
        if is_conversation(prompt):
            turns = [turn for turn in prompt if isinstance(turn, ChatMessage)]
            return chat_prompt_to_proto(turns, tools=tools)
    return _tokens_to_proto(_token_ids(prompt))


def _tokens_to_proto(ids: TokenIds) -> common.PromptInput:
    return common.PromptInput(tokens=common.TokenPrompt(token_ids_u32=token_ids_to_bytes(ids)))


def _token_ids(prompt: Prompt) -> TokenIds:
    try:
        ids = np.asarray(prompt)
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidRequestError(f"prompt: {_NO_TOKEN_IDS}: {error}") from error
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        defect = f"{ids.ndim} dimensions of {ids.dtype}"
        raise InvalidRequestError(f"prompt: {_NO_TOKEN_IDS}: {defect}")
    if ids.size and (ids.min() < 0 or ids.max() > np.iinfo(np.uint32).max):
        defect = f"they are in {ids.min()}..{ids.max()}"
        raise InvalidRequestError(f"prompt: {_NO_TOKEN_IDS}: {defect}")
    return ids.astype(np.uint32)


class _StallError(PeerError):
    """A replica accepted a request, and nothing came."""


class ResumableGeneration:
    """Generation on the replicas of a run."""

    def __init__(self, fleet: ClientFleet, channels: ServiceChannels, policy: RetryPolicy) -> None:
        self._fleet = fleet
        self._channels = channels
        self._policy = policy

    async def run(
        self, prompt: Prompt, options: GenerateOptions, *, every_token: bool
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Yield events until every sample has finished; see `AsyncClient.stream`."""
        progress = GenerationProgress(prompt, options, every_token=every_token)
        retries = Retries(self._policy, _PEER, _PHASE, deadline_s=options.deadline_s)
        moved_because = ""
        full: list[str] = []
        while progress.num_open:
            remaining_s = retries.remaining_s()
            num_tokens = progress.num_tokens
            try:
                once = self._generate_once(progress, remaining_s, moved_because, full)
                async with aclosing(once) as events:
                    async for event in events:
                        if isinstance(event, GenerationStarted):
                            retries.note_accepted()
                        else:
                            retries.note_progress()
                        yield event
            except SluiceError as error:
                if progress.num_tokens > num_tokens:  # of samples that are reported whole
                    retries.note_progress()
                if isinstance(error, _StallError):
                    retries.note_stall()
                moved_because = str(error)
                await retries.wait_after(error)

    async def _generate_once(
        self,
        progress: GenerationProgress,
        deadline_s: float | None,
        moved_because: str,
        full: list[str],
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Yield what one replica generates, to its end or failure; add a full one to `full`."""
        address = (await self._fleet.choose(full)).address
        request, num_known = progress.request(), progress.num_tokens
        self._channels.check_size("prompt", request)
        stream = stream_call(
            rollout_stub(self._channels.to(address)).Generate,
            request,
            peer=address,
            phase=_PHASE,
            deadline_s=min(_LONGEST_S if deadline_s is None else deadline_s, _LONGEST_S),
            traceparent=progress.traceparent,
        )
        try:
            with self._fleet.occupy(address, progress.num_open):
                async with aclosing(
                    _until_stalled(stream, address, self._policy.stall_s)
                ) as messages:
                    async for message in messages:
                        for event in progress.take(message, address, moved_because):
                            yield event
            # A replica that drains ends its samples as aborted; another one continues them.
            if progress.num_open:
                got = progress.num_tokens - num_known
                detail = f"it ended {progress.num_open} samples early, {got} tokens on"
                raise PeerError(address, _PHASE, detail)
        except ExhaustedError:
            # The next try uses another one, which may have capacity or another quota.
            full[:] = [full_address for full_address in full if full_address != address] + [address]
            raise
        except SluiceError as error:
            is_callers_deadline = isinstance(error, DeadlineError) and deadline_s is not None
            if not is_callers_deadline and not isinstance(error, InvalidRequestError):
                self._fleet.note_failed(address)
            raise


async def _until_stalled(
    stream: AsyncGenerator[rollout.GenerateResponse, None], address: str, stall_s: float
) -> AsyncGenerator[rollout.GenerateResponse, None]:
    """Yield the messages of a stream until it stalls.

    A hung engine keeps its connection open, so nothing else ends the wait for it. An engine that is
    busy with others' samples sends a sign of life.
    """
    async with aclosing(stream) as messages:
        while True:
            try:
                async with asyncio.timeout(stall_s):
                    message = await anext(messages)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                detail = f"it sent neither tokens nor a sign of life for {stall_s:g} s"
                raise _StallError(address, _PHASE, detail) from error
            yield message
