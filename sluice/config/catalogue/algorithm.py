"""`algorithm.*`."""

from __future__ import annotations

from sluice.config.catalogue.entry import (
    Entry,
    KeyStatus,
    group,
    honoured,
    inapplicable,
    mapped,
    refused,
)

_KEY = "algorithm"
_CORRECTION = f"{_KEY}.rollout_correction"
_FILTER = f"{_KEY}.filter_groups"
_NOT_RESAMPLED = "every row of a batch is trained on; rows are not drawn anew by their rewards"

ENTRIES: tuple[Entry, ...] = (
    honoured(
        f"{_KEY}.adv_estimator",
        verl_default="gae",
        effect="gae trains a critic: another model in memory and another update",
        advice=(
            "grpo for DAPO and GRPO. adpo sets actor.policy_loss.loss_mode to adpo too, where that "
            "is left out"
        ),
    ),
    honoured(f"{_KEY}.gamma"),
    honoured(f"{_KEY}.lam"),
    honoured(f"{_KEY}.norm_adv_by_std_in_grpo", advice="true; false avoids a bias to easy prompts"),
    honoured(f"{_KEY}.num_generations"),
    honoured(f"{_KEY}.gdpo_reward_keys"),
    honoured(f"{_KEY}.gdpo_reward_weights"),
    honoured(
        f"{_KEY}.use_kl_in_reward",
        effect="A reference model: its weights in memory and one more forward pass of every row",
        advice="true in PPO, false in GRPO and DAPO",
    ),
    honoured(f"{_KEY}.kl_penalty"),
    honoured(f"{_KEY}.kl_ctrl.type"),
    honoured(
        f"{_KEY}.kl_ctrl.kl_coef", advice="0.001; without effect while use_kl_in_reward is false"
    ),
    honoured(f"{_KEY}.kl_ctrl.horizon", unit="rows"),
    honoured(f"{_KEY}.kl_ctrl.target_kl"),
    honoured(
        f"{_FILTER}.enable",
        effect="Several times the generation where most prompts are too easy or too hard",
        advice="true in DAPO; several launches that call themselves DAPO leave it off",
    ),
    honoured(f"{_FILTER}.metric", verl_default="null", advice="acc"),
    Entry(
        f"{_FILTER}.max_num_gen_batches",
        KeyStatus.MAPPED,
        instead="sets min_yield and min_yield_groups: give up when fewer than train_batch_size of "
        "the last max_num_gen_batches * gen_batch_size groups were kept. With "
        "sluice.sampling.strategy=rounds it is what it is in verl. Left out, a run whose last 2000 "
        "groups kept fewer than 0.5 % stops (min_yield)",
        targets=(f"{_FILTER}.min_yield", f"{_FILTER}.min_yield_groups"),
        advice="10 in DAPO",
    ),
    honoured(f"{_FILTER}.min_yield"),
    honoured(f"{_FILTER}.min_yield_groups", unit="groups"),
    inapplicable(
        f"{_FILTER}.max_inflight_gen_batches",
        int,
        1,
        "Bound of refilled prompts.",
        "sluice.asynchrony.max_staleness and free slots bound what is in flight",
        silent=(1,),
    ),
    honoured(
        f"{_CORRECTION}.rollout_is",
        advice=(
            "token where the engine is quantised. Left out, it becomes token where "
            "sluice.asynchrony.max_staleness is above 0, unless the behaviour logprobs correct"
        ),
    ),
    honoured(f"{_CORRECTION}.rollout_is_threshold", advice="2.0"),
    honoured(f"{_CORRECTION}.rollout_is_batch_normalize"),
    honoured(f"{_CORRECTION}.rollout_rs"),
    honoured(f"{_CORRECTION}.rollout_rs_threshold"),
    honoured(
        f"{_CORRECTION}.bypass_mode",
        effect="Saves one forward pass of every row",
        advice=(
            "It turns the loss vanilla into bypass_mode, and is refused with any other "
            "actor.policy_loss.loss_mode"
        ),
    ),
    honoured(f"{_CORRECTION}.loss_type"),
    refused(
        f"{_CORRECTION}.rollout_rs_threshold_lower",
        float | None,
        None,
        "Lower bound of rejections in version 0.6.",
        'write both bounds into rollout_rs_threshold as "low_high"',
    ),
    refused(
        f"{_CORRECTION}.rollout_token_veto_threshold",
        float | None,
        None,
        "Version 0.6: reject samples with one very unlikely token.",
        "use rollout_rs=seq_max_k3 with a threshold",
    ),
    refused(
        f"{_CORRECTION}.use_policy_gradient",
        bool,
        False,
        "Version 0.6: log-likelihood loss in bypass mode.",
        "use loss_type=reinforce",
    ),
    refused(
        f"{_KEY}.use_pf_ppo",
        bool,
        False,
        "gae: draw the batch's rows anew by their rewards.",
        f"{_NOT_RESAMPLED}; leave the key out",
    ),
    *group(
        f"{_KEY}.pf_ppo",
        {"reweight_method": "pow", "weight_pow": 2.0},
        "Policy filtration (Shen & Zhang 2024): which rows are drawn for the update.",
        _NOT_RESAMPLED,
    ),
    mapped(
        f"{_KEY}.scale_rewards",
        bool | str,
        True,
        "ADPO: divide by the group's deviation.",
        "sets norm_adv_by_std_in_grpo (any text counts as true)",
        targets=(f"{_KEY}.norm_adv_by_std_in_grpo",),
    ),
)
