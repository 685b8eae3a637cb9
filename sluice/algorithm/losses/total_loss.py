"""The loss that is differentiated: policy, entropy bonus and divergence from the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import PolicyObjective, aggregate_share
from sluice.algorithm.losses.settings import PolicyLossSettings

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class TotalLoss:
    """0-d shares of one micro-batch; only `total` is to be differentiated.

    The others are detached and unweighted, ``None`` where the term was not given: their sums over
    micro-batches (and ranks, or means over averaged ranks) are verl's ``actor/pg_loss``,
    ``actor/entropy_loss`` and ``actor/kl_loss``.
    """

    total: torch.Tensor
    policy: torch.Tensor
    entropy: torch.Tensor | None
    kl: torch.Tensor | None


def total_loss(
    objective: PolicyObjective,
    inputs: LossInputs,
    counts: GlobalCounts,
    settings: PolicyLossSettings,
    *,
    entropy: torch.Tensor | None = None,
    entropy_coeff: float = 0.0,
    kl: torch.Tensor | None = None,
    kl_loss_coef: float = 0.0,
) -> TotalLoss:
    """``policy - entropy_coeff agg(entropy) + kl_loss_coef agg(kl)``.

    Both terms are aggregated by ``settings.loss_agg_mode``, also where the policy loss overrides
    it, and without importance weights.

    Args:
        objective: the policy's share.
        inputs: of the same tokens.
        counts: of the same mini-batch.
        settings: aggregation mode.
        entropy: float [N], nats; with a coefficient of 0 it is only reported.
        entropy_coeff: weight of the bonus.
        kl: float [N], estimated divergences from the reference policy.
        kl_loss_coef: weight of the penalty.
    """
    total, shares = objective.loss, []
    for values, weight in ((entropy, -entropy_coeff), (kl, kl_loss_coef)):
        share = None if values is None else aggregate_share(values, inputs, counts, settings)
        if share is not None and weight != 0.0:
            total = total + weight * share
        shares.append(None if share is None else share.detach())
    return TotalLoss(total, objective.loss.detach(), *shares)
