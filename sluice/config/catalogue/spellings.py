"""Other names of keys: those of older verl versions, of its recipes, and its own doubles."""

from __future__ import annotations

_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_LOSS = f"{_ACTOR}.policy_loss"
_ADPO = (
    "loss_variant",
    "tau",
    "beta_reward",
    "use_length_normalization",
    "clip_log_ratio",
    "clip_anchored_score",
    "logit_reg_coef",
    "use_q_center",
    "grad_scale_factor",
    "use_adaptive_tau",
)
_SHARED = (
    "ulysses_sequence_parallel_size",
    "entropy_from_logits_with_chunking",
    "entropy_from_logits_chunk_size",
    "entropy_checkpointing",
    "pad_to_length",
)

OTHER_SPELLINGS: dict[str, str] = {
    "reward_model.reward_manager": "reward.reward_manager",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.overlong_buffer": "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.sandbox_fusion": "reward.sandbox_fusion",
    "reward_model": "reward.reward_model",
    "reward.reward_model.model.path": "reward.reward_model.model_path",
    "custom_reward_function": "reward.custom_reward_function",
    "sandbox_fusion": "reward.sandbox_fusion",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    f"{_ACTOR}.grad_clip": f"{_ACTOR}.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    f"{_ACTOR}.use_remove_padding": f"{_MODEL}.use_remove_padding",
    f"{_ACTOR}.use_fused_kernels": f"{_MODEL}.use_fused_kernels",
    "critic.model.fsdp_config": "critic.fsdp",
    "critic.ulysses_sequence_parallel_size": "critic.fsdp.ulysses_sequence_parallel_size",
    f"{_ROLLOUT}.update_weights_bucket_megabytes": (
        f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    ),
    f"{_LOSS}.num_generations": "algorithm.num_generations",
    **{f"algorithm.{name}": f"{_LOSS}.{name}" for name in _ADPO},
    **{f"{_ACTOR}.{name}": f"{_ACTOR}.fsdp_config.{name}" for name in _SHARED},
    **{f"{_REF}.{name}": f"{_REF}.fsdp_config.{name}" for name in _SHARED},
}
"""Prefix of a dotted path to what takes its place; the longest prefix that fits counts."""

SHORT_FORMS: dict[str, str] = {"reward.reward_manager": "reward.reward_manager.name"}
"""Sections that may be given as one value, and the key which that value is."""

OPEN_SECTIONS: tuple[str, ...] = (
    "reward.reward_kwargs",
    "data.apply_chat_template_kwargs",
    "data.mm_processor_kwargs",
)
"""Sections below which verl's schema is open, so that ``+`` is needed there for every key."""
