"""Prompts that a client submits for training, their events, and both as protos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluice.api.reward.v1 import reward_pb2
from sluice.client.generation_types import ChatWithImages, Image, encoded_images
from sluice.codec.messages import struct_to_proto
from sluice.codec.rollout import chat_prompt_to_proto
from sluice.errors import InvalidRequestError
from sluice.types import ChatMessage


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """A prompt to train on; `prompt_id` is unique in the run.

    `images` are encoded files (PNG, JPEG or WebP) or their paths, one for each ``<image>`` in the
    messages.
    `extra_info` is for the scorer: texts, finite numbers, lists and mappings with texts as keys.
    """

    prompt_id: str
    messages: tuple[ChatMessage, ...]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, object] = field(default_factory=dict)
    images: Sequence[Image] = ()


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """A receipt (``accepted``, ``refused``) or an outcome (``trained``, ``filtered_...``, ...).

    `is_retryable`: the service was full, and will have capacity as prompts end.
    """

    prompt_id: str
    event: str
    step: int | None
    rewards: tuple[float, ...]
    detail: str
    is_retryable: bool = False


def prompt_to_proto(prompt: NewPrompt) -> reward_pb2.SubmitPromptsRequest:
    """Encode a prompt to train on.

    Raises:
        InvalidRequestError: a text is not valid Unicode, `extra_info` cannot be sent, or an image
            is none.
        DataError: the file of an image cannot be read.
    """
    owner = f"prompt {prompt.prompt_id}"
    chat = ChatWithImages(prompt.messages, prompt.images)
    try:
        return reward_pb2.SubmitPromptsRequest(
            prompt_id=prompt.prompt_id,
            messages=chat_prompt_to_proto(prompt.messages).chat.messages,
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra_info=struct_to_proto(prompt.extra_info, f"{owner}: extra_info"),
            images=encoded_images(owner, chat),
        )
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{owner}: not valid Unicode: {error}") from error


def prompt_event(answer: reward_pb2.SubmitPromptsResponse) -> PromptEvent:
    """Decode a receipt or an outcome."""
    if answer.WhichOneof("event") == "receipt":
        receipt = answer.receipt
        event = "refused" if receipt.refused_because else "accepted"
        return PromptEvent(
            receipt.prompt_id, event, None, (), receipt.refused_because, receipt.retryable
        )
    outcome = answer.outcome
    name = reward_pb2.PromptEnd.Name(outcome.end).removeprefix("PROMPT_END_").lower()
    step = outcome.step if outcome.HasField("step") else None
    return PromptEvent(outcome.prompt_id, name, step, tuple(outcome.rewards), outcome.detail)
