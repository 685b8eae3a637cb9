"""What a file says of itself is read from its headers, and a file that lies is refused."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import InvalidRequestError
from sluice.vision.image_header import read_image_header
from tests.support.image_files import (
    PNG_SIGNATURE,
    jpeg,
    jpeg_segment,
    png,
    png_chunk,
    webp,
    webp_canvas,
    webp_lossless,
    webp_lossy,
)

WHOLE = {
    "PNG": png(7, 5),
    "JPEG": jpeg((7, 5)),
    "WebP": webp(webp_canvas(7, 5), webp_lossless(7, 5)),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_format_and_size_are_read(kind: str) -> None:
    found = read_image_header("images[0]", WHOLE[kind])
    assert (found.format, found.width, found.height) == (kind, 7, 5)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize(
    "options", [{}, {"quality": 40}, {"lossless": True}, {"progressive": True}]
)
def test_what_an_encoder_writes_is_read(kind: str, options: dict[str, Any]) -> None:
    image = pytest.importorskip("PIL.Image")
    for mode in ("RGB", "L"):
        file = io.BytesIO()
        image.effect_noise((37, 21), 50).convert(mode).save(file, kind, **options)
        found = read_image_header("images[0]", file.getvalue())
        assert (found.width, found.height) == (37, 21)


def test_a_claim_of_many_pixels_is_read_without_decoding() -> None:
    found = read_image_header("images[0]", png(claims=(60_000, 60_000)))
    assert found.num_pixels == 3_600_000_000


def test_a_webp_is_measured_by_the_larger_of_its_two_sizes() -> None:
    for canvas, frame in (((9, 9), (5, 5)), ((5, 5), (9, 9))):
        for lossy in (webp_lossless, webp_lossy):
            found = read_image_header("images[0]", webp(webp_canvas(*canvas), lossy(*frame)))
            assert (found.width, found.height) == (9, 9)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "0 bytes"),
        (b"<svg/>", "are no image"),
        (b"GIF89a\1\0\1\0", "are no image"),
        (PNG_SIGNATURE, "cut short"),
        (PNG_SIGNATURE + png_chunk(b"IDAT", b"x"), "begins with IHDR"),
        (png()[:-12], "cut short"),
        (png()[:33] + png_chunk(b"IHDR", bytes(13)) + png()[33:], "one IHDR"),
        (png(claims=(0, 5)), "0 x 5 pixels"),
        (png()[:33] + png_chunk(b"tEXt", b"") * 5000 + png()[33:], "more than 4096 chunks"),
        (jpeg(), "without a frame header"),
        (jpeg((5, 5), (60_000, 60_000)), "two frame headers"),
        (jpeg((5, 5))[:-2], "cut short"),
        (jpeg((5, 5))[:10], "cut short"),
        (b"\xff\xd8\xff\xd9" + bytes(8), "without pixels"),
        (b"\xff\xd8" + jpeg_segment(0xE0, b"") + b"abcdef", "between its segments"),
        (b"\xff\xd8" + jpeg_segment(0xFE, b"") * 5000, "more than 4096 segments"),
        (webp(), "cut short|without an image"),
        (webp(webp_canvas(5, 5)), "without an image"),
        (webp(webp_canvas(5, 5, flags=2), (b"ANMF", bytes(40))), "animated"),
        (webp(webp_lossless(5, 5))[:-3], "cut short"),
    ],
)
def test_what_is_no_whole_image_is_refused_by_field_problem_and_remedy(
    data: bytes, problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^images\[3\]: .*({problem}).*; send "):
        read_image_header("images[3]", data)


@given(st.sampled_from(sorted(WHOLE)), st.data())
def test_a_file_cut_anywhere_is_refused_or_whole_but_for_its_checksum(
    kind: str, data: st.DataObject
) -> None:
    whole = WHOLE[kind]
    cut = data.draw(st.integers(0, len(whole) - 5))
    with pytest.raises(InvalidRequestError):
        read_image_header("images[0]", whole[:cut])


@given(st.sampled_from(sorted(WHOLE)), st.integers(0, 2**32))
def test_damaged_bytes_raise_nothing_else(kind: str, seed: int) -> None:
    rng, data = random.Random(seed), bytearray(WHOLE[kind])
    for _ in range(4):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        found = read_image_header("images[0]", bytes(data))
    except InvalidRequestError:
        return
    assert found.width >= 1
    assert found.height >= 1
