"""New bits in few bytes: how far they are from the old ones, read as integers.

An optimizer step moves most weights by one unit in the last place or by none, and the bits of
neighbouring floating-point numbers are neighbouring integers. The step from old to new bits
(modulo 2 to the number of bits; 1, -1, 2, -2, ... become 1, 0, 3, 2, ... less the 0 that never
occurs) is a byte if it fits; 255 says that the new bits follow as they are. Bits, not numbers: NaN
and -0.0 are like any others.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]

_WHOLE = 255


def encode_steps(old: Bits, new: Bits) -> tuple[NDArray[np.uint8], Bits]:
    """The steps from `old` to `new`, unsigned of one width, ``[changed]``, nowhere equal.

    Returns:
        uint8 ``[changed]``, and the new bits of those whose step is 255, in their order.
    """
    step = new - old
    backwards = step > np.iinfo(step.dtype).max // 2
    size = np.where(backwards, -step, step) - np.array(1, dtype=step.dtype)
    far = size > (_WHOLE - 2) // 2
    steps = np.where(far, 0, size).astype(np.uint8) * 2 + ~backwards
    steps[far] = _WHOLE
    return steps.astype(np.uint8), new[far]


def decode_steps(old: Bits, steps: NDArray[np.uint8], whole: Bits) -> Bits:
    """The new bits.

    Args:
        old: unsigned ``[changed]``.
        steps: uint8 ``[changed]``.
        whole: of the dtype of `old`, one for each step of 255.

    Raises:
        ValueError: more or fewer steps are 255 than `whole` has.
    """
    far = steps == _WHOLE
    if (count := int(np.count_nonzero(far))) != whole.size:
        raise ValueError(f"{count} values are not coded as steps, and {whole.size} are given whole")
    size = (steps >> 1).astype(old.dtype) + np.array(1, dtype=old.dtype)
    new = np.where(steps & 1, old + size, old - size)
    new[far] = whole
    return new
