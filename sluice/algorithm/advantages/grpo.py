"""Group-relative advantages (GRPO, DeepSeekMath §4.1.2; Dr.GRPO without the division)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

STD_EPSILON = 1e-6


def grpo_advantages(
    rewards: npt.NDArray[np.float64], *, norm_by_std: bool
) -> npt.NDArray[np.float64]:
    """``A = (R - mean) / (std + 1e-6)`` over one group, std unbiased (n - 1).

    A group of one keeps its raw reward (mean 0, std 1), as verl does. A group whose rewards are
    all equal gets exactly 0: rounding of the mean must not be blown up by the division.

    Args:
        rewards: float64 [samples], one group.
        norm_by_std: divide by the std (GRPO, DAPO); False gives ``R - mean`` (Dr.GRPO).

    Returns:
        float64 [samples]; every response token of sample *i* carries entry *i*.

    Raises:
        ValueError: `rewards` is empty or not one-dimensional, or holds a non-finite number.
    """
    if rewards.ndim != 1 or rewards.size == 0:
        raise ValueError(
            f"rewards of one group must have shape [samples >= 1], got {rewards.shape}"
        )
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards of one group must be finite, got {rewards.tolist()}")
    values = rewards.astype(np.float64)
    if values.size == 1:
        return values / (1.0 + STD_EPSILON) if norm_by_std else values
    if values.min() == values.max():
        return np.zeros_like(values)
    centred: npt.NDArray[np.float64] = values - values.mean()
    return centred / (values.std(ddof=1) + STD_EPSILON) if norm_by_std else centred
