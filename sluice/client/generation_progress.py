"""What is known of the samples of one request while replicas come and go."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sluice.algorithm.growing_sample import GrowingSample
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.client.generation_types import (
    GenerateOptions,
    GenerationEvent,
    GenerationStarted,
    Prompt,
    SampleDelta,
    SampleFinished,
    is_conversation,
)
from sluice.client.images import ChatWithImages, encoded_images
from sluice.codec.arrays import token_ids_from_bytes, token_ids_to_bytes
from sluice.codec.field_rules import shortened
from sluice.codec.rollout import (
    chat_prompt_to_proto,
    new_tokens_from_proto,
    rollout_from_proto,
    rollout_to_proto,
)
from sluice.codec.template_kwargs import template_kwargs_to_proto
from sluice.errors import InvalidRequestError, PeerDefectError
from sluice.types import ChatMessage, FinishReason, Rollout, TokenIds

_SEED_BITS = 63
_PARTIAL_INTERVAL_MS = 500


@dataclass(slots=True, eq=False)
class _Sample:
    grown: GrowingSample = field(default_factory=GrowingSample)
    sent_text: str = ""


class GenerationProgress:
    """The unfinished samples of one request: what was drawn of them, and how to ask for the rest.

    Args:
        prompt: what to generate from.
        options: what to draw. Without a seed one is drawn here, so that the samples stay the same
            wherever they are continued.
        every_token: tokens are told as they come.
    """

    def __init__(self, prompt: Prompt, options: GenerateOptions, *, every_token: bool) -> None:
        self._options, self._every_token = options, every_token
        seed = options.sampling.seed
        self._seed = secrets.randbits(_SEED_BITS) if seed is None else seed
        self._prompt, self._is_accepted = _prompt_to_proto(prompt, options), False
        first = options.first_sample
        self._open = {index: _Sample() for index in range(first, first + options.n)}

    @property
    def num_open(self) -> int:
        """Samples that have not finished."""
        return len(self._open)

    @property
    def num_tokens(self) -> int:
        """Tokens known of them."""
        return sum(sample.grown.num_tokens for sample in self._open.values())

    @property
    def traceparent(self) -> str:
        """The caller's span; empty: none."""
        return self._options.traceparent

    def request(self) -> rollout.GenerateRequest:
        """Asks for the rest of all samples that are open."""
        options = self._options
        return rollout.GenerateRequest(
            request_id=options.request_id,
            prompt=self._prompt,
            sample_indexes=self._open,
            sampling=self._sampling(),
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
            # The share of each sample is that of the first request.
            token_budget=options.token_budget // options.n * self.num_open,
        )

    def take(
        self, message: rollout.GenerateResponse, replica: str, moved_because: str
    ) -> Iterator[GenerationEvent]:
        """Takes on a message of a replica; what the client is told of it.

        Raises:
            PeerDefectError: the message is not what a replica sends.
        """
        try:
            if message.HasField("accepted"):
                yield self._started(message.accepted, replica, moved_because)
            for delta in message.deltas:
                yield from self._grow(delta)
            for finished in message.rollouts:
                yield from self._finish(rollout_from_proto(finished))
        except InvalidRequestError as error:  # its mistake, not that of the request
            raise PeerDefectError(replica, "reading its samples", str(error)) from error

    def _sample(self, index: int) -> _Sample:
        if not self._is_accepted or index not in self._open:
            raise InvalidRequestError(f"sample {index} is not awaited")
        return self._open[index]

    def _started(
        self, accepted: rollout.PromptAccepted, replica: str, moved_because: str
    ) -> GenerationStarted:
        self._is_accepted = True
        if not self._prompt.chat.images:
            # Continued from the very tokens, whatever the next replica makes of the text.
            self._prompt = common.PromptInput(
                tokens=common.TokenPrompt(token_ids_u32=accepted.prompt_token_ids_u32)
            )
        ids = token_ids_from_bytes(accepted.prompt_token_ids_u32, "accepted.prompt_token_ids_u32")
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

    def _finish(self, ended: Rollout) -> Iterator[GenerationEvent]:
        sample = self._sample(ended.sample_index)
        if ended.finish_reason is FinishReason.ABORTED:  # a replica that leaves: go on elsewhere
            sample.grown = GrowingSample()
            sample.grown.adopt(ended)
            return
        del self._open[ended.sample_index]
        if self._every_token and ended.text.startswith(sample.sent_text):
            rest = ended.text[len(sample.sent_text) :]
            yield from [_text_alone(ended, rest)] if rest else []
        yield SampleFinished(ended)

    def _sampling(self) -> common.SamplingParams:
        wanted = self._options.sampling
        return common.SamplingParams(
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            max_tokens=wanted.max_tokens,
            seed=self._seed,
            stop_token_ids=wanted.stop_token_ids,
            ignore_eos=wanted.ignore_eos,
            stop=wanted.stop,
        )


def _text_alone(ended: Rollout, text: str) -> SampleDelta:
    """Text that no delta brought: of a sample that was continued in the middle of a character."""
    version = ended.version_spans[-1].version if ended.version_spans else 0
    return SampleDelta(
        ended.sample_index, ended.token_ids[:0], ended.behavior_logprobs[:0], version, text
    )


def _prompt_to_proto(prompt: Prompt, options: GenerateOptions) -> common.PromptInput:
    message = _input_to_proto(prompt)
    if options.add_special_tokens is not None:
        message.add_special_tokens = options.add_special_tokens
    arguments = template_kwargs_to_proto(options.chat_template_kwargs)
    if arguments is not None:
        if not message.HasField("chat"):
            raise InvalidRequestError(
                f"chat_template_kwargs: {shortened(dict(options.chat_template_kwargs))} for a "
                f"prompt of {message.WhichOneof('input')}; send turns, or leave it out"
            )
        message.chat.template_kwargs.CopyFrom(arguments)
    return message


def _input_to_proto(prompt: Prompt) -> common.PromptInput:
    try:
        if isinstance(prompt, str):
            return common.PromptInput(text=prompt)
        if isinstance(prompt, ChatWithImages):
            return chat_prompt_to_proto(prompt.messages, encoded_images("prompt", prompt))
        if is_conversation(prompt):
            return chat_prompt_to_proto([turn for turn in prompt if isinstance(turn, ChatMessage)])
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"prompt: no text of Unicode: {error}") from error
    return common.PromptInput(
        tokens=common.TokenPrompt(token_ids_u32=token_ids_to_bytes(_token_ids(prompt)))
    )


def _token_ids(prompt: Prompt) -> TokenIds:
    try:
        ids = np.asarray(prompt)
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidRequestError(f"prompt: not token ids of 32 bits: {error}") from error
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        found = f"{ids.ndim} dimensions of {ids.dtype}"
        raise InvalidRequestError(f"prompt: not token ids of 32 bits: {found}")
    if ids.size and (ids.min() < 0 or ids.max() > np.iinfo(np.uint32).max):
        found = f"they are in {ids.min()}..{ids.max()}"
        raise InvalidRequestError(f"prompt: not token ids of 32 bits: {found}")
    return ids.astype(np.uint32)
