"""GRPO's advantages of one group that is given by its rewards alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sluice.algorithm.advantages.group_relative import group_relative
from sluice.algorithm.advantages.inputs import Groups


def grpo_advantages(
    rewards: npt.NDArray[np.float64], *, norm_by_std: bool
) -> npt.NDArray[np.float64]:
    """`grpo` for one group given by its rewards alone.

    Args:
        rewards: float64 [samples], one group.
        norm_by_std: divide by the std (GRPO, DAPO); False gives ``R - mean`` (Dr. GRPO).

    Returns:
        float64 [samples]; every response token of sample *i* carries entry *i*.
    """
    values = torch.tensor(rewards, dtype=torch.float64)
    group = Groups(torch.zeros(rewards.size, dtype=torch.int64), torch.tensor([rewards.size]))
    found: npt.NDArray[np.float64] = group_relative(values, group, norm_by_std=norm_by_std).numpy()
    return found
