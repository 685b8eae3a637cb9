"""Validation samples to read along (`trainer.log_val_generations`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

TABLE_COLUMNS = ("step", "input", "output", "score")
_SEED = 42


@dataclass(frozen=True, slots=True)
class Generation:
    """A validation prompt, the response to it and its score."""

    input: str
    output: str
    score: float


def choose_generations(generations: Iterable[Generation], count: int) -> list[Generation]:
    """`count` of them, or all if there are fewer; the same prompts at every validation.

    verl's choice: sorted by input, shuffled by a generator of a fixed seed, the first ones.
    """
    ordered = sorted(generations, key=lambda generation: generation.input)
    order = np.arange(len(ordered))
    np.random.RandomState(_SEED).shuffle(order)
    return [ordered[index] for index in order[: max(count, 0)]]
