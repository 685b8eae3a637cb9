"""Prompts with images as the model takes them: one token for each merged patch, the positions of
all tokens, and the pixels.

Rotary embeddings of these models have three axes: time, height and width. Text has equal positions
on all three. An image's tokens share one time; they take height and width from their patch, counted
from the image's start. Text after an image continues behind the largest position in it (M-RoPE:
Wang et al., "Qwen2-VL", 2024, section 2.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sluice.errors import ConfigError, InvalidRequestError
from sluice.types import TokenIds
from sluice.vision.image_files import decode_image, image_size
from sluice.vision.vision_shape import VisionShape, read_vision_shape

if TYPE_CHECKING:
    from PIL.Image import Image


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
class ImageSpan:
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

    def extend(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """Return positions [3, num_tokens]: a part of the prompt, or all of it and more."""
        num_known = self.prompt.shape[1]
        behind = np.arange(num_known, num_tokens, dtype=np.int64) + self.shift
        return np.concatenate(
            [self.prompt[:, :num_tokens], np.broadcast_to(behind, (3, behind.size))], axis=1
        )


def find_images(
    token_ids: npt.NDArray[np.integer], image_token_id: int, grids: Sequence[Grid]
) -> tuple[ImageSpan, ...]:
    """Return where each image's tokens are in a prompt.

    Raises:
        InvalidRequestError: the prompt holds more or fewer of them than `grids` need, or other
            tokens interrupt an image's.
    """
    positions = np.flatnonzero(token_ids == image_token_id)
    num_wanted = sum(grid.num_tokens for grid in grids)
    if positions.size != num_wanted:
        raise InvalidRequestError(
            f"prompt: {positions.size} image tokens, but its {len(grids)} images take {num_wanted}"
            "; send the tokens that the prompt was accepted with, and its images"
        )
    places = []
    cursor = 0
    for number, grid in enumerate(grids):
        image_positions = positions[cursor : cursor + grid.num_tokens]
        if image_positions[-1] - image_positions[0] != grid.num_tokens - 1:
            raise InvalidRequestError(f"prompt: the tokens of image {number} do not lie together")
        places.append(ImageSpan(int(image_positions[0]), grid))
        cursor += grid.num_tokens
    return tuple(places)


def rope_positions(num_tokens: int, images: Sequence[ImageSpan]) -> RopePositions:
    """Return the positions of a prompt of `num_tokens` with `images` in their order."""
    parts: list[npt.NDArray[np.int64]] = []
    place = position = 0
    for image in images:
        parts.append(_text_positions(image.start - place, position))
        position += image.start - place
        rows, columns = image.grid.rows, image.grid.columns
        patch = np.indices((1, rows, columns), dtype=np.int64).reshape(3, -1)
        parts.append(patch + position)
        place = image.start + image.grid.num_tokens
        position += max(rows, columns)
    parts.append(_text_positions(num_tokens - place, position))
    return RopePositions(np.concatenate(parts, axis=1), position - place)


def _text_positions(num_tokens: int, start: int) -> npt.NDArray[np.int64]:
    positions = np.arange(start, start + num_tokens, dtype=np.int64)
    return np.broadcast_to(positions, (3, num_tokens))


def expand_placeholders(
    token_ids: TokenIds, image_token_id: int, num_tokens: Sequence[int]
) -> TokenIds:
    """Return `token_ids` with the i-th `image_token_id` repeated ``num_tokens[i]`` times.

    Raises:
        InvalidRequestError: `token_ids` holds more or fewer placeholders than there are images.
    """
    is_image = token_ids == image_token_id
    num_places = int(is_image.sum())
    if num_places != len(num_tokens):
        raise InvalidRequestError(
            f"prompt: {len(num_tokens)} images, but {num_places} places for them after the chat "
            "template; use a template that shows images, and leave the model's own image tokens "
            "out of the text"
        )
    repeats = np.ones(token_ids.size, dtype=np.int64)
    repeats[is_image] = num_tokens
    return np.repeat(token_ids, repeats)


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """A prompt's images as the model takes them, and their places in it.

    Attributes:
        patches: of each image, [patches, numbers a patch] float32; the first call decodes it, and
            raises InvalidRequestError if the image is damaged.
        grid_thw: [images, 3] int64: frames (1), rows and columns of patches.
        num_tokens: [images] int64.
        places: [image tokens] int64, their places in the prompt.
    """

    patches: Sequence[Callable[[], npt.NDArray[np.float32]]]
    grid_thw: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    positions: RopePositions

    @property
    def pixel_values(self) -> npt.NDArray[np.float32]:
        """Return the patches of all images, one after the other, [patches, numbers a patch]."""
        return np.concatenate([read_patches() for read_patches in self.patches])


class ImagePromptReader:
    """The layout of prompts with images for one model. Several threads may use it.

    Args:
        processor: transformers' image processor of the model, computing with NumPy and Pillow.
    """

    def __init__(self, shape: VisionShape, processor: Any) -> None:  # noqa: ANN401 - untyped there
        self.shape = shape
        self._processor = processor

    def expand(self, token_ids: TokenIds, images: Sequence[bytes]) -> TokenIds:
        """Return the prompt with one token for each merged patch of its images; read headers only.

        Args:
            token_ids: [tokens], one placeholder an image.
            images: encoded files, in the order of their placeholders.

        Raises:
            InvalidRequestError: an image cannot be read, or placeholders and images differ in
                number.
        """
        counts = [grid.num_tokens for grid in self._grids(images)]
        return expand_placeholders(token_ids, self.shape.image_token_id, counts)

    def read(self, token_ids: TokenIds, images: Sequence[bytes]) -> ImagePrompt:
        """Return `lay_out`'s prompt with its images decoded."""
        prompt = self.lay_out(token_ids, images)
        # One after the other: decoded, an image takes far more memory than its patches.
        for read_patches in prompt.patches:
            read_patches()
        return prompt

    def lay_out(self, token_ids: TokenIds, images: Sequence[bytes]) -> ImagePrompt:
        """Return positions of a prompt that `expand` made; read of its images only the headers.

        Args:
            token_ids: [prompt tokens].
            images: the encoded files, at least one.

        Raises:
            InvalidRequestError: an image cannot be read, the tokens are of other images, or the
                prompt ends with an image.
        """
        grids = self._grids(images)
        size = self.shape.merge_size
        spans = find_images(token_ids, self.shape.image_token_id, grids)
        places = np.concatenate([image.start + np.arange(image.grid.num_tokens) for image in spans])
        if places[-1] == token_ids.size - 1:
            raise InvalidRequestError("prompt: it ends with an image; put text behind it")
        return ImagePrompt(
            [
                cache(partial(self._patches, encoded, number))
                for number, encoded in enumerate(images)
            ],
            np.array([[1, grid.rows * size, grid.columns * size] for grid in grids]),
            np.array([grid.num_tokens for grid in grids]),
            places,
            rope_positions(token_ids.size, spans),
        )

    def fit(self, encoded: bytes, number: int) -> Image:
        """Return an image in the size that the processor gives it, resized as in `read`.

        An engine that lays the result out by the same processor's rule keeps its size, so it gets
        the same patches as `read`.

        Args:
            number: names it in errors.

        Returns:
            In RGB; its sides are multiples of a merged patch.

        Raises:
            InvalidRequestError: it cannot be read or resized, or the processor would resize the
                result again, as it does with long stripes.
        """
        decoded = decode_image(encoded, f"images[{number}]")
        resized = self._resize(decoded, number)
        wanted_grid = self._grid(decoded.height, decoded.width, number)
        # Of multiples of a patch the rule changes only those with too many or too few in all.
        if self._grid(resized.height, resized.width, number) != wanted_grid:
            raise InvalidRequestError(
                f"images[{number}]: {decoded.width} x {decoded.height} pixels become "
                f"{resized.width} x {resized.height}, which the model's image processor would "
                "resize again; send an image that is less long and narrow"
            )
        return resized

    def _resize(self, decoded: Image, number: int) -> Image:
        from PIL import Image as images

        used = self._processor
        try:
            resized = used.resize(
                np.asarray(decoded).transpose(2, 0, 1),
                size=used.size,
                resample=used.resample,
                factor=used.patch_size * used.merge_size,
            )
        except ValueError as error:
            raise _unfit_error(number, error) from error
        return images.fromarray(np.ascontiguousarray(resized.transpose(1, 2, 0)))

    def _patches(self, encoded: bytes, number: int) -> npt.NDArray[np.float32]:
        decoded = decode_image(encoded, f"images[{number}]")
        try:
            processed = self._processor(images=[decoded], return_tensors="np")
        except ValueError as error:  # an aspect ratio that no grid fits
            raise _unfit_error(number, error) from error
        return np.ascontiguousarray(processed["pixel_values"], dtype=np.float32)

    def _grids(self, images: Sequence[bytes]) -> list[Grid]:
        sizes = [image_size(encoded, f"images[{n}]") for n, encoded in enumerate(images)]
        return [self._grid(*size, number) for number, size in enumerate(sizes)]

    def _grid(self, height: int, width: int, number: int) -> Grid:
        """Return the grid of the processor's rule, in merged patches."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        used = self._processor
        factor, size = used.patch_size * used.merge_size, used.size
        limits = {"min_pixels": size.shortest_edge, "max_pixels": size.longest_edge}
        try:
            rows, columns = smart_resize(height, width, factor, **limits)
        except ValueError as error:  # an aspect ratio that no grid fits
            raise _unfit_error(number, error) from error
        return Grid(rows // factor, columns // factor)


def _unfit_error(number: int, error: ValueError) -> InvalidRequestError:
    return InvalidRequestError(f"images[{number}]: it cannot be resized: {error}")


def load_image_prompts(
    model_path: Path | str, *, trust_remote_code: bool = False
) -> ImagePromptReader | None:
    """Return the reader for a model's directory; ``None`` if the model takes no images.

    Raises:
        ConfigError: the model's image processor cannot be loaded.
    """
    shape = read_vision_shape(model_path)
    if shape is None:
        return None
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(
            str(model_path),
            backend="pil",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(
            f"actor_rollout_ref.model.path: the image processor of {model_path} cannot be loaded "
            f"({error}); copy preprocessor_config.json there and install Pillow"
        ) from error
    return ImagePromptReader(shape, processor)
