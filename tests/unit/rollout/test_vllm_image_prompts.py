"""Prompts with images in vLLM's words."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor

from services.rollout.engines.protocol import GenerationRequest
from services.rollout.engines.vllm.client import collapse_images, read_images
from sluice.errors import InvalidRequestError
from sluice.quickstart.tokenizer import save_image_processor
from sluice.vision.image_prompts import ImagePromptReader, expand_placeholders
from tests.support.causal_lms import request
from tests.support.image_files import png
from tests.support.tiny_vision import image_file
from tests.support.vision_batches import make_reader

_IMAGE = 5
_SIDE = 28
"""Of a merged patch, in pixels."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model without weights."""
    directory = tmp_path_factory.mktemp("model")
    config = {"model_type": "qwen2_5_vl", "image_token_id": _IMAGE}
    (directory / "config.json").write_text(json.dumps(config))
    save_image_processor(
        directory, patch_size=_SIDE // 2, min_pixels=_SIDE**2, max_pixels=16 * _SIDE**2
    )
    return directory


@pytest.fixture(scope="module")
def reader(folder: Path) -> ImagePromptReader:
    return make_reader(folder)


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


def test_images_are_decoded_in_order_and_the_same_file_has_the_same_name(
    reader: ImagePromptReader,
) -> None:
    wide, tall = png(2 * _SIDE, _SIDE), png(_SIDE, 2 * _SIDE)
    found = read_images(_request(wide, tall), reader)
    again = read_images(_request(tall, tall), reader)
    assert found is not None
    assert again is not None
    assert [image.size for image in found.images] == [(56, 28), (28, 56)]
    assert found.prompt == [8, 5, 9, 5, 10]
    assert again.names == (found.names[1], found.names[1])
    assert found.names[0] != found.names[1]


def test_vllm_is_given_the_trainers_pixels_in_sizes_that_need_no_resizing(
    folder: Path, reader: ImagePromptReader
) -> None:
    files = (image_file(1, 20, 20), image_file(2, 300, 190))
    found = read_images(_request(*files), reader)
    assert found is not None
    assert [image.size for image in found.images] == [(28, 28), (140, 84)]
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    for file, image in zip(files, found.images, strict=True):
        trained = processor(images=[Image.open(io.BytesIO(file))], return_tensors="np")
        served = processor(images=[image], do_resize=False, return_tensors="np")
        np.testing.assert_array_equal(served["pixel_values"], trained["pixel_values"])


def test_image_tokens_of_a_response_that_is_continued_are_text(reader: ImagePromptReader) -> None:
    found = read_images(_request(png(), png()), reader)
    assert found is not None
    assert found.continued([8, 5, 5, 5, 9, 5, 10, 5, 5, 11]) == [8, 5, 9, 5, 10, 5, 5, 11]


def test_a_model_that_takes_no_images_refuses_them_and_takes_prompts_without() -> None:
    assert read_images(request(), None) is None
    with pytest.raises(InvalidRequestError, match="2 images for a model that takes none"):
        read_images(_request(png(), png()), None)


def test_a_file_that_is_no_image_is_refused_and_named(reader: ImagePromptReader) -> None:
    with pytest.raises(InvalidRequestError, match=r"images\[1\]"):
        read_images(_request(png(), b"text"), reader)
