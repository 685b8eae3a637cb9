"""Direct reward optimization: a squared penalty on the log-ratio (loss_mode ``dro``)."""

from __future__ import annotations

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import PolicyObjective, token_metric, token_objective
from sluice.algorithm.losses.settings import PolicyLossSettings
from sluice.errors import ConfigError


def dro_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """``-(A log p - beta / 2 (log p - log p_old)^2)``, DRO by token (Richemond et al. 2024).

    Raises:
        ConfigError: `dro_beta` is not set or not positive.
    """
    if settings.dro_beta is None or settings.dro_beta <= 0.0:
        raise ConfigError(
            "actor_rollout_ref.actor.policy_loss.dro_beta must be > 0 with loss_mode=dro, got "
            f"{settings.dro_beta}; it weighs the penalty on leaving the old policy"
        )
    log_ratio = inputs.logprobs - inputs.old_logprobs
    penalty = 0.5 * settings.dro_beta * log_ratio.square()
    loss = penalty - inputs.advantages * inputs.logprobs
    metrics = {"actor/ppo_kl": token_metric(-log_ratio)}
    return token_objective(loss, inputs, counts, settings, metrics)
