"""Decoders for any transformers model: one with the slot cache; one without, as a last resort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.rollout.engines.embedded import kv_cache
from services.rollout.engines.embedded.decoder import (
    DecodeBatch,
    Decoder,
    PrefilledPrompts,
    TokenRow,
)
from services.rollout.engines.embedded.kv_cache import (
    DecodeForward,
    PrefillForward,
    SlotDecoder,
    pad_right,
)
from sluice.vision.image_prompts import ImagePrompt
from sluice.vision.torch_inputs import (
    ImageFeatures,
    encode_images,
    forward_with_images,
    text_attention,
)
from sluice.vision.vision_shape import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RecomputeDecoder(Decoder):
    """A decoder without state: the history in each batch is all it needs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._device = model.device

    def prefill(
        self, prompts: Sequence[TokenRow], images: Sequence[ImagePrompt | None] = ()
    ) -> PrefilledPrompts:
        if any(images):
            raise NotImplementedError("images")
        return PrefilledPrompts(())

    def score(self, prompt: TokenRow) -> tuple[PrefilledPrompts, torch.Tensor]:
        token_ids = torch.from_numpy(prompt)[None].to(self._device)
        logits: torch.Tensor = self._model(input_ids=token_ids, use_cache=False).logits[0]
        return self.prefill([prompt]), logits

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        positions = torch.from_numpy(batch.positions).to(self._device)
        steps = torch.arange(batch.length, device=self._device)
        real = steps <= positions[:, None]
        token_ids = torch.from_numpy(batch.history[:, : batch.length].copy()).to(self._device)
        output = self._model(
            input_ids=token_ids.masked_fill(~real, 0), attention_mask=real.long(), use_cache=False
        )
        logits: torch.Tensor = output.logits
        return logits[torch.arange(len(positions), device=self._device), positions]


def prefill_with_images(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    images: Sequence[ImagePrompt | None],
    forward: PrefillForward,
) -> None:
    """Run the model over prompts with images; `forward` collects keys and values.

    Args:
        model: a vision-language model whose language model uses the slot attention.
        token_ids: [prompts, longest] int64, padded on the right.
        images: of each prompt, or ``None``. Prompts that share one object share the pass of the
            vision tower.
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
        positions[:, row] = image.positions.extend(longest)
        if image not in encoded:
            encoded[image] = _encode(model, image)
        features += encoded[image]
    device = token_ids.device
    with kv_cache.slot_forward(forward):
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


class GenericDecoder(SlotDecoder):
    """The model's own forward with our attention in place of its own.

    Raises:
        NotImplementedError: the model does not call the attention interface, or has layers whose
            state does not fit a key/value cache.
    """

    def __init__(self, model: PreTrainedModel, slots: int, max_model_len: int) -> None:
        kv_cache.register()
        self._model = model
        self._device = model.device
        config = model.config.get_text_config(decoder=True)
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {"full_attention", "sliding_attention"}:
            raise NotImplementedError(f"layer types {sorted(kinds)}")
        family = model.config.model_type
        self._reads_images = family in FAMILIES
        model.set_attn_implementation(text_attention(family, FAMILIES, kv_cache.NAME))
        # A trial shows the shapes of keys and values, and whether the model uses our attention.
        forward = PrefillForward()
        self._compute(*pad_right([np.zeros(2, dtype=np.int64)], self._device), forward)
        window = getattr(config, "sliding_window", None)
        slides = "sliding_attention" in kinds or (not kinds and window is not None)
        if slides and not forward.windowed and (window or 0) < max_model_len:
            raise NotImplementedError("a sliding window that the attention function does not get")
        if len(forward.layers) != config.num_hidden_layers:
            raise NotImplementedError(
                f"{len(forward.layers)} attention calls in {config.num_hidden_layers} layers"
            )
        shapes = {tensor.shape for pair in forward.layers for tensor in pair}
        if len(shapes) > 1:
            raise NotImplementedError(f"keys and values of shapes {shapes}")
        ((_, heads, _, dim),) = shapes
        super().__init__((len(forward.layers), heads, dim), slots, max_model_len, model)

    def prefill(
        self, prompts: Sequence[TokenRow], images: Sequence[ImagePrompt | None] = ()
    ) -> PrefilledPrompts:
        if not self._reads_images or all(image is None for image in images):
            return super().prefill(prompts, images)
        forward = PrefillForward()
        prefill_with_images(self._model, pad_right(prompts, self._device)[0], images, forward)
        return PrefilledPrompts(tuple(forward.layers))

    def _compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        forward: PrefillForward,
        *,
        to_end: bool = False,
    ) -> torch.Tensor:
        model = self._model if to_end else self._model.base_model
        with kv_cache.slot_forward(forward):
            output = model(input_ids=token_ids, position_ids=positions, use_cache=False)
        hidden: torch.Tensor = output[0]
        return hidden

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        token_ids = torch.from_numpy(batch.token_ids).to(self._device)
        positions = torch.from_numpy(batch.positions).to(self._device)
        # Rotary positions run on after an image by less than its number of tokens.
        turned = positions
        if self._reads_images and batch.shifts is not None:
            turned = positions + torch.from_numpy(batch.shifts).to(self._device)
        forward = DecodeForward(self._cache, self._bias, positions, batch.length)
        with kv_cache.slot_forward(forward):
            output = self._model(
                input_ids=token_ids[:, None], position_ids=turned[:, None], use_cache=False
            )
        logits: torch.Tensor = output.logits[:, -1]
        return logits
