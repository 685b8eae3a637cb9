"""RMSNorm in few operations (Zhang and Sennrich, "Root mean square layer normalization", 2019).

``w x / sqrt(mean(x^2) + eps)`` is ``(w sqrt(n)) x / hypot(|x|, sqrt(n eps))`` for x of n numbers.
In float32 this takes four kernels where torch's own composition on the CPU takes about ten; with
batches of small rows the calls cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["RmsNorm"]


class RmsNorm:
    """A norm over the last axis.

    Args:
        parts: weights [n], each with how many heads it serves, or with ``None`` where the input
            has no axis of heads. Several parts stand one behind the other along that axis.
        eps: added to the mean square.
    """

    def __init__(self, parts: Sequence[tuple[torch.Tensor, int | None]], eps: float) -> None:
        self._parts, self._eps = tuple(parts), eps
        weight = parts[0][0]
        self._width = weight.shape[-1]
        self._composed = weight.dtype == torch.float32
        self._floor = torch.tensor((self._width * eps) ** 0.5, device=weight.device)
        self.refresh()

    def refresh(self) -> None:
        """Takes over changed weights."""
        weights = [
            weight if heads is None else weight.expand(heads, -1) for weight, heads in self._parts
        ]
        factor = self._width**0.5 if self._composed else 1.0
        self._weight = torch.cat(weights) * factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] or [..., heads, n] in, the same out."""
        if not self._composed:
            # Half precision needs the sum of squares in float32, as torch does it.
            return torch.rms_norm(x, (self._width,), None, self._eps).mul_(self._weight)
        size = torch.linalg.vector_norm(x, 2, -1, True)
        return torch.div(x, torch.hypot(size, self._floor)).mul_(self._weight)
