"""From encoded files to pixels and prompts."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers import AutoImageProcessor

from sluice.errors import ConfigError, InvalidRequestError
from sluice.vision.image_files import decode_image, image_size
from sluice.vision.image_prompts import ImagePromptReader, load_image_prompts
from sluice.vision.vision_shape import read_vision_shape
from tests.support.image_files import png
from tests.support.tiny_vision import FAMILIES, IMAGE, PATCH, image_file, save_model
from tests.support.vision_batches import PADDED, make_reader


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_model(request.param, directory)
    return directory


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ImagePromptReader:
    directory = tmp_path_factory.mktemp("model")
    save_model("qwen2_5_vl", directory)
    return make_reader(directory)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


SIZES = ((56, 56), (200, 60), (20, 20), (33, 90), (500, 500))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_an_image_takes_as_many_tokens_as_the_models_processor_makes_patches(
    folder: Path, width: int, height: int
) -> None:
    image = image_file(0, width, height)
    prompt = make_reader(folder).expand(PADDED, (image,))
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    made = processor(images=[Image.open(io.BytesIO(image))], return_tensors="np")
    assert (prompt == IMAGE).sum() == made["image_grid_thw"].prod() // 4
    words = np.append(prompt, np.uint32(9))
    seen = make_reader(folder).read(words, (image,))
    np.testing.assert_array_equal(seen.pixel_values, made["pixel_values"])
    np.testing.assert_array_equal(seen.grid_thw, made["image_grid_thw"])
    assert seen.pixel_values.dtype == np.float32
    assert seen.pixel_values.shape[1] == 3 * 2 * PATCH[_family(folder)] ** 2
    np.testing.assert_array_equal(np.flatnonzero(words == IMAGE), seen.places)


def _family(folder: Path) -> str:
    family: str = json.loads((folder / "config.json").read_text())["model_type"]
    return family


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_every_format_is_read(kind: str) -> None:
    assert decode_image(image_file(0, 30, 20, kind), "images[0]").size == (30, 20)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_seen_upright_and_measured_so(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.open(io.BytesIO(image_file(0, 30, 20)))
    file = encoded(stored, kind, exif=exif, quality=100)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("RGB")
    seen = decode_image(file, "images[0]")
    assert seen.tobytes() == expected.tobytes()
    assert image_size(file, "images[0]") == (seen.height, seen.width)


def test_what_is_transparent_is_white() -> None:
    nothing = encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 0)))
    assert decode_image(nothing, "images[0]").getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("options", [{}, {"transparency": 12 * 257}], ids=["opaque", "transparent"])
def test_a_gray_image_of_16_bits_has_the_grays_of_one_of_8(options: dict[str, Any]) -> None:
    grays = np.arange(256, dtype=np.uint8).reshape(16, 16)
    wide = Image.fromarray(grays.astype(np.uint16) * 257)
    seen = np.asarray(decode_image(encoded(wide, **options), "images[0]"))
    if options:
        grays[grays == 12] = 255
    np.testing.assert_array_equal(seen, np.repeat(grays[..., None], 3, axis=-1))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"", r"images\[0\]: 0 bytes; send a whole file"),
        (b"GIF89a" + bytes(40), "are no image"),
        (encoded(Image.new("RGB", (4, 4)), "GIF"), "are no image"),
        (png(claims=(60_000, 60_000)), r"images\[0\]: 60000 x 60000 pixels"),
    ],
    ids=["empty", "rubbish", "gif", "bomb"],
)
def test_what_is_no_image_of_a_known_format_and_size_is_refused(file: bytes, message: str) -> None:
    for use in (image_size, decode_image):
        with pytest.raises(InvalidRequestError, match=message):
            use(file, "images[0]")


def test_a_damaged_image_is_refused_when_it_is_decoded() -> None:
    whole = image_file(0, 60, 60)
    damaged = whole[:60] + bytes(40) + whole[100:]
    with pytest.raises(InvalidRequestError, match=r"images\[3\]: the image is damaged"):
        decode_image(damaged, "images[3]")


def test_a_stripe_that_no_grid_fits_is_refused(reader: ImagePromptReader) -> None:
    stripe = image_file(0, 900, 2)
    with pytest.raises(InvalidRequestError, match=r"images\[0\]: it cannot be resized"):
        reader.expand(PADDED, (stripe,))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_fitted_image_has_the_numbers_of_the_original_without_being_resized(
    folder: Path, width: int, height: int
) -> None:
    file = image_file(7, width, height)
    fitted = make_reader(folder).fit(file, 0)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    original = processor(images=[Image.open(io.BytesIO(file))], return_tensors="np")
    for more in ({}, {"do_resize": False}):
        again = processor(images=[fitted], return_tensors="np", **more)
        np.testing.assert_array_equal(again["image_grid_thw"], original["image_grid_thw"])
        np.testing.assert_array_equal(again["pixel_values"], original["pixel_values"])


def test_an_image_of_the_processors_own_size_is_fitted_as_it_is(reader: ImagePromptReader) -> None:
    file = image_file(0, 84, 56)
    assert reader.fit(file, 0).tobytes() == Image.open(io.BytesIO(file)).tobytes()


@pytest.mark.parametrize(
    ("width", "height", "message"),
    [
        (1200, 28, r"images\[2\]: 1200 x 28 pixels become 728 x 28, .* resize again"),
        (900, 2, r"images\[2\]: it cannot be resized"),
    ],
)
def test_a_stripe_that_the_processor_would_not_leave_as_it_made_it_is_not_fitted(
    reader: ImagePromptReader, width: int, height: int, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        reader.fit(image_file(0, width, height), 2)


def test_a_prompt_that_ends_with_an_image_is_refused(reader: ImagePromptReader) -> None:
    image = image_file(0)
    prompt = reader.expand(PADDED[:2], (image,))
    with pytest.raises(InvalidRequestError, match="ends with an image"):
        reader.read(prompt, (image,))


def test_a_text_model_has_no_reader(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert load_image_prompts(tmp_path) is None
    assert read_vision_shape(tmp_path) is None


def test_a_missing_image_processor_is_reported_with_the_file_that_is_missing(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    with pytest.raises(ConfigError, match=r"copy preprocessor_config\.json"):
        load_image_prompts(tmp_path)


def test_the_package_loads_without_torch_transformers_and_pillow() -> None:
    program = (
        "import sys; import sluice.vision.image_prompts, sluice.vision.image_files;"
        "sys.exit(bool({'torch', 'transformers', 'PIL'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
