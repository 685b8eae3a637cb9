"""Each limit of images refuses by the image, the value and the setting that allows less."""

from __future__ import annotations

import pytest

from sluice.config.derived import image_limits
from sluice.config.loading.loader import load_config
from sluice.errors import InvalidRequestError
from sluice.vision.image_limits import ImageLimits, check_images
from tests.support.image_files import png

LIMITS = ImageLimits(max_images=2, max_bytes=200, max_total_bytes=300, max_pixels=100)


@pytest.mark.parametrize(
    ("images", "text", "message"),
    [
        ([png()] * 3, "<image><image><image>", r"images: 3 images; .*max_prompt_images allows 2"),
        ([png()], "no mark", r"images: 1 images for 0 times <image> in the texts"),
        ([png()], "<image><image>", r"images: 1 images for 2 times <image>"),
        ([png() + bytes(201)], "<image>", r"images\[0\]: \d+ bytes; .*max_image_mb allows 200"),
        ([png() + bytes(90)] * 2, "<image> <image>", r"bytes in all; .*max_prompt_images_mb"),
        ([png(11, 10)], "<image>", r"images\[0\]: 11 x 10 pixels; .*max_image_pixels allows 100"),
        ([png(), png(claims=(60_000, 60_000))], "<image><image>", r"images\[1\]: 60000 x 60000"),
        ([png(), b""], "<image><image>", r"images\[1\]: 0 bytes"),
    ],
)
def test_an_image_beyond_a_limit_is_refused_by_name(
    images: list[bytes], text: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_images("images", images, [text], LIMITS)


def test_images_within_the_limits_pass_and_texts_without_images_are_not_looked_at() -> None:
    check_images("images", [png(10, 10), png(1, 1)], ["<image>", "and <image>"], LIMITS)
    check_images("images", [], ["<image> is only a word here"], LIMITS)


def test_the_limits_are_those_of_the_configuration() -> None:
    sound = ["actor_rollout_ref.model.path=m", "data.train_files=f"]
    keys = [
        "sluice.limits.max_prompt_images=3",
        "sluice.limits.max_image_mb=1",
        "sluice.limits.max_prompt_images_mb=2",
        "sluice.limits.max_image_pixels=99",
    ]
    assert image_limits(load_config(None, [*sound, *keys])) == ImageLimits(3, 1 << 20, 2 << 20, 99)
    assert image_limits(load_config(None, sound)) == ImageLimits()
    small = image_limits(load_config(None, [*sound, "sluice.max_message_mb=9"]))
    assert small.max_total_bytes == 2 << 20
