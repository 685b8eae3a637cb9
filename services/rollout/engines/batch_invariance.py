"""Decode shapes under which a row's logits are the same to the bit whatever the other rows hold.

Floating-point sums depend on the order of their terms, and matrix kernels choose it by the shape
of the whole batch. So decoding is confined to a few shapes (rows, attention length), and each is
proven before the engine serves: rows of known content, at every place of the batch, must give the
bits that they give in the largest shape. A shape that fails is not used; a model too slow to try
many always runs in the largest.

The cost: padding up to the next proven shape, prompts prefilled one by one, and the proof itself (a
second or two at the start).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.rollout.engines.decoder import DecodeBatch, Decoder
from sluice.errors import ConfigError

__all__ = ["DecodeShapes", "prove_shapes"]

logger = logging.getLogger(__name__)

_STEPS = 8  # shapes tried along each axis
_LENGTH_QUANTUM = 16
_CONTENTS = 4
_BUDGET_S = 5.0
_SEED = 7


@dataclass(frozen=True, slots=True)
class DecodeShapes:
    """Allowed widths and attention lengths, ascending; the last ones are the engine's limits."""

    widths: tuple[int, ...]
    lengths: tuple[int, ...]

    def padded(self, rows: int, length: int) -> tuple[int, int]:
        """The smallest allowed shape that holds so many rows and positions."""
        return (
            self.widths[bisect_left(self.widths, rows)],
            self.lengths[bisect_left(self.lengths, length)],
        )


def _grid(limit: int, quantum: int) -> list[int]:
    step = -(-limit // (_STEPS * quantum)) * quantum
    return [*range(step, limit, step), limit]


def prove_shapes(decoder: Decoder, slots: int, max_model_len: int, vocab_size: int) -> DecodeShapes:
    """Finds shapes that agree with the largest one.

    Overwrites the rows' state; weights may be any, since kernels are chosen by shape.

    Raises:
        ConfigError: even in the largest shape a row's logits depend on its place.
    """
    proof = _Proof(decoder, slots, max_model_len, vocab_size)
    started = time.perf_counter()
    if not proof.holds(slots, max_model_len):
        raise ConfigError(
            "sluice.rollout.batch_invariant is on, but on this device this model's results depend "
            "on a row's place in the batch; set sluice.rollout.batch_invariant=false"
        )
    # Each check decodes two or three times; a model too slow to try many shapes gets only one.
    planned = len(_grid(slots, 1)) * len(_grid(max_model_len, _LENGTH_QUANTUM))
    if (time.perf_counter() - started) * planned > _BUDGET_S:
        return DecodeShapes((slots,), (max_model_len,))
    widths = [w for w in _grid(slots, 1) if proof.holds(w, max_model_len)]
    lengths = [
        length
        for length in _grid(max_model_len, _LENGTH_QUANTUM)
        if all(proof.holds(width, length) for width in widths)
    ]
    logger.info("batch invariance is proven for widths %s and lengths %s", widths, lengths)
    return DecodeShapes(tuple(widths), tuple(lengths))


class _Proof:
    """Rows of known content and the logits they must give."""

    def __init__(self, decoder: Decoder, slots: int, max_model_len: int, vocab_size: int) -> None:
        self._decoder = decoder
        generator = np.random.default_rng(_SEED)
        self._tokens = generator.integers(0, vocab_size, (_CONTENTS, max_model_len))
        last = max_model_len - 2
        self._positions = np.unique([0, last // 7, last // 2, last])
        with torch.inference_mode():
            self._prefilled = [
                decoder.prefill([tokens[:position]]) if position else None
                for tokens, position in zip(self._tokens, self._positions, strict=False)
            ]
            contents = np.arange(slots) % len(self._positions)
            logits = self._decode(contents, max_model_len)
        self._expected: list[torch.Tensor | None] = [
            logits[content].clone() if content < slots else None
            for content in range(len(self._positions))
        ]

    def _decode(self, contents: npt.NDArray[np.int64], length: int) -> torch.Tensor:
        """Logits of a batch whose row i holds content ``contents[i]``."""
        positions = self._positions[contents]
        for content in np.unique(contents).tolist():
            prefilled = self._prefilled[content]
            if prefilled is not None:
                self._decoder.insert(prefilled, 0, np.flatnonzero(contents == content))
        history = self._tokens[contents]
        tokens = history[np.arange(len(contents)), positions]
        return self._decoder.decode(DecodeBatch(tokens, positions, length, history))

    def holds(self, width: int, length: int) -> bool:
        """Whether every content that fits gives its expected bits at every place."""
        fitting = [
            content
            for content, expected in enumerate(self._expected)
            if expected is not None and self._positions[content] < length
        ]
        with torch.inference_mode():
            return all(
                self._agrees(self._decode(contents, length), contents)
                for contents in _arrangements(fitting, width)
            )

    def _agrees(self, logits: torch.Tensor, contents: npt.NDArray[np.int64]) -> bool:
        known = [expected for expected in self._expected if expected is not None]
        return torch.equal(logits, torch.stack(known)[torch.from_numpy(contents).to(logits.device)])


def _arrangements(contents: Sequence[int], width: int) -> list[npt.NDArray[np.int64]]:
    """Batches in which each place holds each of `contents` once."""
    places = np.arange(width)
    return [np.array(contents)[(places + shift) % len(contents)] for shift in range(len(contents))]
