"""New bits come back from the old ones and the steps between them."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.weights.delta import decode_steps, encode_steps


@pytest.mark.parametrize("step", [1, 2, 126, 127, 128, 129, 32767, 32768, 65408, 65409, 65535])
def test_every_16_bit_pattern_comes_back_from_a_step(step: int) -> None:
    old = np.arange(1 << 16, dtype=np.uint16)
    new = old + np.uint16(step)
    steps, whole = encode_steps(old, new)
    np.testing.assert_array_equal(decode_steps(old, steps, whole), new)


def test_a_step_of_one_unit_takes_one_byte() -> None:
    old = np.full(100, 0x3F80, dtype=np.uint16)
    steps, whole = encode_steps(old, old - np.uint16(1))
    assert (steps.nbytes, whole.nbytes) == (100, 0)


def test_values_that_are_missing_or_too_many_are_refused() -> None:
    old = np.zeros(2, dtype=np.uint16)
    for whole in ([], [1, 2]):
        with pytest.raises(ValueError, match="not coded as steps"):
            decode_steps(old, np.array([255, 0], dtype=np.uint8), np.array(whole, dtype=np.uint16))
