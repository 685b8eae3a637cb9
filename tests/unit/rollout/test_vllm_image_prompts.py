"""Prompts with images in vLLM's words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engines.protocol import GenerationRequest
from services.rollout.engines.vllm_images import collapse_images, read_images
from sluice.errors import InvalidRequestError
from sluice.vision.placeholders import expand_placeholders
from tests.support.causal_lms import request
from tests.support.image_files import png

_IMAGE = 5
words = st.lists(st.integers(6, 99), min_size=1, max_size=4)


@given(words, st.lists(st.tuples(st.integers(1, 9), words), max_size=4))
def test_collapsing_undoes_expanding(start: list[int], images: list[tuple[int, list[int]]]) -> None:
    short = [*start, *(token for _, after in images for token in (_IMAGE, *after))]
    sizes = [size for size, _ in images]
    expanded = expand_placeholders(np.array(short, np.uint32), _IMAGE, sizes)
    assert collapse_images(expanded.tolist(), _IMAGE, len(images)) == short


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_another_number_of_images_than_runs_is_refused(num_images: int) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"{num_images} images, but 2 runs of the image token 5"
    ):
        collapse_images([1, 5, 5, 2, 5, 3], _IMAGE, num_images)


def _request(*images: bytes) -> GenerationRequest:
    return replace(request([8, 5, 5, 5, 9, 5, 10]), images=images)


def test_images_are_decoded_in_order_and_the_same_file_has_the_same_name() -> None:
    wide, tall = png(6, 2), png(2, 6)
    found = read_images(_request(wide, tall), _IMAGE)
    again = read_images(_request(tall, tall), _IMAGE)
    assert found is not None
    assert again is not None
    assert [image.size for image in found.images] == [(6, 2), (2, 6)]
    assert found.prompt == [8, 5, 9, 5, 10]
    assert again.names == (found.names[1], found.names[1])
    assert found.names[0] != found.names[1]


def test_image_tokens_of_a_response_that_is_continued_are_text() -> None:
    found = read_images(_request(png(), png()), _IMAGE)
    assert found is not None
    assert found.continued([8, 5, 5, 5, 9, 5, 10, 5, 5, 11]) == [8, 5, 9, 5, 10, 5, 5, 11]


def test_a_model_that_takes_no_images_refuses_them_and_takes_prompts_without() -> None:
    assert read_images(request(), None) is None
    with pytest.raises(InvalidRequestError, match="2 images for a model that takes none"):
        read_images(_request(png(), png()), None)


def test_a_file_that_is_no_image_is_refused_and_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"images\[1\]"):
        read_images(_request(png(), b"text"), _IMAGE)
