"""Images of data-set rows: read where the row says, within limits."""

from __future__ import annotations

from pathlib import Path

from sluice.data.image_sources import read_image
from sluice.data.prompt_rows import PromptRow
from sluice.errors import DataError, InvalidRequestError
from sluice.vision.image_limits import ImageLimits, check_image_count, check_images

__all__ = ["images_of_row"]


def images_of_row(row: PromptRow, path: str, limits: ImageLimits | None) -> tuple[bytes, ...]:
    """The encoded images of a row, read and checked.

    Args:
        row: with the images or their paths.
        path: of the row's file, beside which relative paths are looked up.
        limits: the most of each; ``None``: no images are read.

    Raises:
        DataError: names file and row, the image, and the remedy.
    """
    if not row.images or limits is None:
        return ()
    try:
        check_image_count("images", len(row.images), limits)
        folder = Path(path).parent
        images = tuple(
            read_image(f"images[{index}]", source, folder, limits.max_bytes)
            for index, source in enumerate(row.images)
        )
        check_images("images", images, (turn.content for turn in row.messages), limits)
    except (InvalidRequestError, DataError) as error:
        raise DataError(f"{row.place}: {error}; or repair or remove the row") from error
    return images
