"""How far the trainer's old policy is from the one that drew the tokens: perplexities, KL, chi2."""

from __future__ import annotations

import torch

from sluice.algorithm.rollout_correction.statistics import Moments, Reading, Statistic
from sluice.algorithm.rollout_correction.token_rows import TokenRows

MAX_LOG_RATIO = 20.0


@torch.no_grad()
def off_policy_statistics(
    old_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, rows: TokenRows
) -> dict[str, Statistic]:
    """Statistics of a batch, taken in float64.

    With x the difference old - behaviour of a token: ``kl`` is the token mean of -x, ``k3_kl`` of
    exp(x) - x - 1, ``chi2_token`` of exp(2 x) - 1 with x within +-20, ``chi2_seq`` the row mean of
    the same of the row's sum of x. Perplexities are exp(-mean logprob) of each row, averaged over
    rows; ``log_ppl_diff`` is the trainer's log perplexity less the engine's, ``ppl_ratio`` its
    exponential.

    Args:
        old_logprobs: float [tokens], of the trainer.
        behavior_logprobs: float [tokens], of the engine.
        rows: of the tokens.
    """
    rows = rows.on_cpu()
    old, behavior = old_logprobs.cpu().double(), behavior_logprobs.cpu().double()
    x, training, rollout = old - behavior, -rows.mean(old), -rows.mean(behavior)
    gap = Moments.of(training - rollout)
    means = {
        "training_ppl": training.exp(),
        "training_log_ppl": training,
        "rollout_ppl": rollout.exp(),
        "rollout_log_ppl": rollout,
        "log_ppl_diff": training - rollout,
        "log_ppl_abs_diff": (training - rollout).abs(),
        "ppl_ratio": (training - rollout).exp(),
        "kl": -x,
        "k3_kl": x.expm1() - x,
        "chi2_token": _squared_ratio(x) - 1.0,
        "chi2_seq": _squared_ratio(rows.sum(x)) - 1.0,
    }
    return {
        **{name: Statistic(Moments.of(values), Reading.MEAN) for name, values in means.items()},
        "log_ppl_diff_max": Statistic(gap, Reading.MAX),
        "log_ppl_diff_min": Statistic(gap, Reading.MIN),
    }


def _squared_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return (2.0 * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()
