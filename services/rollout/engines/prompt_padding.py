"""Prompts of different lengths as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.rollout.engines.decoder import TokenRow

__all__ = ["pad_right"]


def pad_right(
    prompts: Sequence[TokenRow], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, filled up with zeros, and positions; both [prompts, longest] int64.

    In a causal model no real token sees the padding behind it.
    """
    longest = max(len(prompt) for prompt in prompts)
    token_ids = np.zeros((len(prompts), longest), dtype=np.int64)
    for row, prompt in zip(token_ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    positions = torch.arange(longest, device=device).expand(len(prompts), -1)
    return torch.from_numpy(token_ids).to(device), positions
