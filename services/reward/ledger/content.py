"""The content of a ledger as values, and their encoding in its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from sluice.errors import InvalidRequestError
from sluice.types import (
    ChatMessage,
    DataProgress,
    Prompt,
    PromptEnd,
    PromptOrigin,
)

_DIGEST_BYTES = 16


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """The content of a prompt. MessagePack, in which `extra_info` also travels to the scorers: a
    prompt read back is graded as the one that was written."""

    messages: tuple[tuple[str, str], ...]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, object]
    place: str = ""


class _BodyWithImages(_Body, frozen=True, array_like=True):
    """The content of a prompt with images: the digests of the images, in order, which are stored
    beside it. Prompts without images have a `_Body`, as before there were images."""

    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class EndedPrompt:
    """A client's prompt that ended: the `digest` of its content, and its outcome."""

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
    """Encode the content of a prompt, and the digests of its images.

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
    """Return BLAKE2b of a body or an image, 16 bytes, to recognise what is sent again."""
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()
