"""The plain policy gradient (loss_mode ``gpg``)."""

from __future__ import annotations

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import PolicyObjective, token_objective
from sluice.algorithm.losses.settings import PolicyLossSettings


def gpg_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """``-A log p``, no ratio and no metrics (GPG, Chu et al. 2025, arXiv 2504.02546)."""
    return token_objective(-inputs.advantages * inputs.logprobs, inputs, counts, settings, {})
