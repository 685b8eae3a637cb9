"""What images of a request must fulfil before any of them is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sluice.errors import InvalidRequestError
from sluice.vision.image_limits import ImageLimits, check_images

if TYPE_CHECKING:
    from sluice.api.common.v1 import common_pb2 as common
    from sluice.api.reward.v1 import reward_pb2 as reward

__all__ = ["check_chat_images", "check_submitted_images", "check_taken_images"]


def check_chat_images(prompt: common.ChatPrompt, limits: ImageLimits) -> None:
    """Images of a prompt to generate from: within the limits, one for each mark.

    Raises:
        InvalidRequestError: names the image, the value and the remedy.
    """
    texts = (turn.content for turn in prompt.messages)
    check_images("prompt.chat.images", prompt.images, texts, limits)


def check_submitted_images(
    request: reward.SubmitPromptsRequest, limits: ImageLimits | None
) -> None:
    """Images of a prompt to train on, as `check_chat_images`.

    Args:
        request: the prompt.
        limits: of images; ``None``: the run reads none.

    Raises:
        InvalidRequestError: names the image, the value and the remedy.
    """
    if limits is not None:
        texts = (turn.content for turn in request.messages)
        check_images("images", request.images, texts, limits)
    elif request.images:
        raise InvalidRequestError(
            f"images: {len(request.images)} given, and this run reads text alone; send prompts "
            "without images, or train Qwen2-VL, Qwen2.5-VL or Qwen3-VL with the engine torch or "
            "vllm and without a critic"
        )


def check_taken_images(group: reward.TrainGroup, images: Sequence[bytes]) -> None:
    """As many images for a group of a batch as it said. Raises InvalidRequestError."""
    if len(images) != group.num_images:
        raise InvalidRequestError(
            f"group {group.prompt_id}: {len(images)} images came for the {group.num_images} that "
            "its prompt has"
        )
