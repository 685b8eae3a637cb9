"""The images of a micro-batch, and which of the ranks that share its sequence encodes which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.trainer.learner.sequence_share import SequenceShare
from sluice.vision.image_prompts import ImagePrompt


@dataclass(frozen=True, slots=True, eq=False)
class PackedImages:
    """Images in the order of their tokens.

    Pixels stay in host memory until the pass: they take far more memory than their tokens. Of ranks
    that share the sequence, each encodes some of the images, whose tokens may be those of others.

    Attributes:
        pixel_values: [patches, numbers per patch] float32, on the CPU; ``None`` if this rank
            encodes no image.
        grid_thw: [images, 3] int64, on the CPU.
        is_image: [1, T] bool, on the device.
        sent: image tokens that this rank encodes for each rank of the share; ``None``: no share.
        received: image tokens of this rank's part of the sequence that each rank encodes.
    """

    pixel_values: Tensor | None
    grid_thw: Tensor
    is_image: Tensor
    sent: list[int] | None = None
    received: list[int] | None = None


def pack_images(
    prompts: Sequence[tuple[int, ImagePrompt | None]],
    num_tokens: int,
    device: torch.device,
    share: SequenceShare | None = None,
) -> PackedImages | None:
    """Pack the images of all prompts; ``None`` if there are none.

    Args:
        prompts: packed position of each prompt's first token, and its images.
        num_tokens: T.
        device: gets `PackedImages.is_image`.
        share: the ranks that divide the images; they have the same prompts.
    """
    seen = [(start, image) for start, image in prompts if image is not None]
    if not seen:
        return None
    # `image.places` count from the prompt's start; packed positions count from the first prompt's.
    is_image = np.zeros((1, num_tokens), dtype=np.bool_)
    for start, image in seen:
        is_image[0, start + image.places] = True
    patches = [one for _, image in seen for one in image.patches]
    grid_thw = np.concatenate([image.grid_thw for _, image in seen])
    sent = received = None
    if share is not None:
        sizes = np.concatenate([image.num_tokens for _, image in seen])
        owners = _encoders(sizes, share.size)
        # Both sides count the images' tokens in packed order.
        encoded = np.searchsorted(owners, np.arange(share.size + 1))
        encoded = np.concatenate([[0], np.cumsum(sizes)])[encoded]
        first = np.arange(share.size + 1) * -(-num_tokens // share.size)
        needed = np.searchsorted(np.flatnonzero(is_image[0]), first)
        sent, received = _common(encoded, needed, share.rank), _common(needed, encoded, share.rank)
        is_image = share.cut(is_image)
        grid_thw = grid_thw[owners == share.rank]
        patches = [one for one, owner in zip(patches, owners, strict=True) if owner == share.rank]
    pixels = [one() for one in patches]
    return PackedImages(
        torch.from_numpy(np.concatenate(pixels)) if pixels else None,
        torch.from_numpy(grid_thw),
        torch.from_numpy(is_image).to(device),
        sent,
        received,
    )


def _encoders(sizes: npt.NDArray[np.int64], ranks: int) -> npt.NDArray[np.int64]:
    """Return the rank that encodes each image: neighbors, by about equal numbers of tokens."""
    middles = 2 * np.cumsum(sizes) - sizes
    found: npt.NDArray[np.int64] = middles * ranks // (2 * sizes.sum())
    return found


def _common(ours: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64], rank: int) -> list[int]:
    """Return how many of the numbers between ``ours[rank]`` and the next each rank has too."""
    first, end = np.maximum(theirs[:-1], ours[rank]), np.minimum(theirs[1:], ours[rank + 1])
    found: list[int] = np.maximum(end - first, 0).tolist()
    return found
