"""The decoder of last resort: no cache, every step runs the model over whole sequences.

Correct for any causal language model (state-space layers, attention biases made from masks,
architectures with attention code of their own), at a cost that grows with the square of the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from services.rollout.engines.decoder import DecodeBatch, PrefilledPrompts, Rows, TokenRow
from sluice.vision.image_prompts import ImagePrompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RecomputeDecoder"]


class RecomputeDecoder:
    """Keeps no state: the history in each batch is all it needs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._device = model.device

    def prefill(
        self, prompts: Sequence[TokenRow], images: Sequence[ImagePrompt | None] = ()
    ) -> PrefilledPrompts:
        """See `Decoder.prefill`: nothing to compute."""
        if any(images):
            raise NotImplementedError("images")
        return PrefilledPrompts(tuple(len(p) for p in prompts), ())

    def insert(self, prefilled: PrefilledPrompts, prompts: Rows, rows: Rows) -> None:
        """See `Decoder.insert`: nothing to store."""

    def move(self, sources: Rows, targets: Rows, length: int) -> None:
        """See `Decoder.move`: nothing to move."""

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        """See `Decoder.decode`."""
        positions = torch.from_numpy(batch.positions).to(self._device)
        steps = torch.arange(batch.length, device=self._device)
        real = steps <= positions[:, None]
        token_ids = torch.from_numpy(batch.history[:, : batch.length].copy()).to(self._device)
        output = self._model(
            input_ids=token_ids.masked_fill(~real, 0), attention_mask=real.long(), use_cache=False
        )
        logits: torch.Tensor = output.logits
        return logits[torch.arange(len(positions), device=self._device), positions]

    def refresh(self) -> None:
        """See `Decoder.refresh`: the model's own weights are used, nothing is derived."""
