"""The optimal token baseline for responses with tool observations between turns."""

from __future__ import annotations

import torch

from sluice.algorithm.advantages.inputs import AdvantageInputs, Advantages, AdvantageSettings
from sluice.algorithm.advantages.optimal_token_baseline import optimal_token_baseline

_NAME = "tir_optimal_token_baseline"


@torch.no_grad()
def tir_optimal_token_baseline(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """`optimal_token_baseline` on rows from which unmasked positions were taken out.

    The k-th token that the policy chose is compared with the k-th of the group's other rows,
    wherever observations stand. Needs `group_index`, `old_logprobs` and `sum_pi_squared`.
    """
    # A stable sort by "not chosen" moves the chosen positions to the front, in their order.
    order = torch.argsort((~inputs.mask).to(torch.int8), dim=-1, stable=True)
    found = optimal_token_baseline(_reordered(inputs, order), settings)
    advantages = torch.zeros_like(inputs.rewards).scatter(-1, order, found.advantages)
    return Advantages(advantages, inputs.reward_to_go())


def _reordered(inputs: AdvantageInputs, order: torch.Tensor) -> AdvantageInputs:
    weights = inputs.importance_weights
    return AdvantageInputs(
        rewards=inputs.rewards.gather(-1, order),
        mask=inputs.mask.gather(-1, order),
        group_index=inputs.required("group_index", estimator=_NAME),
        old_logprobs=inputs.required("old_logprobs", estimator=_NAME).gather(-1, order),
        sum_pi_squared=inputs.required("sum_pi_squared", estimator=_NAME).gather(-1, order),
        importance_weights=None if weights is None else weights.gather(-1, order),
    )
