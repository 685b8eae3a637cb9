"""The decoder, which turns tokens into logits for the generation loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sluice.types import RoutedExperts
from sluice.vision.image_prompts import ImagePrompt

if TYPE_CHECKING:
    import torch

TokenRow = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PrefilledPrompts:
    """Keys and values of prompts that were computed together, padded on the right.

    Attributes:
        layers: per layer keys and values, each [prompts, kv heads, padded length, head dim]; empty
            for a decoder without a cache.
        routing: [prompts, padded length, layers, experts per token]; ``None`` if not kept.
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    routing: RoutedExperts | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """The first tokens of a prompt, and a copy of their state.

    Attributes:
        tokens: [tokens], at least one.
        layers: keys and values, [layers, kv heads, 2, tokens, head dim].
    """

    tokens: TokenRow
    layers: torch.Tensor

    def cut(self, length: int) -> CachedPrefix:
        """Return the first `length` tokens, in the same memory."""
        return CachedPrefix(self.tokens[:length], self.layers[:, :, :, :length])


@dataclass(frozen=True, slots=True, eq=False)
class DecodeBatch:
    """One decode step of rows ``0 .. rows - 1``.

    Attributes:
        token_ids: [rows] int64, each row's newest token.
        positions: [rows] int64, that token's position (0-based).
        length: how far attention looks; above every position.
        history: [rows, >= length] int64, all tokens of each row up to its position.
        shifts: [rows] int64, offset of rotary positions to `positions` after a prompt with images
            (`RopePositions.shift`); ``None`` if no row has one.
    """

    token_ids: TokenRow
    positions: npt.NDArray[np.int64]
    length: int
    history: npt.NDArray[np.int64]
    shifts: npt.NDArray[np.int64] | None = None


class Decoder(ABC):
    """Prefill and decode over slots. By default a decoder keeps no state of a row."""

    @abstractmethod
    def prefill(
        self, prompts: Sequence[TokenRow], images: Sequence[ImagePrompt | None] = ()
    ) -> PrefilledPrompts:
        """Compute the state of non-empty prompts, without touching any row.

        Args:
            prompts: each a prompt without its last token, or one with response tokens after it.
            images: the images of each prompt; empty if no prompt has any.

        Raises:
            NotImplementedError: a prompt has images, which this decoder does not read.
        """

    @abstractmethod
    def score(self, prompt: TokenRow) -> tuple[PrefilledPrompts, torch.Tensor]:
        """Prefill one prompt without images, and return the logits after each token.

        Returns:
            the prompt's state, and logits [tokens, vocab].
        """

    def extend(
        self, prefixes: Sequence[CachedPrefix], prompts: Sequence[TokenRow]
    ) -> PrefilledPrompts:
        """Compute the state of the tokens after each prompt's known prefix.

        Args:
            prefixes: the known prefix of each prompt, from `keep`.
            prompts: each longer than its known prefix.
        """
        raise NotImplementedError("a decoder that keeps no prefix gets none")

    def keep(self, row: int, tokens: TokenRow) -> CachedPrefix | None:
        """Return a copy of the state of a row's first `tokens`; ``None`` without state."""
        return None

    def insert(self, prefilled: PrefilledPrompts, prompts: Rows, rows: Rows) -> None:  # noqa: B027
        """Give row ``rows[i]`` the state of prompt ``prompts[i]``."""

    def move(self, sources: Rows, targets: Rows, length: int) -> None:  # noqa: B027
        """Copy the first `length` positions of rows `sources` over rows `targets`."""

    @abstractmethod
    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        """Add each row's newest token to its state; return the next logits, [rows, vocab]."""

    def refresh(self) -> None:  # noqa: B027
        """Adopt changed model weights. Keep the rows' state."""
