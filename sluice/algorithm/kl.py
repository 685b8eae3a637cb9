"""KL divergence from the reference policy: its estimates, and token-level rewards less a penalty
by it (`algorithm.use_kl_in_reward`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from sluice.algorithm.advantages.inputs import masked_mean

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
MAX_PROPORTIONAL_ERROR = 0.2


def _difference(x: torch.Tensor) -> torch.Tensor:
    return x


def _half_square(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x.square()


def _low_variance(x: torch.Tensor) -> torch.Tensor:
    bounded = (-x).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (bounded.exp() - bounded - 1.0).clamp(-MAX_K3, MAX_K3)


KL_ESTIMATORS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "kl": _difference,
    "k1": _difference,
    "abs": torch.abs,
    "mse": _half_square,
    "k2": _half_square,
    "low_var_kl": _low_variance,
    "k3": _low_variance,
}
"""By verl's names, of the difference of the logprobs. ``full`` is none of them: it needs the
probabilities of the whole vocabulary, which are not kept.
"""


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, *, kind: str) -> torch.Tensor:
    """Estimate KL(policy || reference) at each token sampled from the policy (Schulman 2020,
    "Approximating KL divergence").

    With ``x = logprobs - ref_logprobs``: ``kl``, ``k1``: x; ``abs``: |x|; ``mse``, ``k2``:
    x^2 / 2; ``low_var_kl``, ``k3``: ``exp(-x) + x - 1`` with x within +-20 and the result within
    +-10. A ``+`` behind the name keeps the value and takes the gradient of k2, whose expectation
    is the gradient of the divergence (straight-through).

    Args:
        logprobs: float, any shape; carries the gradient.
        ref_logprobs: float of the same shape.
        kind: one of `KL_ESTIMATORS`, with or without ``+``.
    """
    name = kind.removesuffix("+")
    difference = logprobs - ref_logprobs
    value = KL_ESTIMATORS[name](difference)
    if name == kind:
        return value
    k2 = _half_square(difference)
    return k2 - k2.detach() + value.detach()


def last_token_rewards(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return each row's score on its last masked position, 0 elsewhere.

    The score of a row without any goes to its last column: such a row has no tokens to train, but
    still counts in the statistics of its group, as in verl.

    Args:
        scores: float [rows].
        mask: bool [rows, width], width >= 1.

    Returns:
        float [rows, width], in the scores' dtype.
    """
    rewards = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    from_the_end = mask.flip(-1).to(torch.int8).argmax(-1, keepdim=True)
    return rewards.scatter(-1, mask.shape[-1] - 1 - from_the_end, scores.unsqueeze(-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class KlController:
    """A state; `after_batch` gives the next one.

    ``fixed`` keeps `coef`. ``adaptive`` moves it towards `target_kl` (Ziegler et al. 2019, arXiv
    1909.08593, §2.2): ``coef * (1 + clip(kl / target_kl - 1, -0.2, 0.2) * rows / horizon)``.

    Args:
        type: ``fixed`` or ``adaptive``.
        coef: coefficient of the penalty in the next batch.
        target_kl: divergence a token to be reached, > 0.
        horizon: number of rows that double the coefficient at a clipped error of 1, > 0.
    """

    type: str = "fixed"
    coef: float = 0.001
    target_kl: float = 0.1
    horizon: float = 10000.0

    def after_batch(self, current_kl: float, *, num_rows: int) -> KlController:
        """Return the state after a batch of `num_rows` rows whose mean KL was `current_kl`.

        One bad batch must not destroy the coefficient: a KL that is no number leaves it as it is.
        """
        if self.type == "fixed" or not math.isfinite(current_kl):
            return self
        error = current_kl / self.target_kl - 1.0
        clipped = min(max(error, -MAX_PROPORTIONAL_ERROR), MAX_PROPORTIONAL_ERROR)
        return dataclasses.replace(self, coef=self.coef * (1.0 + clipped * num_rows / self.horizon))


@dataclass(frozen=True, slots=True, eq=False)
class PenalizedRewards:
    """Rewards less the penalty, the controller for the next batch, and the metrics.

    Args:
        rewards: float [rows, width], token-level.
        controller: after this batch.
        metrics: ``actor/reward_kl_penalty``, the mean over rows of each row's token mean, and
            ``actor/reward_kl_penalty_coeff``, the coefficient that was used.
    """

    rewards: torch.Tensor
    controller: KlController
    metrics: Mapping[str, float]


@torch.no_grad()
def penalize_rewards(
    scores: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    kind: str,
    controller: KlController,
) -> PenalizedRewards:
    """``scores - coef * KL(old || ref)`` on the mask, the scores elsewhere.

    Args:
        scores: float [rows, width], token-level.
        old_logprobs: float [rows, width], of the policy before the batch.
        ref_logprobs: float [rows, width], of the reference policy.
        mask: bool [rows, width], the tokens of the responses.
    """
    estimate = kl_estimate(old_logprobs, ref_logprobs, kind=kind)
    penalty = torch.where(mask.bool(), estimate, torch.zeros_like(estimate))
    current_kl = float(masked_mean(penalty, mask, -1).mean()) if scores.numel() else 0.0
    return PenalizedRewards(
        rewards=scores - controller.coef * penalty,
        controller=controller.after_batch(current_kl, num_rows=scores.shape[0]),
        metrics={
            "actor/reward_kl_penalty": current_kl,
            "actor/reward_kl_penalty_coeff": controller.coef,
        },
    )
