"""Images travel as they are: with prompts, and with the groups of a batch or apart from them."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.codec.messages import check_chat_images, check_submitted_images
from sluice.codec.rollout import chat_prompt_to_proto
from sluice.errors import InvalidRequestError
from sluice.types import ChatMessage
from sluice.vision.image_limits import ImageLimits
from tests.support.image_files import png

LIMITS = ImageLimits(max_images=2, max_bytes=1000, max_total_bytes=1500, max_pixels=100)
IMAGES = st.lists(st.binary(max_size=20), max_size=3).map(tuple)


def test_a_prompt_takes_its_images_along() -> None:
    prompt = chat_prompt_to_proto([ChatMessage("user", "<image>?")], [b"a"])
    assert list(prompt.chat.images) == [b"a"]
    assert not chat_prompt_to_proto([ChatMessage("user", "?")]).chat.images


def chat(text: str, *images: bytes) -> common.ChatPrompt:
    turns = [common.ChatMessage(role="user", content=text)]
    return common.ChatPrompt(messages=turns, images=images)


HOSTILE = [
    ("<image>" * 3, (png(),) * 3, "3 images; sluice.limits.max_prompt_images allows 2"),
    ("none", (png(),), "1 images for 0 times <image>"),
    ("<image>", (b"",), "[0]: 0 bytes"),
    ("<image>", (b"GIF89a" + bytes(40),), "[0]: 46 bytes that begin with b'GIF89a"),
    ("<image>", (png()[:-20],), "[0]: a PNG that is cut short"),
    ("<image>", (png(claims=(60_000, 60_000)),), "[0]: 60000 x 60000 pixels"),
    ("<image>", (png() + bytes(1000),), "sluice.limits.max_image_mb"),
    ("<image><image>", (png() + bytes(800),) * 2, "sluice.limits.max_prompt_images_mb"),
]


@pytest.mark.parametrize(("text", "images", "message"), HOSTILE)
def test_a_hostile_image_is_refused_at_both_doors(
    text: str, images: tuple[bytes, ...], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_chat_images(chat(text, *images), LIMITS)
    assert str(refused.value).startswith("prompt.chat.images")
    assert message in str(refused.value)
    submitted = reward.SubmitPromptsRequest(messages=chat(text).messages, images=images)
    with pytest.raises(InvalidRequestError) as refused:
        check_submitted_images(submitted, LIMITS)
    assert str(refused.value).startswith("images")
    assert message in str(refused.value)


def test_a_model_that_reads_text_alone_takes_no_image() -> None:
    request = reward.SubmitPromptsRequest(messages=chat("<image>").messages, images=[png()])
    check_submitted_images(request, LIMITS)
    with pytest.raises(InvalidRequestError, match=r"1 given, and this run is text-only; send"):
        check_submitted_images(request, None)
    del request.images[:]
    check_submitted_images(request, None)
