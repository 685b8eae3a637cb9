"""Uniform numbers that depend on (seed, sample index, token index) and on nothing else.

A sample therefore draws the same tokens whatever else shares its batch, wherever it is generated,
and when it is continued after an interruption. The generator is SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", 2014): the n-th output of a stream is a hash of
its key plus n times an odd constant, so any token's number is found without those before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["sample_keys", "uniforms"]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1
_UNIT = 2.0**-52


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def sample_keys(seed: int, sample_indexes: Sequence[int]) -> npt.NDArray[np.uint64]:
    """One stream key per sample. Shape [samples]; any integers are accepted, modulo 2^64."""
    root = _mix(np.array([seed & _MASK], dtype=np.uint64) + _GAMMA)
    index = np.array([i & _MASK for i in sample_indexes], dtype=np.uint64)
    return _mix(root + (index + np.uint64(1)) * _GAMMA)


def uniforms(
    keys: npt.NDArray[np.uint64], token_indexes: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1 - 2^-52]; the arguments' shapes are broadcast.

    52 bits, not 53: a total mass times the largest of them is then strictly below that mass in
    float64, which the inverse-CDF sampler relies on.
    """
    counter = token_indexes.astype(np.uint64) + np.uint64(1)
    bits: npt.NDArray[np.uint64] = _mix(keys + counter * _GAMMA) >> np.uint64(12)
    return bits.astype(np.float64) * _UNIT
