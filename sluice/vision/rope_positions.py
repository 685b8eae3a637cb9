"""Positions of tokens for rotary embeddings with three axes: time, height and width.

Text has equal positions on all three axes. An image's tokens share one time; they take height and
width from their patch, counted from the image's start. Text after an image continues behind the
largest position in it (M-RoPE: Wang et al., "Qwen2-VL", 2024, section 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sluice.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Grid:
    """An image's tokens by rows and columns, after patches were merged."""

    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the image takes."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """The place of an image: tokens ``[start, start + grid.num_tokens)`` of the prompt."""

    start: int
    grid: Grid


@dataclass(frozen=True, slots=True, eq=False)
class RopePositions:
    """Positions of a prompt.

    Attributes:
        prompt: [3, prompt tokens] int64: time, height, width.
        shift: token t after the prompt has position ``t + shift`` on all axes; 0 or below.
    """

    prompt: npt.NDArray[np.int64]
    shift: int

    def extended(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """Return positions [3, num_tokens]: a part of the prompt, or all of it and more."""
        known = self.prompt.shape[1]
        behind = np.arange(known, num_tokens, dtype=np.int64) + self.shift
        return np.concatenate(
            [self.prompt[:, :num_tokens], np.broadcast_to(behind, (3, behind.size))], axis=1
        )


def find_images(
    token_ids: npt.NDArray[np.integer], image_token_id: int, grids: Sequence[Grid]
) -> tuple[ImagePlace, ...]:
    """Return where each image's tokens are in a prompt.

    Raises:
        InvalidRequestError: the prompt holds more or fewer of them than `grids` need, or other
            tokens interrupt an image's.
    """
    found = np.flatnonzero(token_ids == image_token_id)
    wanted = sum(grid.num_tokens for grid in grids)
    if found.size != wanted:
        raise InvalidRequestError(
            f"prompt: {found.size} image tokens, but its {len(grids)} images take {wanted}; send "
            "the tokens that the prompt was accepted with, and its images"
        )
    places = []
    cursor = 0
    for number, grid in enumerate(grids):
        own = found[cursor : cursor + grid.num_tokens]
        if own[-1] - own[0] != grid.num_tokens - 1:
            raise InvalidRequestError(f"prompt: the tokens of image {number} do not lie together")
        places.append(ImagePlace(int(own[0]), grid))
        cursor += grid.num_tokens
    return tuple(places)


def rope_positions(num_tokens: int, images: Sequence[ImagePlace]) -> RopePositions:
    """Return the positions of a prompt of `num_tokens` with `images` in their order."""
    parts: list[npt.NDArray[np.int64]] = []
    place = position = 0
    for image in images:
        parts.append(_text(image.start - place, position))
        position += image.start - place
        rows, columns = image.grid.rows, image.grid.columns
        patch = np.indices((1, rows, columns), dtype=np.int64).reshape(3, -1)
        parts.append(patch + position)
        place = image.start + image.grid.num_tokens
        position += max(rows, columns)
    parts.append(_text(num_tokens - place, position))
    return RopePositions(np.concatenate(parts, axis=1), position - place)


def _text(num_tokens: int, start: int) -> npt.NDArray[np.int64]:
    counted = np.arange(start, start + num_tokens, dtype=np.int64)
    return np.broadcast_to(counted, (3, num_tokens))
