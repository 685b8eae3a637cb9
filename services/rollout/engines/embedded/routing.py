"""A decoder that records the experts that a model's routers choose, for samples that need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from services.rollout.engines.causal_lm import expert_routers
from services.rollout.engines.embedded.decoder import (
    DecodeBatch,
    Decoder,
    PrefilledPrompts,
    Rows,
    TokenRow,
)
from services.rollout.engines.embedded.generic_decoder import RecomputeDecoder
from sluice.errors import ConfigError
from sluice.types import RoutedExperts, expert_dtype
from sluice.vision.image_prompts import ImagePrompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RoutedDecoder(Decoder):
    """Wraps a decoder and records the experts of every row's tokens. It keeps no prefixes, which
    would lack experts.

    Args:
        decoder: runs the model.
        model: with routers; see `expert_routers`.
        slots: rows.
        max_model_len: positions that a row may have.

    Raises:
        ConfigError: from `expert_routers`; or the decoder computes whole rows at every step, where
            a pass has the experts of more than its rows' new tokens.
    """

    def __init__(
        self, decoder: Decoder, model: PreTrainedModel, slots: int, max_model_len: int
    ) -> None:
        routers = expert_routers(model).values()
        if isinstance(decoder, RecomputeDecoder):
            raise ConfigError(
                "actor_rollout_ref.actor.router_replay.mode=R3: the torch engine has no cache for "
                f"this {model.config.model_type} model and keeps no experts; set it to disabled"
            )
        config: Any = model.config.get_text_config(decoder=True)
        shape = (slots, max_model_len, len(routers), config.num_experts_per_tok)
        self._experts: RoutedExperts = np.zeros(shape, expert_dtype(config.num_experts))
        self._decoder = decoder
        self._chosen: list[torch.Tensor] = []  # by router, of the running pass
        for router in routers:
            router.register_forward_hook(self._note)

    def _note(self, _router: nn.Module, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        self._chosen.append(output[2])

    def _take(self, rows: int) -> RoutedExperts:
        """Return the experts of a pass that has ended, [rows, tokens, layers, k]."""
        chosen, self._chosen = self._chosen, []
        by_row = torch.stack(chosen, 1).unflatten(0, (rows, -1))
        experts: RoutedExperts = by_row.cpu().numpy().astype(self._experts.dtype)
        return experts

    def prefill(
        self, prompts: Sequence[TokenRow], images: Sequence[ImagePrompt | None] = ()
    ) -> PrefilledPrompts:
        prefilled = self._decoder.prefill(prompts, images)
        return replace(prefilled, routing=self._take(len(prompts)))

    def score(self, prompt: TokenRow) -> tuple[PrefilledPrompts, torch.Tensor]:
        prefilled, logits = self._decoder.score(prompt)
        return replace(prefilled, routing=self._take(1)), logits

    def insert(self, prefilled: PrefilledPrompts, prompts: Rows, rows: Rows) -> None:
        self._decoder.insert(prefilled, prompts, rows)
        assert prefilled.routing is not None
        self._experts[rows, : prefilled.routing.shape[1]] = prefilled.routing[prompts]

    def move(self, sources: Rows, targets: Rows, length: int) -> None:
        self._decoder.move(sources, targets, length)
        self._experts[targets, :length] = self._experts[sources, :length]

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        logits = self._decoder.decode(batch)
        rows = len(batch.token_ids)
        self._experts[np.arange(rows), batch.positions] = self._take(rows)[:, 0]
        return logits

    def refresh(self) -> None:
        self._decoder.refresh()

    def routing(self, row: int, length: int) -> RoutedExperts:
        """Return the experts of a row's first `length` tokens, [length, layers, k]."""
        experts: RoutedExperts = self._experts[row, :length].copy()
        return experts
