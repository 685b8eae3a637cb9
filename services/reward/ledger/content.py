"""The content of a ledger as values, and their encoding in its file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Self

import msgspec
import numpy as np

from services.reward.generation.request import ReceivedSamples
from sluice.errors import InvalidRequestError
from sluice.types import (
    ChatMessage,
    DataProgress,
    FinishReason,
    Logprobs,
    Prompt,
    PromptEnd,
    PromptOrigin,
    Rollout,
    TokenIds,
    VersionSpan,
)

_DIGEST_BYTES = 16


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """What a prompt says. MessagePack, in which `extra_info` also travels to the scorers: a prompt
    read back is graded as the one that was written."""

    messages: tuple[tuple[str, str], ...]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, object]
    place: str = ""


class _BodyWithImages(_Body, frozen=True, array_like=True):
    """That of a prompt with images, which are kept beside it: their digests, in order. Bodies of
    prompts without any are what they were before there were images."""

    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class EndedPrompt:
    """A client's prompt that ended: what it said (`digest`), and what its client is told."""

    sequence: int
    digest: bytes
    end: PromptEnd
    step: int | None
    rewards: tuple[float, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class OpenLease:
    """A batch for `version` that was given to the trainer and is not acknowledged yet."""

    batch_id: str
    version: int
    prompt_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LedgerContent:
    """A ledger at one moment.

    `ended` are the clients' prompts that ended last, oldest first; `acknowledged` the batches that
    were acknowledged last, oldest first; `num_acknowledged` counts groups of all of them; `trainer`
    is the instance that announced itself last; `strikes` are those of prompts by `prompt_key`.
    """

    next_sequence: int = 0
    pending: tuple[Prompt, ...] = ()
    ended: Mapping[str, EndedPrompt] = field(default_factory=dict)
    by_end: Mapping[PromptEnd, int] = field(default_factory=dict)
    progress: DataProgress = field(default_factory=lambda: DataProgress(0))
    lease: OpenLease | None = None
    acknowledged: tuple[str, ...] = ()
    num_acknowledged: int = 0
    trainer: str | None = None
    strikes: Mapping[str, int] = field(default_factory=dict)


def encode_body(prompt: Prompt) -> bytes:
    """What a prompt says, as bytes; of its images their digests.

    Raises:
        InvalidRequestError: `extra_info` holds a value without an encoding.
    """
    turns = tuple((turn.role, turn.content) for turn in prompt.messages)
    fields = (turns, prompt.data_source, prompt.ground_truth, prompt.extra_info, prompt.place)
    digests = tuple(body_digest(image) for image in prompt.images)
    try:
        return msgspec.msgpack.encode(
            _BodyWithImages(*fields, digests) if digests else _Body(*fields)
        )
    except (OverflowError, TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequestError(
            f"prompt '{prompt.prompt_id}': extra_info cannot be kept ({error}); send texts, "
            "numbers of 64 bits, lists and mappings"
        ) from error


def decode_prompt(
    prompt_id: str,
    sequence: int,
    position: int | None,
    body: bytes,
    images: tuple[bytes, ...] = (),
) -> Prompt:
    """The prompt of a body and its images.

    Raises:
        msgspec.MsgspecError: the bytes are no body.
        ValueError: the images are others.
    """
    found = msgspec.msgpack.decode(body, type=_BodyWithImages)
    if found.images != tuple(body_digest(image) for image in images):
        raise ValueError(f"prompt '{prompt_id}': its images are not those that were written")
    return Prompt(
        prompt_id=prompt_id,
        sequence=sequence,
        messages=tuple(ChatMessage(role, content) for role, content in found.messages),
        data_source=found.data_source,
        ground_truth=found.ground_truth,
        origin=PromptOrigin.CLIENT if position is None else PromptOrigin.DATASET,
        position=position,
        extra_info=found.extra_info,
        place=found.place,
        images=images,
    )


def body_digest(body: bytes) -> bytes:
    """BLAKE2b of a body or an image, 16 bytes: whether what is sent again says the same."""
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()


# What a ledger's file says of samples on their way: what came of them since it was last told.
#
# The parts of a sample, in their order, are the sample: each keeps the first `start` tokens of
# what the parts before it say and adds its own.

logger = logging.getLogger(__name__)

_TOKEN, _LOGPROB = np.dtype("<u4"), np.dtype("<f4")


class SamplePart(msgspec.Struct, frozen=True, array_like=True):
    """News of one sample.

    Args:
        sample_index: which.
        start: tokens of it that stay as they were told before.
        token_ids: those that follow, little-endian uint32.
        behavior_logprobs: theirs, little-endian float32.
        version_spans: of the whole sample: version, start, end.
        finish_reason: ``aborted`` while it grows.
        text: empty while it grows.
    """

    sample_index: int
    start: int
    token_ids: bytes
    behavior_logprobs: bytes
    version_spans: tuple[tuple[int, int, int], ...]
    finish_reason: str
    text: str

    @classmethod
    def of(cls, rollout: Rollout, start: int) -> Self:
        """A sample as it stands, of which the first `start` tokens are known."""
        return cls(
            rollout.sample_index,
            start,
            rollout.token_ids[start:].astype(_TOKEN).tobytes(),
            rollout.behavior_logprobs[start:].astype(_LOGPROB).tobytes(),
            tuple((span.version, span.start, span.end) for span in rollout.version_spans),
            rollout.finish_reason.value,
            rollout.text,
        )

    def after(self, before: Rollout | None) -> Rollout:
        """The sample that it makes of what was known.

        Raises:
            ValueError: it does not fit.
        """
        token_ids: TokenIds = np.frombuffer(self.token_ids, _TOKEN).astype(np.uint32)
        logprobs: Logprobs = np.frombuffer(self.behavior_logprobs, _LOGPROB).astype(np.float32)
        if self.start:
            if before is None or before.num_tokens < self.start:
                raise ValueError(f"sample {self.sample_index}: token {self.start} follows nothing")
            token_ids = np.concatenate([before.token_ids[: self.start], token_ids])
            logprobs = np.concatenate([before.behavior_logprobs[: self.start], logprobs])
        return Rollout(
            self.sample_index,
            token_ids,
            logprobs,
            tuple(VersionSpan(*span) for span in self.version_spans),
            FinishReason(self.finish_reason),
            self.text,
        )


class SampleParts(msgspec.Struct, frozen=True, array_like=True):
    """News of a prompt's samples; `digest` is a `request_digest`."""

    digest: bytes
    prompt_token_ids: bytes
    parts: tuple[SamplePart, ...]

    @classmethod
    def of(cls, digest: bytes, prompt_token_ids: TokenIds, parts: Iterable[SamplePart]) -> Self:
        """From values."""
        return cls(digest, prompt_token_ids.astype(_TOKEN).tobytes(), tuple(parts))

    @classmethod
    def whole(cls, samples: ReceivedSamples) -> Self:
        """All that is known, anew."""
        parts = (SamplePart.of(rollout, 0) for rollout in samples.rollouts)
        return cls.of(samples.digest, samples.prompt_token_ids, parts)

    def after(self, before: ReceivedSamples | None) -> ReceivedSamples:
        """What is known with them; samples that were asked for in another way are forgotten.

        Raises:
            ValueError: they do not fit.
        """
        is_same = before is not None and before.digest == self.digest
        known: dict[int, Rollout] = {}
        if before is not None and is_same:
            known = {rollout.sample_index: rollout for rollout in before.rollouts}
        for part in self.parts:
            known[part.sample_index] = part.after(known.get(part.sample_index))
        prompt_token_ids: TokenIds = np.frombuffer(self.prompt_token_ids, _TOKEN).astype(np.uint32)
        rollouts = tuple(known[index] for index in sorted(known))
        return ReceivedSamples(self.digest, prompt_token_ids, rollouts)


def encode_parts(parts: SampleParts) -> bytes:
    """As a ledger's file holds them."""
    return msgspec.msgpack.encode(parts)


def decode_samples(bodies: Iterable[tuple[str, bytes]]) -> dict[str, ReceivedSamples]:
    """Samples by prompt id, of encoded parts in their order.

    A prompt whose parts are damaged or do not fit has none: its samples are drawn again, which
    costs less than a ledger that nobody can open.
    """
    found: dict[str, ReceivedSamples] = {}
    damaged: set[str] = set()
    for prompt_id, body in bodies:
        if prompt_id in damaged:
            continue
        try:
            parts = msgspec.msgpack.decode(body, type=SampleParts)
            found[prompt_id] = parts.after(found.get(prompt_id))
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            logger.warning(
                "prompt %s: its saved samples cannot be used (%s) and are drawn again",
                *(prompt_id, error),
            )
            damaged.add(prompt_id)
            found.pop(prompt_id, None)
    return found
