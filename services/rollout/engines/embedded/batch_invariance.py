"""Decode shapes that keep a row's logits identical to the bit for any contents of the other rows.

Floating-point sums depend on the order of their terms, and matrix kernels choose it by the shape
of the whole batch. So decoding is confined to a few shapes (rows, attention length), and each is
proven before the engine serves: rows of known content, at changing places of the batch, must give
the bits that they give in the largest shape. A shape that fails is not used; a model too slow to
try many always runs in the largest.

In float32 a different order of summation changes the last bit of about every second number, so a
few rows suffice. In bfloat16 rounding hides it in all but one of some hundred thousand: there only
the largest shape is used, and tried far more often.

The cost: padding up to the next proven shape, prompts prefilled one by one, and the proof itself (a
second or two at the start).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.rollout.engines.embedded.decoder import DecodeBatch, Decoder
from sluice.errors import ConfigError

logger = logging.getLogger(__name__)

_STEPS = 8  # shapes tried along each axis
_LENGTH_QUANTUM = 16
_CONTENTS = 16
_TRIALS = {torch.float32: 3, torch.bfloat16: 64}  # arrangements of the rows tried in a shape
_BUDGET_S = 5.0
_SEED = 7


@dataclass(frozen=True, slots=True)
class DecodeShapes:
    """Allowed widths and attention lengths, ascending; the last ones are the engine's limits."""

    widths: tuple[int, ...]
    lengths: tuple[int, ...]

    def padded_shape(self, rows: int, length: int) -> tuple[int, int]:
        """Return the smallest allowed shape that holds so many rows and positions."""
        return (
            self.widths[bisect_left(self.widths, rows)],
            self.lengths[bisect_left(self.lengths, length)],
        )


def _grid(limit: int, quantum: int) -> list[int]:
    step = -(-limit // (_STEPS * quantum)) * quantum
    return [*range(step, limit, step), limit]


def prove_shapes(
    decoder: Decoder, slots: int, max_model_len: int, vocab_size: int, dtype: torch.dtype
) -> DecodeShapes:
    """Find shapes that agree with the largest one.

    Overwrites the rows' state; weights may be any, since kernels are chosen by shape.

    Raises:
        ConfigError: even in the largest shape a row's logits depend on its place.
    """
    proof = _Proof(decoder, slots, max_model_len, vocab_size)
    started = time.perf_counter()
    if not proof.holds(slots, max_model_len, _TRIALS[dtype]):
        raise ConfigError(
            "sluice.rollout.batch_invariant is on, but on this device this model's results depend "
            "on a row's place in the batch; set sluice.rollout.batch_invariant=false"
        )
    seconds = time.perf_counter() - started
    widths, lengths = _grid(slots, 1), _grid(max_model_len, _LENGTH_QUANTUM)
    # The time of one proof predicts the time of the whole grid.
    if dtype is not torch.float32 or seconds * len(widths) * len(lengths) > _BUDGET_S:
        return DecodeShapes((slots,), (max_model_len,))
    trials = _TRIALS[dtype]
    widths = [width for width in widths if proof.holds(width, max_model_len, trials)]
    lengths = [
        length for length in lengths if all(proof.holds(width, length, trials) for width in widths)
    ]
    logger.info("batch invariance is proven for widths %s and lengths %s", widths, lengths)
    return DecodeShapes(tuple(widths), tuple(lengths))


class _Proof:
    """Rows of known content and the logits they must give."""

    def __init__(self, decoder: Decoder, slots: int, max_model_len: int, vocab_size: int) -> None:
        self._decoder = decoder
        # Few contents, repeated over the rows: equal contents must give equal bits in every row.
        contents = min(_CONTENTS, slots)
        generator = np.random.default_rng(_SEED)
        self._tokens = generator.integers(0, vocab_size, (contents, max_model_len))
        # From an empty history to a full one, since the masked part of attention differs with it.
        self._positions = np.linspace(0, max_model_len - 2, contents).astype(np.int64)
        with torch.inference_mode():
            self._prefilled = [
                decoder.prefill([tokens[:position]]) if position else None
                for tokens, position in zip(self._tokens, self._positions, strict=True)
            ]
            logits = self._decode(np.arange(slots) % contents, max_model_len)
            # The first rows hold each content once.
            self._expected = logits[:contents].clone()

    def _decode(self, contents: npt.NDArray[np.int64], length: int) -> torch.Tensor:
        """Return the logits of a batch whose row i holds content ``contents[i]``."""
        positions = self._positions[contents]
        for content in np.unique(contents).tolist():
            prefilled = self._prefilled[content]
            if prefilled is not None:
                rows = np.flatnonzero(contents == content)
                self._decoder.insert(prefilled, np.zeros_like(rows), rows)
        history = self._tokens[contents]
        tokens = history[np.arange(len(contents)), positions]
        return self._decoder.decode(DecodeBatch(tokens, positions, length, history))

    def holds(self, width: int, length: int, trials: int) -> bool:
        """Return whether contents give their expected bits in this shape, in `trials` places."""
        # Contents beyond this attention length cannot be decoded in the shape.
        fitting_positions = np.flatnonzero(self._positions < length)
        places = np.arange(width)
        with torch.inference_mode():
            for trial in range(trials):
                # An odd stride that changes with the trial also changes the rows' neighbours.
                contents = fitting_positions[
                    (places * (2 * trial + 1) + 5 * trial) % len(fitting_positions)
                ]
                logits = self._decode(contents, length)
                chosen = torch.from_numpy(contents).to(logits.device)
                if not torch.equal(logits, self._expected[chosen]):
                    return False
        return True
