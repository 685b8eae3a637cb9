"""The sources of an image: its bytes, base64, or a file."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sluice.errors import DataError

ImageSource = bytes | str
"""An encoded image, or the path of one."""

DATA_URI = "data:"
_FILE_URI = "file://"
_OWN_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")  # in verl's rows
_BASE64 = ";base64"
FORMS = "the bytes, their base64 as 'bytes' or in a data: URI, or the path of an image"


def image_source(value: object) -> ImageSource:
    """Return the image that a row holds: verl's ``{bytes, path}``, bytes, a path, a data: URI.

    Text in ``bytes`` is base64, since JSON has no bytes. A path may be a file: URI, and be named
    ``image``.

    Raises:
        ValueError: it is none of these, or has a size of its own. The error describes the value and
            not its place.
    """
    if isinstance(value, Mapping):
        for name in _OWN_SIZES:
            if value.get(name) is not None:
                raise ValueError(
                    f"sets {name}, and all images have the sizes of the model's "
                    "preprocessor_config.json; set them there, or resize this image"
                )
        data, path = value.get("bytes"), value.get("path") or value.get("image")
        if isinstance(data, str) and data:
            return _decode_base64(data)
        value = data or path
    if isinstance(value, str) and value.startswith(DATA_URI):
        return image_of_uri(value)
    if isinstance(value, bytes | str) and value:
        return value if isinstance(value, bytes) else value.removeprefix(_FILE_URI)
    raise ValueError(f"holds neither {FORMS}")


def usable_images(value: object) -> tuple[ImageSource, ...]:
    """Return the images of a row's list, without entries that are none."""
    usable: list[ImageSource] = []
    for entry in value if isinstance(value, list) else []:
        with suppress(ValueError):
            usable.append(image_source(entry))
    return tuple(usable)


def image_of_uri(uri: str) -> bytes:
    """Return the bytes of a ``data:image/...;base64,...`` URI.

    Raises:
        ValueError: it is none, or holds no base64.
    """
    head, comma, body = uri.partition(",")
    if not comma or not head.startswith(DATA_URI) or not head.endswith(_BASE64):
        raise ValueError("is no data: URI with base64, as data:image/png;base64,...")
    return _decode_base64(body)


def read_image(field: str, source: ImageSource, folder: Path, max_bytes: int) -> bytes:
    """Return the bytes of an image.

    Args:
        folder: relative paths start here.
        max_bytes: a larger file is not read.

    Raises:
        DataError: names the file and its fault.
    """
    if isinstance(source, bytes):
        return source
    try:
        path = folder / source
        if not path.is_file():
            raise DataError(f"{field}: no file {path}; give the path of an image")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise DataError(f"{field}: {source!r} cannot be read ({error})") from error
    if len(data) > max_bytes:
        raise DataError(
            f"{field}: {path} has more than the {max_bytes} bytes that sluice.limits.max_image_mb "
            "allows; make it smaller"
        )
    return data


def _decode_base64(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"holds text that is no base64 ({error})") from error
