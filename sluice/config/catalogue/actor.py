"""`actor_rollout_ref.actor.*` without optimizer and sharding."""

from __future__ import annotations

from typing import Literal

from sluice.config.catalogue.entry import (
    Entry,
    KeyStatus,
    Texts,
    block,
    group,
    honoured,
    inapplicable,
    mapped,
    refused,
    refused_if,
)

_KEY = "actor_rollout_ref.actor"
_FULL = refused_if(
    "full", "it needs the whole distribution of both models, which verl does not support either"
)
_LOG_PROB_KEYS: tuple[tuple[str, object, str, Texts], ...] = (
    ("log_prob_micro_batch_size", int | None, "Rows per pass over all ranks.", {"unit": "rows"}),
    ("log_prob_micro_batch_size_per_gpu", int | None, "Rows per pass.", {"unit": "rows"}),
    ("log_prob_use_dynamic_bsz", bool | None, "Cut by tokens instead of rows.", {}),
    ("log_prob_max_token_len_per_gpu", int | None, "Token budget then.", {"unit": "tokens"}),
)
_PARTS = list[Literal["model", "optimizer", "extra", "hf_model"]]
STRATEGY = "ranks share the model by FSDP2, as fsdp_config.fsdp_size says, whatever the backend"
PER_GPU = "sets, divided by the number of trainer ranks, the key that ends in _per_gpu"


_ON_UPDATES_CUT = (
    "all passes over a train batch run on the update's micro-batches "
    "(actor.ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu); results do not depend on it"
)


def log_prob_entries(prefix: str) -> tuple[Entry, ...]:
    """Forward passes of the reference, and those of the old policy."""
    return tuple(
        inapplicable(f"{prefix}.{name}", kind, None, meaning, _ON_UPDATES_CUT, **more)
        for name, kind, meaning, more in _LOG_PROB_KEYS
    )


def checkpoint_entries(prefix: str) -> tuple[Entry, ...]:
    """What a checkpoint holds, for the actor and for the critic."""
    whole = "a checkpoint always holds model, optimizer and everything needed to go on"
    return (
        inapplicable(
            f"{prefix}.checkpoint.save_contents",
            _PARTS,
            ["model", "optimizer", "extra"],
            "Parts of a checkpoint.",
            whole,
            silent=(["model", "optimizer", "extra"],),
        ),
        inapplicable(
            f"{prefix}.checkpoint.load_contents",
            _PARTS | None,
            None,
            "Parts that are read back.",
            whole,
            silent=(None, ["model", "optimizer", "extra"]),
        ),
        inapplicable(
            f"{prefix}.checkpoint.async_save",
            bool,
            False,
            "Write in the background.",
            "a step waits until its checkpoint is complete",
            silent=(False,),
        ),
        inapplicable(
            f"{prefix}.checkpoint.strict",
            bool,
            True,
            "Every part must be found.",
            "every part must be found",
            silent=(True,),
        ),
        block(f"{prefix}.checkpoint.mbridge_config", "Settings of Megatron's bridge.", whole),
    )


ENTRIES: tuple[Entry, ...] = (
    inapplicable(
        f"{_KEY}.strategy",
        str,
        "fsdp",
        "Training backend: fsdp, fsdp2, megatron, veomni, torchtitan.",
        STRATEGY,
        silent=("fsdp", "fsdp2"),
        effect="In verl fsdp2 takes a little less memory than fsdp",
    ),
    honoured(
        f"{_KEY}.ppo_mini_batch_size",
        unit="prompts",
        effect="None on memory; optimizer steps of a train batch are train_batch_size over this",
        advice="A divisor of data.train_batch_size; 2 to 16 optimizer steps a batch are usual",
    ),
    mapped(
        f"{_KEY}.ppo_micro_batch_size",
        int | None,
        None,
        "Rows per pass over all ranks.",
        PER_GPU,
        unit="rows",
        targets=(f"{_KEY}.ppo_micro_batch_size_per_gpu",),
    ),
    honoured(
        f"{_KEY}.ppo_micro_batch_size_per_gpu",
        unit="rows",
        effect="Peak memory grows with it; larger is faster. Results do not depend on it",
        advice="As large as fits; without effect while use_dynamic_bsz is true",
    ),
    honoured(
        f"{_KEY}.use_dynamic_bsz",
        effect="Micro-batches of about equal work: faster where lengths differ",
        advice="On for long responses",
    ),
    honoured(
        f"{_KEY}.ppo_max_token_len_per_gpu",
        unit="tokens",
        effect="Peak memory of the update; larger is faster",
        advice="At least the longest row, two to three times it where memory allows",
    ),
    Entry(
        f"{_KEY}.clip_ratio",
        KeyStatus.MAPPED,
        instead="sets clip_ratio_low and clip_ratio_high where they are null, as in verl",
        targets=(f"{_KEY}.clip_ratio_low", f"{_KEY}.clip_ratio_high"),
        silent=(0.2,),
    ),
    honoured(f"{_KEY}.clip_ratio_low", advice="0.2"),
    honoured(
        f"{_KEY}.clip_ratio_high",
        advice="0.28 in DAPO (clip higher keeps exploration alive), 0.2 in GRPO and PPO",
    ),
    honoured(f"{_KEY}.clip_ratio_c", advice="10.0 in DAPO launches, 3.0 in the dual-clip paper"),
    honoured(
        f"{_KEY}.loss_agg_mode",
        advice=(
            "token-mean in DAPO (long responses count fully), seq-mean-token-mean in the first "
            "GRPO, seq-mean-token-sum-norm in Dr. GRPO"
        ),
    ),
    honoured(f"{_KEY}.loss_scale_factor", unit="tokens"),
    honoured(
        f"{_KEY}.entropy_coeff",
        advice="0; a falling actor/entropy is better met by clip_ratio_high",
    ),
    honoured(f"{_KEY}.calculate_entropy"),
    inapplicable(
        f"{_KEY}.calculate_sum_pi_squared",
        bool,
        False,
        "Sum the squared probabilities at every token.",
        "they are summed if algorithm.adv_estimator needs them (optimal_token_baseline and "
        "tir_optimal_token_baseline)",
        silent=(False,),
        effect="One more pass over the logits",
    ),
    honoured(
        f"{_KEY}.use_kl_loss",
        effect="A reference model: its weights in memory and one more forward pass of every row",
        advice="False in DAPO, true in GRPO; PPO takes algorithm.use_kl_in_reward",
    ),
    honoured(f"{_KEY}.kl_loss_coef", advice="0.001 to begin with"),
    honoured(
        f"{_KEY}.kl_loss_type", refusals=_FULL, advice="low_var_kl: low variance, never negative"
    ),
    honoured(f"{_KEY}.tau_pos"),
    honoured(f"{_KEY}.tau_neg"),
    honoured(f"{_KEY}.ppo_epochs", advice="1; more passes make samples older"),
    honoured(
        f"{_KEY}.shuffle",
        advice="It permutes prompts, once a batch; in verl rows, anew in every pass",
    ),
    honoured(f"{_KEY}.data_loader_seed"),
    honoured(
        f"{_KEY}.use_rollout_log_probs",
        effect="Saves one forward pass of every row",
        advice="The ratio then includes the difference between engine and trainer",
    ),
    honoured(
        f"{_KEY}.policy_loss.loss_mode",
        advice="vanilla. adpo sets algorithm.adv_estimator to adpo too, where that is left out",
    ),
    honoured(f"{_KEY}.policy_loss.clip_cov_ratio"),
    honoured(f"{_KEY}.policy_loss.clip_cov_lb"),
    honoured(f"{_KEY}.policy_loss.clip_cov_ub"),
    honoured(f"{_KEY}.policy_loss.kl_cov_ratio"),
    honoured(f"{_KEY}.policy_loss.ppo_kl_coef"),
    honoured(f"{_KEY}.policy_loss.dro_beta"),
    honoured(f"{_KEY}.policy_loss.loss_variant"),
    honoured(f"{_KEY}.policy_loss.tau", advice="0.8 in the paper; 0.5 for few, small devices"),
    honoured(f"{_KEY}.policy_loss.beta_reward", advice="0.5 in the paper; 0.3 is sharper"),
    honoured(f"{_KEY}.policy_loss.use_length_normalization"),
    honoured(f"{_KEY}.policy_loss.clip_log_ratio"),
    honoured(f"{_KEY}.policy_loss.clip_anchored_score"),
    honoured(f"{_KEY}.policy_loss.logit_reg_coef"),
    honoured(f"{_KEY}.policy_loss.use_q_center"),
    honoured(f"{_KEY}.policy_loss.grad_scale_factor"),
    honoured(f"{_KEY}.policy_loss.top_k"),
    honoured(f"{_KEY}.policy_loss.label_smoothing"),
    honoured(f"{_KEY}.policy_loss.use_adaptive_tau"),
    inapplicable(
        f"{_KEY}.use_torch_compile",
        bool,
        True,
        "Compile entropy and log-probabilities.",
        "nothing is compiled",
        silent=(False,),
        advice="False on NPUs in verl",
    ),
    honoured(
        f"{_KEY}.freeze_vision_tower",
        advice="true where images are like those that the encoder was trained on",
    ),
    inapplicable(
        f"{_KEY}.use_prefix_grouper",
        bool,
        False,
        "Compute a group's prompt once.",
        "always so: a prompt is computed once for all of its rows in a micro-batch",
        silent=(True,),
    ),
    refused(
        f"{_KEY}.router_replay.mode",
        str,
        "disabled",
        "Repeat the engine's routing of experts.",
        "routing is the trainer's own; leave the key out",
    ),
    *group(
        f"{_KEY}.router_replay",
        {"record_file": None, "replay_file": None},
        "File of recorded routing.",
        "routing is the trainer's own",
    ),
    inapplicable(f"{_KEY}.rollout_n", int, 1, "Copy of rollout.n.", "rollout.n holds", silent=()),
    inapplicable(
        f"{_KEY}.load_weight",
        bool,
        True,
        "Load weights at the start.",
        "they are loaded",
        silent=(True,),
    ),
    block(f"{_KEY}.qat", "Training aware of quantisation.", "weights are not quantised"),
    block(f"{_KEY}.profiler", "Profiler of the trainer.", "timings are in metrics.jsonl"),
    *checkpoint_entries(_KEY),
)
