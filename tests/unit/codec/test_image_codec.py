"""Images travel as they are: with prompts, and with the groups of a batch or apart from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.codec.messages import check_chat_images, check_submitted_images
from sluice.codec.reward import (
    group_images_to_proto,
    train_batch_from_bytes,
    train_batch_from_proto,
    train_batch_to_bytes,
    train_batch_to_proto,
    with_group_images,
)
from sluice.codec.rollout import chat_prompt_to_proto
from sluice.errors import InvalidRequestError
from sluice.types import ChatMessage, DataProgress, TrainBatch, TrainGroup
from sluice.vision.image_limits import ImageLimits
from tests.support.image_files import png

LIMITS = ImageLimits(max_images=2, max_bytes=1000, max_total_bytes=1500, max_pixels=100)
IMAGES = st.lists(st.binary(max_size=20), max_size=3).map(tuple)


def batch_of(*images: tuple[bytes, ...]) -> TrainBatch:
    ids = np.arange(3, dtype=np.uint32)
    groups = tuple(
        TrainGroup(f"p{i}", ids, (), (), "source", images=each) for i, each in enumerate(images)
    )
    return TrainBatch("b", 1, groups, DataProgress(0), {})


@given(st.lists(IMAGES, max_size=4))
def test_a_batch_as_bytes_keeps_its_images(images: list[tuple[bytes, ...]]) -> None:
    found = train_batch_from_bytes(train_batch_to_bytes(batch_of(*images)))
    assert [group.images for group in found.groups] == images


@given(st.lists(IMAGES, max_size=4))
def test_a_batch_whose_images_came_apart_is_the_whole_batch(
    images: list[tuple[bytes, ...]],
) -> None:
    batch = batch_of(*images)
    message = train_batch_to_proto(batch, with_images=False)
    assert not any(group.images for group in message.groups)
    apart = list(group_images_to_proto(batch))
    assert len(apart) == sum(bool(each) for each in images)
    with_group_images(message, {answer.prompt_id: answer.images for answer in apart})
    found = train_batch_from_proto(message)
    assert [group.images for group in found.groups] == images


def test_a_batch_without_the_images_it_speaks_of_is_refused() -> None:
    message = train_batch_to_proto(batch_of((b"a", b"b")), with_images=False)
    with pytest.raises(InvalidRequestError, match="group p0: 0 images came for the 2"):
        train_batch_from_proto(message)
    with pytest.raises(InvalidRequestError, match="group p0: 1 images came for the 2"):
        with_group_images(message, {"p0": [b"a"]})


def test_the_size_of_a_batch_without_images_does_not_depend_on_them() -> None:
    small, large = (
        train_batch_to_proto(batch_of((bytes(size),)), with_images=False) for size in (1, 1 << 20)
    )
    assert small.ByteSize() == large.ByteSize()


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


def test_a_batch_that_no_message_can_hold_names_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    from sluice.codec import reward as codec
    from sluice.errors import DataError

    class TooLarge:
        def SerializeToString(self) -> bytes:
            raise ValueError("exceeds 2 GiB")

    monkeypatch.setattr(codec, "train_batch_to_proto", lambda _: TooLarge())
    batch = batch_of((bytes(3 << 20),))
    with pytest.raises(DataError, match=r"with 3 MiB of images .* lower data.train_batch_size"):
        train_batch_to_bytes(batch)
