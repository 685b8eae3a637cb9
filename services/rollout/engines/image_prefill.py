"""Prefill of prompts with images: the vision tower once an image, then the language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.rollout.engines import slot_attention
from services.rollout.engines.slot_attention import PrefillForward
from sluice.vision.image_prompts import ImagePrompt
from sluice.vision.torch_inputs import ImageFeatures, encode_images, forward_with_images

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["prefill_with_images"]


def prefill_with_images(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    images: Sequence[ImagePrompt | None],
    forward: PrefillForward,
) -> None:
    """Runs the model over prompts, some of which have images; `forward` collects keys and values.

    Args:
        model: a vision-language model whose language model attends by `slot_attention`.
        token_ids: [prompts, longest] int64, padded on the right.
        images: of each prompt. Prompts that share one object share the pass of the vision tower.
        forward: of this pass.
    """
    longest = token_ids.shape[1]
    is_image = np.zeros(tuple(token_ids.shape), dtype=np.bool_)
    positions = np.empty((3, *token_ids.shape), dtype=np.int64)
    positions[:] = np.arange(longest)
    encoded: dict[ImagePrompt, list[ImageFeatures]] = {}
    features: list[ImageFeatures] = []
    for row, image in enumerate(images):
        if image is None:
            continue
        is_image[row, image.places] = True
        positions[:, row] = image.positions.extended(longest)
        if image not in encoded:
            encoded[image] = _encode(model, image)
        features += encoded[image]
    device = token_ids.device
    with slot_attention.slot_forward(forward):
        forward_with_images(
            model,
            token_ids,
            torch.from_numpy(positions).to(device),
            torch.from_numpy(is_image).to(device),
            features,
        )


def _encode(model: PreTrainedModel, image: ImagePrompt) -> list[ImageFeatures]:
    pixel_values = torch.from_numpy(image.pixel_values).to(model.device)
    return encode_images(model, pixel_values, torch.from_numpy(image.grid_thw).to(model.device))
