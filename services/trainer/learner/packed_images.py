"""The images of a packed micro-batch, and which packed tokens are theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

from sluice.vision.image_prompts import ImagePrompt
from sluice.vision.torch_inputs import encode_images, forward_with_images

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "PackedImages",
    "gathers_for_images",
    "image_for_all_ranks",
    "logits_with_images",
    "pack_images",
]

_GATHERING_PASS = "sluice_logits_with_images"


@dataclass(frozen=True, slots=True, eq=False)
class PackedImages:
    """Images in the order of their tokens.

    Pixels wait in the host's memory: they take far more of it than the tokens they become.

    Attributes:
        pixel_values: [patches, numbers a patch] float32, on the CPU.
        grid_thw: [images, 3] int64, on the CPU.
        is_image: [1, T] bool, on the device.
    """

    pixel_values: Tensor
    grid_thw: Tensor
    is_image: Tensor


def pack_images(
    prompts: Sequence[tuple[int, ImagePrompt | None]], num_tokens: int, device: torch.device
) -> PackedImages | None:
    """``None`` if no prompt has images.

    Args:
        prompts: packed position of each prompt's first token, and its images.
        num_tokens: T.
        device: of `PackedImages.is_image`.
    """
    seen = [(start, image) for start, image in prompts if image is not None]
    if not seen:
        return None
    is_image = np.zeros((1, num_tokens), dtype=np.bool_)
    for start, image in seen:
        is_image[0, start + image.places] = True
    return PackedImages(
        torch.from_numpy(np.concatenate([image.pixel_values for _, image in seen])),
        torch.from_numpy(np.concatenate([image.grid_thw for _, image in seen])),
        torch.from_numpy(is_image).to(device),
    )


def logits_with_images(
    model: PreTrainedModel,
    images: PackedImages,
    token_ids: Tensor,
    position_ids: Tensor,
    kept: Tensor,
    **arguments: object,
) -> Tensor:
    """Logits [1, N, vocab] at the packed positions `kept`, int64 [N].

    Args:
        model: a vision-language model; if it is sharded, by `gathers_for_images`.
        images: of the micro-batch.
        token_ids: [1, T] int64.
        position_ids: [3, 1, T] int64; [1, T] if no token is an image's.
        kept: packed positions.
        arguments: handed down to the attention.
    """
    compute: Any = getattr(model, _GATHERING_PASS, None) or partial(_logits, model)
    logits: Tensor = compute(images, token_ids, position_ids, kept, **arguments)
    return logits


def _logits(
    model: PreTrainedModel,
    images: PackedImages,
    token_ids: Tensor,
    position_ids: Tensor,
    kept: Tensor,
    **arguments: object,
) -> Tensor:
    device = token_ids.device
    features = encode_images(model, images.pixel_values.to(device), images.grid_thw.to(device))
    hidden = forward_with_images(
        model, token_ids, position_ids, images.is_image, features, **arguments
    )
    head: Any = model.get_output_embeddings()
    logits: Tensor = head(hidden.index_select(1, kept))
    return logits


def gathers_for_images(model: PreTrainedModel) -> None:
    """Has `logits_with_images` gather the shards of a sharded model, as its own forward does.

    From then on every pass must have images: what one rank gathers, all do.
    """
    setattr(model, _GATHERING_PASS, MethodType(_logits, model))
    register_fsdp_forward_method(model, _GATHERING_PASS)


def image_for_all_ranks(model: PreTrainedModel, token_ids: Tensor) -> PackedImages | None:
    """For a pass without images: one that no token shows, if the model is sharded.

    The vision tower then runs on every rank, and its gradients are 0 and not missing.
    """
    if not hasattr(model, _GATHERING_PASS):
        return None
    tower: Any = model.base_model.visual
    side = int(tower.spatial_merge_size)
    numbers = math.prod(tower.patch_embed.proj.weight.shape[1:])
    return PackedImages(
        torch.zeros(side * side, numbers),
        torch.tensor([[1, side, side]]),
        torch.zeros_like(token_ids, dtype=torch.bool),
    )
