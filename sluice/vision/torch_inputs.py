"""Feed a prompt's images to a vision-language model of transformers.

The model's own forward finds images by their token id. A response may contain that id as sampled
text, so images are placed by the prompt's positions instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """The vision tower's output for one image.

    Attributes:
        embeddings: [image tokens, hidden], in place of its tokens' embeddings.
        added: [image tokens, hidden] each, added after the first layers of the language model
            (Qwen3-VL's DeepStack); empty for other families.
    """

    embeddings: Tensor
    added: tuple[Tensor, ...]


def vision_tower(model: PreTrainedModel) -> torch.nn.Module | None:
    """Return the part that encodes images, with its merger; ``None``: it is not here."""
    tower: object = getattr(model.base_model, "visual", None)
    return tower if isinstance(tower, torch.nn.Module) else None


def encode_images(
    model: PreTrainedModel, pixel_values: Tensor, grid_thw: Tensor
) -> list[ImageFeatures]:
    """Run the vision tower once over all images.

    Args:
        pixel_values: [patches, numbers a patch] float32, on the model's device.
        grid_thw: [images, 3] int64, on the model's device.
    """
    base: Any = model.base_model
    output = base.get_image_features(pixel_values, grid_thw, return_dict=True)
    deep = getattr(output, "deepstack_features", None) or []
    return [
        ImageFeatures(embeddings, tuple(layer[number] for layer in deep))
        for number, embeddings in enumerate(output.pooler_output)
    ]


def forward_with_images(
    model: PreTrainedModel,
    token_ids: Tensor,
    position_ids: Tensor,
    is_image: Tensor,
    images: Sequence[ImageFeatures],
    **arguments: object,
) -> Tensor:
    """Return the last hidden states [rows, tokens, hidden] of the language model.

    Args:
        token_ids: [rows, tokens] int64.
        position_ids: [3, rows, tokens] int64.
        is_image: [rows, tokens] bool, true at the tokens of images.
        images: row by row, in the order of their tokens.
        arguments: for the attention.
    """
    base: Any = model.base_model
    text: Tensor = base.get_input_embeddings()(token_ids)
    image_embeddings = torch.cat([image.embeddings for image in images]).to(text.device, text.dtype)
    embeddings = text.masked_scatter(is_image[..., None], image_embeddings)
    if images[0].added:
        layers = zip(*(image.added for image in images), strict=True)
        arguments |= {
            "visual_pos_masks": is_image,
            "deepstack_visual_embeds": [torch.cat(parts) for parts in layers],
        }
    output = base.language_model(
        inputs_embeds=embeddings, position_ids=position_ids, use_cache=False, **arguments
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def text_attention(model_type: str, families: frozenset[str], name: str) -> str | dict[str, str]:
    """Return the setting that makes the language model alone compute attention as `name`."""
    if model_type not in families:
        return name
    return {"text_config": name, "vision_config": "sdpa"}
