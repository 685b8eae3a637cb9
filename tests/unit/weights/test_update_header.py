"""The header says what follows, or that it was damaged."""

from __future__ import annotations

import pytest
import torch

from sluice.types import TensorSpec
from sluice.weights.plan import plan_transfer
from sluice.weights.transfer import BaseVersion, UpdateHeader, header_bytes

_PLAN = plan_transfer([TensorSpec("w", "float32", (3000,))], 4096)
_BASE = BaseVersion(6, "0f" * 16)


@pytest.mark.parametrize(
    "header",
    [
        UpdateHeader(7, (4096, 4096, 3808)),
        UpdateHeader(7, (12, 1 << 40, 0), _BASE, keep=True),
        UpdateHeader(-1, (1, 2, 3), BaseVersion(0, "00" * 16)),
    ],
)
def test_a_header_comes_back_and_has_the_length_of_the_plan(header: UpdateHeader) -> None:
    encoded = header.encode()
    assert encoded.numel() == header_bytes(_PLAN)
    assert UpdateHeader.decode(encoded) == header


def test_every_flipped_bit_is_noticed() -> None:
    encoded = UpdateHeader(7, (1, 2, 3), _BASE).encode()
    for place in range(encoded.numel()):
        damaged = encoded.clone()
        damaged[place] ^= 4
        with pytest.raises(ValueError, match="header"):
            UpdateHeader.decode(damaged)


def test_zeros_are_no_header() -> None:
    with pytest.raises(ValueError, match="the header starts with"):
        UpdateHeader.decode(torch.zeros(header_bytes(_PLAN), dtype=torch.uint8))
