"""Decoders are given pixels alone: what else a file holds, bombs among it, never reaches Pillow."""

from __future__ import annotations

import io
import random
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sluice.errors import InvalidRequestError
from sluice.vision import image_files
from sluice.vision.image_files import decode_image, image_size, strip_metadata
from sluice.vision.image_header import MAX_EXIF_BYTES, exif_orientation, read_image_header
from tests.support.image_files import exif_bomb, jpeg_with, png_chunk, png_with, webp_with
from tests.support.tiny_vision import image_file

SECRET = b"metadata of somebody"
KINDS = ("PNG", "JPEG", "WEBP")


def saved(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image = Image.open(io.BytesIO(image_file(0, 30, 20))).convert(mode)
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_metadata(kind: str, content: bytes) -> bytes:
    match kind:
        case "PNG":
            return png_with(saved(kind), (b"eXIf", content), (b"iCCP", content))
        case "JPEG":
            return jpeg_with(saved(kind), (0xE1, b"Exif\0\0" + content), (0xE2, content))
        case _:
            return webp_with(saved(kind), (b"EXIF", content), (b"XMP ", content))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_pixels_reaches_pillow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given_to_pillow: list[bytes] = []
    original = Image.open

    def opened(file: io.BytesIO, **options: Any) -> Image.Image:
        given_to_pillow.append(file.getvalue())
        return original(file, **options)

    file, plain = with_metadata(kind, SECRET), saved(kind)
    monkeypatch.setattr(Image, "open", opened)
    assert SECRET in file
    seen = decode_image(file, "images[0]")
    (bare,) = given_to_pillow
    assert SECRET not in bare
    assert not original(io.BytesIO(bare)).info.keys() & {"exif", "xmp", "icc_profile"}
    assert seen.tobytes() == original(io.BytesIO(plain)).convert("RGB").tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_an_exif_bomb_is_an_image_like_any_other(kind: str) -> None:
    file = with_metadata(kind, exif_bomb())
    assert decode_image(file, "images[0]").size == (30, 20)
    assert image_size(file, "images[0]") == (20, 30)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bare_image_has_the_same_pixels(kind: str, mode: str) -> None:
    if (kind, mode) in {("JPEG", "RGBA"), ("JPEG", "P")}:
        pytest.skip("there is no such JPEG")
    file = saved(kind, mode)
    bare = Image.open(io.BytesIO(strip_metadata(file)))
    whole = Image.open(io.BytesIO(file))
    assert bare.mode == whole.mode
    assert bare.convert("RGBA").tobytes() == whole.convert("RGBA").tobytes()


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_rows": 1}])
def test_a_jpeg_of_several_scans_or_with_restarts_is_whole(options: dict[str, Any]) -> None:
    file = saved("JPEG", "CMYK", **options)
    whole = Image.open(io.BytesIO(file)).convert("RGB").tobytes()
    assert decode_image(file, "images[0]").tobytes() == whole


@pytest.mark.parametrize("name", [b"IHDR", b"eXIf", b"zTXt", b"IDAT"])
def test_a_chunk_behind_the_pixels_is_not_looked_at(name: bytes) -> None:
    whole = saved("PNG")
    behind = whole[:-12] + png_chunk(b"tEXt", b"") + png_chunk(name, exif_bomb()) + whole[-12:]
    assert strip_metadata(behind) == strip_metadata(whole)


@pytest.mark.parametrize("error", [struct.error, EOFError, KeyError, ZeroDivisionError])
def test_whatever_a_decoder_raises_is_the_fault_of_the_image(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumbles(*_: object, **__: object) -> None:
        raise error("x")

    file = saved("PNG")
    monkeypatch.setattr(Image, "open", stumbles)
    with pytest.raises(InvalidRequestError, match=r"images\[2\]: the image is damaged .*; send"):
        decode_image(file, "images[2]")


def test_a_decoder_that_finds_another_size_than_the_header_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = saved("PNG")
    monkeypatch.setattr(image_files, "strip_metadata", lambda _: small)
    with pytest.raises(InvalidRequestError, match="30 x 20 pixels differ from its header"):
        decode_image(image_file(0, 60, 60), "images[0]")


def ifd(order: str, *entries: tuple[int, int, int, int]) -> bytes:
    mark = {"<": b"II*\0", ">": b"MM\0*"}[order]
    packed = b"".join(struct.pack(f"{order}HHIHH", *entry, 0) for entry in entries)
    return mark + struct.pack(f"{order}IH", 8, len(entries)) + packed + bytes(4)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("prefix", [b"", b"Exif\0\0"])
def test_an_orientation_is_found_among_other_entries(order: str, prefix: bytes) -> None:
    entries = ((0x010F, 2, 9, 0), (0x0112, 3, 1, 6), (0x011A, 5, 1, 0))
    assert exif_orientation(prefix + ifd(order, *entries)) == 6


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"Exif\0\0",
        b"II*\0\xff\xff\xff\xff",
        ifd("<", (0x0112, 3, 1, 9)),
        ifd("<", (0x0112, 4, 1, 6)),
        ifd("<", (0x0112, 3, 2, 6)),
        ifd("<", (0x010F, 3, 1, 6)),
        ifd("<", (0x0112, 3, 1, 6))[:16],
        ifd("<", (0x0112, 3, 1, 6)) + bytes(MAX_EXIF_BYTES),
    ],
)
def test_what_says_no_orientation_is_upright(exif: bytes) -> None:
    assert exif_orientation(exif) == 1


@given(st.sampled_from(KINDS), st.integers(0, 2**32))
def test_damage_anywhere_is_refused_or_seen_as_it_was_measured(kind: str, seed: int) -> None:
    rng, data = random.Random(seed), bytearray(with_metadata(kind, ifd("<", (0x0112, 3, 1, 6))))
    for _ in range(4):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        height, width = read_image_header("images[0]", bytes(data)).upright_size
        seen = decode_image(bytes(data), "images[0]")
    except InvalidRequestError:
        return
    assert seen.size == (width, height)
