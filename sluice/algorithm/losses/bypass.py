"""Training against the engine's own logprobs, one forward pass less (loss_mode ``bypass_mode``)."""

from __future__ import annotations

from dataclasses import replace

from sluice.algorithm.losses.inputs import Correction, GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import PolicyObjective, token_metric, token_objective
from sluice.algorithm.losses.settings import PolicyLossSettings
from sluice.algorithm.losses.vanilla import vanilla_objective
from sluice.errors import ConfigError


def bypass_objective(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    """Return a loss whose old policy is the engine's, corrected by ``settings.bypass_corrector``.

    ``ppo_clip``: `vanilla_objective` of p / p_rollout; its clip bounds that ratio already, so
    weights are not applied. ``reinforce``: ``-w A log p`` with w the corrector's weight of
    p / p_rollout, 1 without. Rejected tokens are left out; denominators still come from `counts`.
    Weights in `inputs` compare other policies and are ignored. verl's rollout correction, bypass
    mode.

    Raises:
        ConfigError: the inputs hold no rollout logprobs.
    """
    if inputs.rollout_logprobs is None:
        raise ConfigError(
            "loss_mode=bypass_mode needs the engine's logprobs of every response token; set "
            "rollout.calculate_log_probs=true"
        )
    found = Correction()
    if settings.bypass_corrector is not None:
        found = settings.bypass_corrector(
            inputs.logprobs.detach(), inputs.rollout_logprobs, inputs.row_index, inputs.num_rows
        )
    weights = found.weights if settings.bypass_loss == "reinforce" else None
    inputs = replace(inputs, old_logprobs=inputs.rollout_logprobs, rollout_weights=weights)
    if found.keep is not None:
        inputs = inputs.keeping(found.keep)
    optimise = _reinforce if settings.bypass_loss == "reinforce" else vanilla_objective
    objective = optimise(inputs, counts, settings)
    return PolicyObjective(objective.loss, {**objective.metrics, **found.metrics})


def _reinforce(
    inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
) -> PolicyObjective:
    metrics = {"actor/ppo_kl": token_metric(inputs.old_logprobs - inputs.logprobs)}
    loss = -inputs.advantages * inputs.logprobs
    return token_objective(loss, inputs, counts, settings, metrics)
