"""What truncated sampling (top_p, top_k) does to the ratios of the loss."""

from __future__ import annotations

from sluice.config.run import RunConfig


def sampling_notice(config: RunConfig) -> str | None:
    """A warning if samples are drawn from another distribution than the trainer computes.

    Behaviour logprobs are those of the truncated distribution, in which the tokens that are left
    share all probability; the trainer computes logprobs over the whole vocabulary, which are lower.
    None if nothing is truncated.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    cuts = [f"top_p = {rollout.top_p:g}"] if rollout.top_p < 1.0 else []
    cuts += [f"top_k = {rollout.top_k}"] if rollout.top_k > 0 else []
    if not cuts:
        return None
    correction = config.algorithm.rollout_correction.rollout_is
    if correction is not None:
        effect = (
            f"the importance weights (rollout_correction.rollout_is = {correction}) are below 1 by "
            "the mass that was cut off, whatever the staleness"
        )
    elif actor.use_rollout_log_probs:
        effect = (
            "the loss's ratio (use_rollout_log_probs = true) starts below 1 by the mass that was "
            "cut off and may be clipped before any update"
        )
    else:
        effect = (
            "old logprobs are recomputed over all tokens, so the loss takes samples of the "
            "truncated policy for samples of the whole one"
        )
    return (
        f"actor_rollout_ref.rollout: {' and '.join(cuts)} truncate sampling in training: {effect}; "
        "set top_p=1 and top_k=-1 for training (val_kwargs keep their own), or watch "
        "training/rollout_probs_diff_mean"
    )
