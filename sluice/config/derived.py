"""Values derived from the configuration, each with its formula in one place."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from sluice.algorithm.publishing import may_overlap
from sluice.algorithm.registry import BATCH_ESTIMATORS, GROUP_LOSSES, Estimator
from sluice.algorithm.rollout_correction.settings import BYPASS_LOSS_MODE, RolloutCorrectionSettings
from sluice.algorithm.sampling.rules import OnPolicyFill
from sluice.config.run import RunConfig
from sluice.config.schema.actor import FsdpConfig
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.config.schema.data import DataConfig
from sluice.config.schema.reward import RewardConfig
from sluice.config.sources import largest_n, source_configs
from sluice.vision.image_limits import DEFAULT_LIMITS, ImageLimits
from sluice.vision.vision_shape import reads_images

DEFAULT_MESSAGE_MB = 64
ALL_LINEAR = "all-linear"
"""Value of `target_modules`: all linear layers but the head."""
# More than a model has; a name may hold the number of one.
_LAYERS = 128
# Versions, scores and the scorer's further numbers.
_OUTLINE_SAMPLE_BYTES = 512


def advantage_estimator(config: RunConfig) -> Estimator:
    """Return the properties of the run's advantage estimator."""
    return BATCH_ESTIMATORS[config.algorithm.adv_estimator]


def world_size(config: RunConfig) -> int:
    """Return the trainer ranks: machines times ranks per machine."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def rows_per_batch(config: RunConfig) -> int:
    """Return the most samples in one train batch: prompts times responses per prompt.

    With several sources, use the largest number of responses, since a batch may be almost all of
    one source if shares follow yields. `responses_per_step` counts by the configured shares.
    """
    return config.data.train_batch_size * largest_n(config)


def max_row_tokens(data: DataConfig) -> int:
    """Return the longest sample, tokens: prompt plus response limit."""
    return data.max_prompt_length + data.max_response_length


def max_model_len(config: RunConfig) -> int:
    """Return the context length of the engines, tokens; by default the longest sample's."""
    return config.actor_rollout_ref.rollout.max_model_len or max_row_tokens(config.data)


def replica_devices(config: RunConfig) -> int:
    """Return the devices that one replica computes on, each a rank of transfer groups.

    The embedded engine has one, for any parallel sizes.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "torch":
        return 1
    return rollout.tensor_model_parallel_size * rollout.data_parallel_size


def max_resp_len(config: RunConfig) -> int:
    """Return the length limit in the overlong formula, tokens; by default the response limit."""
    return config.reward.reward_kwargs.max_resp_len or config.data.max_response_length


def loss_scale_factor(config: RunConfig) -> int:
    """Return the divisor of ``seq-mean-token-sum-norm``; by default the response limit (verl)."""
    return config.actor_rollout_ref.actor.loss_scale_factor or config.data.max_response_length


def is_synchronous(config: RunConfig) -> bool:
    """Return whether the version that a batch updates sampled all of its tokens."""
    return config.sluice.asynchrony.max_staleness == 0


def overlaps_transfers(config: RunConfig) -> bool:
    """Return whether the transfer of a version runs beside the next step."""
    allowed = config.sluice.weights.overlap == "auto"
    return allowed and may_overlap(config.sluice.asynchrony.max_staleness)


def sleeps_while_training(config: RunConfig) -> bool:
    """Return whether engines that share the trainer's device sleep while it trains.

    NCCL accepts a device for only one rank, so weights are sent by gloo if they share one.
    """
    rollout = config.actor_rollout_ref.rollout
    shares = config.sluice.weights.backend == "gloo" and rollout.name == "vllm"
    return shares and rollout.free_cache_engine and is_synchronous(config)


def batch_invariant(config: RunConfig) -> bool:
    """Return whether a sample's tokens must not depend on other running samples.

    By default in synchronous mode only, where a run repeats bit for bit, unless its batches fill by
    expectation.
    """
    if (setting := config.sluice.rollout.batch_invariant) is not None:
        return setting
    return is_synchronous(config) and config.sluice.sampling.on_policy_fill != "expected"


def on_policy_fill(config: RunConfig) -> OnPolicyFill:
    """Return which groups start in synchronous mode: by default those that a run can repeat.

    Engines other than ``torch`` repeat samples only if `batch_invariant` is set.
    """
    if (setting := config.sluice.sampling.on_policy_fill) is not None:
        return setting
    is_torch = config.actor_rollout_ref.rollout.name == "torch"
    repeats = batch_invariant(config) if is_torch else config.sluice.rollout.batch_invariant
    return "exact" if repeats else "expected"


def is_bypassed(config: RunConfig) -> bool:
    """Return whether the loss is ``bypass_mode``, by the correction's key or by its own name.

    The behavior logprobs are then the old ones, and the loss itself corrects, at every pass: with
    ``ppo_clip`` by its ratio alone, with ``reinforce``, which has none, by the weights. Rejection
    applies in both. Otherwise a pass before the first step computes the old logprobs, and weights
    and rejections come from them, once for each batch.
    """
    is_loss = config.actor_rollout_ref.actor.policy_loss.loss_mode == BYPASS_LOSS_MODE
    return is_loss or config.algorithm.rollout_correction.bypass_mode


def rollout_correction(config: RunConfig) -> RolloutCorrectionSettings:
    """Return the learner's settings from `algorithm.rollout_correction`.

    Raises:
        ConfigError: a name is unknown or a threshold cannot be read.
    """
    section = config.algorithm.rollout_correction
    return RolloutCorrectionSettings(
        rollout_is=section.rollout_is,
        rollout_is_threshold=section.rollout_is_threshold,
        rollout_is_batch_normalize=section.rollout_is_batch_normalize,
        rollout_rs=section.rollout_rs,
        rollout_rs_threshold=section.rollout_rs_threshold,
        loss_type=section.loss_type,
    )


def is_corrected(config: RunConfig) -> bool:
    """Return whether the loss corrects for the difference between behavior and trained policy.

    Either the ratio's denominator is the behavior policy itself, or truncated importance weights
    are applied. A loss without a ratio (``gpg``, ``reinforce`` in bypass mode) needs the weights,
    a loss that reads no weights (``adpo``) the denominator.
    """
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    behavior, weighed = actor.use_rollout_log_probs, correction.rollout_is is not None
    if is_bypassed(config):
        return weighed or correction.loss_type == "ppo_clip"
    if actor.policy_loss.loss_mode == "adpo":
        return behavior
    if actor.policy_loss.loss_mode == "gpg":
        return weighed and not behavior
    return behavior or weighed


def total_training_steps(config: RunConfig, dataset_rows: int) -> int:
    """Return the train batches of the run: as configured, or as many as all epochs fill."""
    configured = config.trainer.total_training_steps
    if configured is not None:
        return configured
    return dataset_rows * config.trainer.total_epochs // config.data.train_batch_size


def checkpoint_folder(config: RunConfig) -> str:
    """Return the folder that holds ``global_step_N``."""
    return config.trainer.default_local_dir or f"{config.sluice.run_dir}/checkpoints"


def uses_critic(config: RunConfig) -> bool:
    """Return ``critic.enable``; if it is null, whether the estimator needs values."""
    enable = config.critic.enable
    return "values" in advantage_estimator(config).needs if enable is None else enable


def uses_reference(config: RunConfig) -> bool:
    """Return whether a term measures the divergence from the policy of step 0."""
    in_loss = any(o.actor_rollout_ref.actor.use_kl_loss for o in source_configs(config).values())
    return config.algorithm.use_kl_in_reward or in_loss


def may_grade_itself(config: RunConfig) -> bool:
    """Return whether an environment may grade episodes, so that rows need no scorer."""
    environment = config.sluice.environment
    return environment.path is not None or bool(environment.addresses) or environment.agents


def reads_question(reward: RewardConfig) -> bool:
    """Return whether a reward model grades, and its template holds the question."""
    if not reward.reward_model.enable or reward.custom_reward_function.path is not None:
        return False
    template = reward.reward_model.prompt_template  # without one the default holds it
    return not template or "{question}" in template


def replays_engine_routing(config: RunConfig) -> bool:
    """Return whether samples carry the experts that the engine chose (R3)."""
    return config.actor_rollout_ref.actor.router_replay.mode == "R3"


def message_mb(config: RunConfig) -> int:
    """Return the largest gRPC message, MiB: by default 64, or `largest_message_mb` if more."""
    return config.sluice.max_message_mb or max(DEFAULT_MESSAGE_MB, largest_message_mb(config))


def image_limits(config: RunConfig) -> ImageLimits:
    """Return how large the images of one prompt may be, in bytes and pixels."""
    limits = config.sluice.limits
    whole_mb = limits.max_prompt_images_mb
    if whole_mb is None:
        whole_mb = max(1, min(DEFAULT_LIMITS.max_total_bytes >> 20, message_mb(config) // 4))
    return ImageLimits(
        limits.max_prompt_images,
        limits.max_image_mb << 20,
        whole_mb << 20,
        limits.max_image_pixels,
    )


def largest_message_mb(config: RunConfig) -> int:
    """Return the MiB of the larger of two messages: a train batch's outline, and one sample.

    An outline has lengths, versions and scores. A response token takes 4 bytes of id, 4 of logprob
    and about 4 of text; a prompt token takes 4. Images and experts are not counted.
    """
    data = config.data
    outline = _OUTLINE_SAMPLE_BYTES * rows_per_batch(config)
    sample = 4 * data.max_prompt_length + 12 * data.max_response_length
    return math.ceil(max(outline, sample) / (1 << 20))


def taken_samples_mb(config: RunConfig, data_ranks: int) -> int:
    """Return the size of a trainer rank's samples in a batch of longest responses, MiB.

    Args:
        data_ranks: ranks, or groups of ranks, that train different samples.
    """
    data = config.data
    responses = 8 * data.max_response_length * rows_per_batch(config) / data_ranks
    return math.ceil((4 * data.max_prompt_length * data.train_batch_size + responses) / (1 << 20))


def needs_greedy_baseline(config: RunConfig) -> bool:
    """Return whether every group carries the reward of a greedy response."""
    return "baselines" in advantage_estimator(config).needs


def needs_whole_groups(config: RunConfig) -> bool:
    """Return whether the loss compares all ``rollout.n`` samples of a group.

    Bypass mode replaces the loss by one that compares none.
    """
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    return loss_mode in GROUP_LOSSES and not config.algorithm.rollout_correction.bypass_mode


def prompt_images(config: RunConfig) -> ImageLimits | None:
    """Return the limits of prompts' images; ``None`` if a part of the run reads text alone.

    That part is the model or a critic. If this machine has no `config.json` of the
    model, replicas refuse images that they cannot read.
    """
    if uses_critic(config):
        return None
    if reads_images(config.actor_rollout_ref.model.path) is False:
        return None
    return image_limits(config)


def uses_adapters(model: ModelConfig) -> bool:
    """Return whether a run trains low-rank adapters instead of all weights."""
    return model.lora_rank > 0 or model.lora_adapter_path is not None


def is_named(name: str, pattern: str | Sequence[str]) -> bool:
    """Match a layer's name by peft's rules for `target_modules` and `exclude_modules`.

    Args:
        name: name of a layer in the model's files.
        pattern: a regular expression for the whole name, or a list of possible suffixes.
    """
    if isinstance(pattern, str):
        return re.fullmatch(pattern, name) is not None
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in pattern)


def adapts_experts(model: ModelConfig) -> bool:
    """Return whether `target_modules` and `exclude_modules` leave a layer of experts to adapt.

    An expression that is not valid excludes nothing here: the trainer refuses it.
    """
    targets, excluded = model.target_modules, model.exclude_modules
    names = (
        f"model.{inner}layers.{layer}.mlp.experts.0.{projection}"
        for inner in ("", "language_model.")
        for layer in range(_LAYERS)
        for projection in ("gate_proj", "up_proj", "down_proj")
    )
    try:
        return any(
            (targets == ALL_LINEAR or is_named(name, targets))
            and not is_named(name, excluded or [])
            for name in names
        )
    except re.error:
        return True


def padding_step(sharding: FsdpConfig) -> int:
    """Return the number of tokens that a micro-batch's length is a multiple of."""
    return sharding.pad_to_length_bucket if sharding.pad_to_length else 1


def holds_whole_model(sharding: FsdpConfig, size: int) -> bool:
    """Return whether each rank holds the whole model.

    If passes have another dtype than weights, one rank uses FSDP too, which casts the weights of a
    layer for as long as it needs them.

    Args:
        size: ranks that share one copy of the model.
    """
    return size == 1 and sharding.dtype == sharding.model_dtype
