"""Where two tensors of one shape and dtype differ, as bits."""

from __future__ import annotations

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changed_positions(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """int64 ``[changed]``, rising positions in the flattened tensors.

    Bits are compared, not numbers: NaN equals itself, and -0.0 differs from 0.0.

    Args:
        old: contiguous, any shape, any dtype of at most 8 bytes.
        new: the same.
    """
    bits = _BITS[new.element_size()]
    return (old.view(-1).view(bits) != new.view(-1).view(bits)).nonzero().view(-1)
