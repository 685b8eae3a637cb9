"""Group sequence policy optimization: the ratio of a whole response (loss_mode ``gspo``)."""

from __future__ import annotations

import torch

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs, row_means
from sluice.algorithm.losses.objective import (
    LossAggregation,
    PolicyObjective,
    surrogate_terms,
    token_metric,
    token_objective,
    zero_metric,
)
from sluice.algorithm.losses.settings import PolicyLossSettings

MAX_LOG_SEQUENCE_RATIO = 10.0


def gspo_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """Return PPO's clipped terms of ``s_t = sg(s) p / sg(p)``, s the row's geometric mean ratio.

    GSPO-token (Zheng et al. 2025, arXiv 2507.18071, §4.3): the value is the sequence's, the
    gradient a token's own. ``log s_t`` is kept at or below 10; there is no dual clip. Always
    aggregated as ``seq-mean-token-mean``, whatever `loss_agg_mode` is.
    """
    log_ratio = inputs.logprobs.detach() - inputs.old_logprobs
    log_sequence = row_means(log_ratio, inputs.row_index, inputs.num_rows)[inputs.row_index]
    # 0 in value: it only gives the sequence's ratio the gradient of this token.
    own = inputs.logprobs - inputs.logprobs.detach()
    ratio = (own + log_sequence).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    unclipped, clipped = surrogate_terms(
        ratio, inputs.advantages, settings.clip_low, settings.clip_high
    )
    metrics = {
        "actor/pg_clipfrac": token_metric(clipped > unclipped),
        "actor/pg_clipfrac_lower": zero_metric(inputs),
        "actor/ppo_kl": token_metric(-log_ratio),
    }
    return token_objective(
        torch.maximum(unclipped, clipped),
        inputs,
        counts,
        settings,
        metrics,
        mode=LossAggregation.SEQ_MEAN_TOKEN_MEAN,
    )
