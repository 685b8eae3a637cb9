"""Forward passes of a vision-language model over packed tokens and their images.

FSDP gathers a model's shards only around its own ``forward``. These passes call its parts, so a
sharded model gets them as a method that FSDP treats like ``forward``.
"""

from __future__ import annotations

import math
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

from services.trainer.learner.batch.packing import PackedImages
from sluice.vision.torch_inputs import encode_images, forward_with_images

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GATHERING_PASS = "sluice_logits_with_images"


def logits_with_images(
    model: PreTrainedModel,
    images: PackedImages,
    token_ids: Tensor,
    position_ids: Tensor,
    kept: Tensor,
    **arguments: object,
) -> Tensor:
    """Return logits [1, N, vocab] at the packed positions `kept`, int64 [N].

    Args:
        model: a vision-language model; if it is sharded, prepared by `gather_for_images`.
        images: of the micro-batch.
        token_ids: [1, T] int64.
        position_ids: [3, 1, T] int64; [1, T] if no token is an image's.
        kept: packed positions.
        arguments: passed on to the attention.
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


def gather_for_images(model: PreTrainedModel) -> None:
    """Make `logits_with_images` gather the shards of a sharded model, as its own forward does.

    From now on every pass must have images: gathering is collective, so all ranks must run the
    vision tower if one does (`image_for_all_ranks`).
    """
    setattr(model, _GATHERING_PASS, MethodType(_logits, model))
    register_fsdp_forward_method(model, _GATHERING_PASS)


def image_for_all_ranks(model: PreTrainedModel, token_ids: Tensor) -> PackedImages | None:
    """Return an image that no token refers to, for a pass without images of a sharded model.

    The vision tower then runs on every rank, and its gradients are 0 instead of missing. ``None``:
    the model is not sharded.
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
