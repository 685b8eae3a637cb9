"""What verl would make of a configuration: the values its checks compare, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.config.batch_plan import BatchPlan

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
CRITIC = "critic"
REF = "actor_rollout_ref.ref"
MEGATRON = f"{ACTOR}.megatron"


@dataclass(frozen=True, slots=True)
class LogProbPass:
    """A forward pass for logprobs: the old policy's (`rollout`) or the reference's (`ref`).

    Args:
        section: the section whose keys govern it.
        micro_rows: log_prob_micro_batch_size_per_gpu as set.
        global_micro_rows: log_prob_micro_batch_size as set; deprecated.
        dynamic: log_prob_use_dynamic_bsz.
        token_budget: log_prob_max_token_len_per_gpu.
        sp: ranks that share a row.
    """

    section: str
    micro_rows: int | None
    global_micro_rows: int | None
    dynamic: bool
    token_budget: int
    sp: int


@dataclass(frozen=True, slots=True)
class CriticPass:
    """The critic's update.

    Args:
        dynamic: critic.use_dynamic_bsz; unset it follows the actor.
        token_budget: critic.ppo_max_token_len_per_gpu.
        sp: ranks that share a row.
        remove_padding: critic.model.use_remove_padding.
    """

    dynamic: bool
    token_budget: int
    sp: int
    remove_padding: bool


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The inference engine's sizes.

    Args:
        batched_tokens: max_num_batched_tokens.
        context: max_model_len, or prompt plus response.
    """

    name: str
    mode: str
    tp: int
    dp: int
    ep: int
    pp: int
    chunked_prefill: bool
    batched_tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class VerlRun:
    """One run as verl reads it.

    Args:
        longest_row: prompt plus response limit, tokens.
        dynamic: actor.use_dynamic_bsz.
        token_budget: actor.ppo_max_token_len_per_gpu.
        micro_rows: actor.ppo_micro_batch_size_per_gpu as set.
        global_micro_rows: actor.ppo_micro_batch_size as set; deprecated.
        log_prob_passes: the old policy's, and the reference's if the run has one.
        critic: `None` in a run without one.
        num_generations: ADPO's group size; `None`: rollout.n.
        adpo: whether the loss is ADPO's.
    """

    batch: BatchPlan
    longest_row: int
    dynamic: bool
    token_budget: int
    micro_rows: int | None
    global_micro_rows: int | None
    log_prob_passes: tuple[LogProbPass, ...]
    critic: CriticPass | None
    engine: EnginePlan
    ep: int
    etp: int
    remove_padding: bool
    filters_groups: bool
    val_do_sample: bool
    temperature: float
    num_generations: int | None
    adpo: bool
