"""Expand one placeholder token per image to one token per merged patch, and read the pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sluice.errors import ConfigError, InvalidRequestError
from sluice.types import TokenIds
from sluice.vision.image_files import decode_image, image_size
from sluice.vision.rope_positions import Grid, RopePositions, find_images, rope_positions
from sluice.vision.vision_shape import VisionShape, read_vision_shape

if TYPE_CHECKING:
    from PIL.Image import Image


def expand_placeholders(
    token_ids: TokenIds, image_token_id: int, num_tokens: Sequence[int]
) -> TokenIds:
    """Return `token_ids` with the i-th `image_token_id` repeated ``num_tokens[i]`` times.

    Raises:
        InvalidRequestError: `token_ids` holds more or fewer placeholders than there are images.
    """
    is_image = token_ids == image_token_id
    found = int(is_image.sum())
    if found != len(num_tokens):
        raise InvalidRequestError(
            f"prompt: {len(num_tokens)} images, but {found} places for them after the chat "
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
        pixel_values: [patches, numbers a patch] float32, one image after the other.
        grid_thw: [images, 3] int64: frames (1), rows and columns of patches.
        places: [image tokens] int64, their places in the prompt.
        positions: of the prompt's tokens.
    """

    pixel_values: npt.NDArray[np.float32]
    grid_thw: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    positions: RopePositions


class ImagePromptReader:
    """The layout of prompts with images for one model. Several threads may use it.

    Args:
        shape: of the model.
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
        merged = self.shape.merge_size**2
        counts = [
            self._num_patches(*image_size(encoded, f"images[{number}]"), number) // merged
            for number, encoded in enumerate(images)
        ]
        return expand_placeholders(token_ids, self.shape.image_token_id, counts)

    def read(self, token_ids: TokenIds, images: Sequence[bytes]) -> ImagePrompt:
        """Return pixels and positions of a prompt that `expand` made.

        Args:
            token_ids: [prompt tokens].
            images: the encoded files, at least one.

        Raises:
            InvalidRequestError: an image cannot be read, the tokens are of other images, or the
                prompt ends with an image.
        """
        # One after the other: decoded, an image takes far more memory than its patches.
        patches = [
            self._patches(decode_image(encoded, f"images[{number}]"), number)
            for number, encoded in enumerate(images)
        ]
        pixel_values = np.concatenate([values for values, _ in patches])
        grid_thw = np.concatenate([grid for _, grid in patches])
        size = self.shape.merge_size
        grids = [Grid(int(rows) // size, int(columns) // size) for _, rows, columns in grid_thw]
        found = find_images(token_ids, self.shape.image_token_id, grids)
        places = np.concatenate([image.start + np.arange(image.grid.num_tokens) for image in found])
        if places[-1] == token_ids.size - 1:
            raise InvalidRequestError("prompt: it ends with an image; put text behind it")
        positions = rope_positions(token_ids.size, found)
        return ImagePrompt(pixel_values, grid_thw, places, positions)

    def fitted(self, encoded: bytes, number: int) -> Image:
        """Return an image in the size that the processor gives it, resized as in `read`.

        An engine that lays the result out by the same processor's rule keeps its size, so it gets
        the same patches as `read`.

        Args:
            encoded: a file.
            number: names it in errors.

        Returns:
            In RGB; its sides are multiples of a merged patch.

        Raises:
            InvalidRequestError: it cannot be read or resized, or the processor would resize the
                result again, as it does with long stripes.
        """
        decoded = decode_image(encoded, f"images[{number}]")
        resized = self._resized(decoded, number)
        wanted = self._num_patches(decoded.height, decoded.width, number)
        # Of multiples of a patch the rule changes only those with too many or too few in all.
        if self._num_patches(resized.height, resized.width, number) != wanted:
            raise InvalidRequestError(
                f"images[{number}]: {decoded.width} x {decoded.height} pixels become "
                f"{resized.width} x {resized.height}, which the model's image processor would "
                "resize again; send an image that is less long and narrow"
            )
        return resized

    def _resized(self, decoded: Image, number: int) -> Image:
        from PIL import Image as images

        used = self._processor
        try:
            made = used.resize(
                np.asarray(decoded).transpose(2, 0, 1),
                size=used.size,
                resample=used.resample,
                factor=used.patch_size * used.merge_size,
            )
        except ValueError as error:
            raise _unfit(number, error) from error
        return images.fromarray(np.ascontiguousarray(made.transpose(1, 2, 0)))

    def _patches(
        self, decoded: Image, number: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        try:
            made = self._processor(images=[decoded], return_tensors="np")
        except ValueError as error:  # an aspect ratio that no grid fits
            raise _unfit(number, error) from error
        return (
            np.ascontiguousarray(made["pixel_values"], dtype=np.float32),
            np.asarray(made["image_grid_thw"], dtype=np.int64),
        )

    def _num_patches(self, height: int, width: int, number: int) -> int:
        try:
            return int(self._processor.get_number_of_image_patches(height, width, {}))
        except ValueError as error:
            raise _unfit(number, error) from error


def _unfit(number: int, error: ValueError) -> InvalidRequestError:
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
