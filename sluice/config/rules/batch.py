"""Report all violations of verl's rules about batch and parallel sizes, each with a valid value.

verl checks some of them when it reads the configuration and others only inside a worker, minutes
later. The order is verl's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from sluice.config.derived import max_row_tokens
from sluice.config.problems import Problem, shown, verl_problem
from sluice.config.verl_sizes import (
    ACTOR,
    CRITIC,
    MEGATRON,
    MODEL,
    REF,
    ROLLOUT,
    BatchPlan,
    VerlSizes,
    largest_divisor,
    next_multiple,
    rows_per_device,
)

MINI, MICRO = f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
TRAIN, GLOBAL_MICRO = "data.train_batch_size", f"{ACTOR}.ppo_micro_batch_size"
SP = f"{ACTOR}.ulysses_sequence_parallel_size"
CRITIC_MICRO = f"{CRITIC}.ppo_micro_batch_size"
CRITIC_SP = f"{CRITIC}.ulysses_sequence_parallel_size"
RANKS = "trainer.n_gpus_per_node"


def verl_problems(sizes: VerlSizes) -> list[Problem]:
    """Return every rule that `run` breaks, in verl's order."""
    return [problem for rule in _RULES for problem in rule(sizes)]


def _world_problems(sizes: VerlSizes) -> Iterator[Problem]:
    split = sizes.batch.split
    # Ranks that share a sequence divide sluice's trainer too: `parallel-layout` says it.
    if split.megatron and split.world % split.ranks_per_row:
        keys = f"{MEGATRON}: tensor {split.tp} * pipeline {split.pp} * context {split.cp}"
        step = split.ranks_per_row // math.gcd(split.nodes, split.ranks_per_row)
        yield verl_problem(
            "world-divides",
            f"trainer.nnodes * {RANKS}",
            split.world,
            f"ranks cannot be divided into groups of {split.ranks_per_row} ranks ({keys})",
            f"{RANKS}={next_multiple(split.ranks_per_node, step)}",
        )


def _critic_world_problems(sizes: VerlSizes) -> Iterator[Problem]:
    world = sizes.batch.split.world
    if sizes.critic is not None and not sizes.batch.split.megatron and world % sizes.critic.sp:
        yield verl_problem(
            "critic-world-divides",
            f"trainer.nnodes * {RANKS}",
            world,
            f"ranks cannot be divided into groups of {CRITIC_SP} = {sizes.critic.sp} ranks",
            f"{CRITIC_SP}={largest_divisor(world, sizes.critic.sp)}",
        )


def _real_batch_problems(sizes: VerlSizes) -> Iterator[Problem]:
    batch, data_ranks = sizes.batch, sizes.batch.split.data_parallel
    if sizes.actor.use_dynamic_bsz or data_ranks is None:
        return
    minimal = batch.split.world
    if batch.split.megatron:
        minimal = data_ranks * (batch.micro_rows or 1)
    if batch.rows % minimal:
        yield verl_problem(
            "real-batch",
            f"{TRAIN} * {ROLLOUT}.n = {batch.train_prompts} * {batch.responses}",
            batch.rows,
            f"rows are no multiple of {minimal}, the smallest batch that gives every rank the same",
            f"{TRAIN}={_next_train_batch(batch, minimal)}",
        )


def _log_prob_micro_problems(sizes: VerlSizes) -> Iterator[Problem]:
    for log_probs in sizes.log_prob_passes:
        key = f"{log_probs.section}.log_prob_micro_batch_size"
        if log_probs.dynamic:
            continue
        if log_probs.micro_rows is None and log_probs.global_micro_rows is None:
            yield verl_problem(
                "log-prob-micro",
                f"{key}_per_gpu",
                None,
                f"while {log_probs.section}.log_prob_use_dynamic_bsz is false",
                f"{key}_per_gpu={sizes.batch.fitting_micro}",
            )
        elif log_probs.micro_rows is not None and log_probs.global_micro_rows is not None:
            yield verl_problem(
                "log-prob-micro",
                f"{key}_per_gpu",
                log_probs.micro_rows,
                f"and the deprecated {key} = {log_probs.global_micro_rows} are both set",
                f"{key}=null",
            )


def _mini_in_train_problems(sizes: VerlSizes) -> Iterator[Problem]:
    batch = sizes.batch
    if batch.mini_prompts > batch.train_prompts:
        yield verl_problem(
            "mini-in-train",
            MINI,
            batch.mini_prompts,
            f"is more than {TRAIN} = {batch.train_prompts} (both count prompts)",
            f"{MINI}={batch.train_prompts}",
            is_error=True,
        )
    elif batch.train_prompts % batch.mini_prompts:
        yield verl_problem(
            "whole-mini-batches",
            TRAIN,
            batch.train_prompts,
            f"is no multiple of {MINI} = {batch.mini_prompts}, so the last mini-batch would be "
            "smaller",
            *_nearest_mini_batches(batch),
            is_error=True,
        )


def _micro_problems(sizes: VerlSizes) -> Iterator[Problem]:
    batch, global_rows = sizes.batch, sizes.keys.integer_or_none(GLOBAL_MICRO)
    rows = rows_per_device(sizes.keys, GLOBAL_MICRO)
    if sizes.actor.use_dynamic_bsz:
        return
    per_gpu = f"{MICRO}={batch.fitting_micro}"
    if global_rows is None and rows is None:
        while_false = f"while {ACTOR}.use_dynamic_bsz is false"
        yield verl_problem("micro-batch", MICRO, None, while_false, per_gpu, is_error=True)
    if global_rows is None:
        return
    if rows is not None:
        message = f"and the deprecated {GLOBAL_MICRO} = {global_rows} are both set"
        yield verl_problem("micro-batch", MICRO, rows, message, f"{GLOBAL_MICRO}=null")
    elif batch.mini_prompts % global_rows or global_rows * batch.split.sp < batch.split.world:
        yield verl_problem(
            "global-micro-batch",
            GLOBAL_MICRO,
            global_rows,
            f"(deprecated) must divide {MINI} = {batch.mini_prompts} and give each of "
            f"{batch.split.world} ranks a row",
            f"{GLOBAL_MICRO}=null",
            per_gpu,
        )


def _critic_micro_problems(sizes: VerlSizes) -> Iterator[Problem]:
    # FSDPCriticConfig of verl/workers/config/critic.py. In verl's critic.yaml the key per device
    # refers to the deprecated one, so that setting that one sets both.
    if sizes.critic is None or sizes.critic.dynamic:
        return
    batch, key = sizes.batch, f"{CRITIC_MICRO}_per_gpu"
    global_rows, rows = sizes.keys.integer_or_none(CRITIC_MICRO), sizes.keys.integer_or_none(key)
    mini = sizes.config.critic.ppo_mini_batch_size or batch.mini_prompts
    per_gpu, message = f"{key}={rows or batch.fitting_micro}", ""
    if global_rows is None:
        # Without the actor's rows either, sluice refuses it, too: `algorithm` says it.
        if not sizes.keys.is_set(key) and sizes.actor.ppo_micro_batch_size_per_gpu is not None:
            message = f"while {CRITIC}.use_dynamic_bsz is false"
            yield verl_problem("critic-micro-batch", key, None, message, per_gpu)
        return
    if not sizes.keys.is_null(key):
        message = "is deprecated, and verl then sees both keys set"
    elif mini % global_rows or global_rows * sizes.critic.sp < batch.split.world:
        message = (
            f"(deprecated) must divide {CRITIC}.ppo_mini_batch_size = {mini} and give each of "
            f"{batch.split.world} ranks a row"
        )
    if message:
        overrides = f"{CRITIC_MICRO}=null", per_gpu
        yield verl_problem("critic-micro-batch", CRITIC_MICRO, global_rows, message, *overrides)


def _remove_padding_problems(sizes: VerlSizes) -> Iterator[Problem]:
    is_packed = sizes.keys.flag(f"{MODEL}.use_remove_padding")
    models = [(SP, sizes.batch.split.sp, "actor_rollout_ref", is_packed)]
    models += [
        (f"{REF}.ulysses_sequence_parallel_size", log_probs.sp, "actor_rollout_ref", is_packed)
        for log_probs in sizes.log_prob_passes
        if log_probs.section == REF
    ]
    if sizes.critic is not None:
        models.append((CRITIC_SP, sizes.critic.sp, CRITIC, sizes.critic.remove_padding))
    for key, sp, model, packed in models:
        if sp > 1 and not packed:
            yield verl_problem(
                "sp-needs-packing",
                key,
                sp,
                f"with {model}.model.use_remove_padding = false: only packed sequences can be cut",
                f"{model}.model.use_remove_padding=true",
            )


def _same_dynamic_problems(sizes: VerlSizes) -> Iterator[Problem]:
    dynamic = shown(sizes.actor.use_dynamic_bsz)
    for log_probs in sizes.log_prob_passes:
        if log_probs.section == ROLLOUT and log_probs.dynamic != sizes.actor.use_dynamic_bsz:
            yield verl_problem(
                "dynamic-alike",
                f"{ROLLOUT}.log_prob_use_dynamic_bsz",
                log_probs.dynamic,
                f"differs from {ACTOR}.use_dynamic_bsz = {dynamic}",
                f"{ROLLOUT}.log_prob_use_dynamic_bsz={dynamic}",
            )


def _mini_rows_problems(sizes: VerlSizes) -> Iterator[Problem]:
    batch, data_ranks = sizes.batch, sizes.batch.split.data_parallel
    if data_ranks is None:
        return
    normalised = batch.mini_rows_per_data_rank
    if normalised is None:
        yield verl_problem(
            "mini-rows",
            f"{MINI} * {ROLLOUT}.n = {batch.mini_prompts} * {batch.responses}",
            batch.mini_rows,
            f"rows cannot be divided among {data_ranks} data-parallel ranks",
            *_nearest_mini_batches(batch),
        )
    elif not sizes.actor.use_dynamic_bsz and batch.micro_rows and normalised % batch.micro_rows:
        yield verl_problem(
            "micro-divides-mini",
            f"normalised {MINI} = {batch.mini_rows} rows / {data_ranks} data-parallel ranks",
            normalised,
            f"is no multiple of {MICRO} = {batch.micro_rows}",
            f"{MICRO}={largest_divisor(normalised, batch.micro_rows)}",
        )


def _log_prob_rows_problems(sizes: VerlSizes) -> Iterator[Problem]:
    rows, data_ranks = sizes.batch.rows_per_data_rank, sizes.batch.split.data_parallel
    for log_probs in sizes.log_prob_passes:
        if (
            log_probs.dynamic
            or rows is None
            or log_probs.micro_rows is None
            or rows % log_probs.micro_rows == 0
        ):
            continue
        key = f"{log_probs.section}.log_prob_micro_batch_size_per_gpu"
        yield verl_problem(
            "log-prob-divides",
            key,
            log_probs.micro_rows,
            f"does not divide the {rows} rows per data-parallel rank ({TRAIN} * {ROLLOUT}.n / "
            f"{data_ranks})",
            f"{key}={largest_divisor(rows, log_probs.micro_rows)}",
        )


def _token_budget_problems(sizes: VerlSizes) -> Iterator[Problem]:
    longest = max_row_tokens(sizes.config.data)
    sp = sizes.batch.split.cp if sizes.batch.split.megatron else sizes.batch.split.sp
    budgets = [
        (
            f"{ACTOR}.ppo_max_token_len_per_gpu",
            sizes.actor.use_dynamic_bsz,
            sizes.actor.ppo_max_token_len_per_gpu,
            sp,
        )
    ]
    budgets += [
        (
            f"{log_probs.section}.log_prob_max_token_len_per_gpu",
            log_probs.dynamic,
            log_probs.token_budget,
            log_probs.sp,
        )
        for log_probs in sizes.log_prob_passes
    ]
    if (critic := sizes.critic) is not None:
        key = f"{CRITIC}.ppo_max_token_len_per_gpu"
        budgets.append((key, critic.dynamic, critic.token_budget, critic.sp))
    for key, dynamic, budget, ranks in budgets:
        if dynamic and budget * ranks < longest:
            shared = f"* {ranks} ranks that share a row " if ranks > 1 else ""
            yield verl_problem(
                "token-budget",
                key,
                budget,
                f"{shared}cannot hold the longest row of {longest} tokens "
                "(data.max_prompt_length + data.max_response_length)",
                f"{key}={math.ceil(longest / ranks)}",
            )


def _dispatch_problems(sizes: VerlSizes) -> Iterator[Problem]:
    batch, data_ranks = sizes.batch, sizes.batch.split.data_parallel
    if data_ranks is not None and batch.rows_per_data_rank is None:
        yield verl_problem(
            "rows-divide",
            f"{TRAIN} * {ROLLOUT}.n",
            batch.rows,
            f"rows cannot be divided among {data_ranks} data-parallel ranks",
            f"{TRAIN}={_next_train_batch(batch, data_ranks)}",
        )


def _generation_problems(sizes: VerlSizes) -> Iterator[Problem]:
    batch = sizes.batch
    is_divided = batch.train_prompts % batch.gen_prompts == 0
    if not sizes.config.algorithm.filter_groups.enable and not is_divided:
        yield verl_problem(
            "generation-batch",
            "data.gen_batch_size",
            batch.gen_prompts,
            "is refused by verl 0.9 without algorithm.filter_groups.enable: "
            f"{TRAIN} = {batch.train_prompts} must be a multiple of it",
            f"data.gen_batch_size={batch.train_prompts}",
        )
    num_generations = sizes.config.algorithm.num_generations
    if num_generations not in (None, batch.responses):
        yield verl_problem(
            "group-size",
            "algorithm.num_generations",
            num_generations,
            f"differs from {ROLLOUT}.n = {batch.responses}",
            f"algorithm.num_generations={batch.responses}",
            is_error=sizes.actor.policy_loss.loss_mode == "adpo",
        )


def _next_train_batch(batch: BatchPlan, minimal: int) -> int:
    """Return the next train batch whose rows are a multiple of `minimal`, in whole mini-batches."""
    prompts = minimal // math.gcd(minimal, batch.responses)
    return next_multiple(batch.train_prompts, math.lcm(prompts, batch.mini_prompts))


def _nearest_mini_batches(batch: BatchPlan) -> tuple[str, ...]:
    """Return the nearest mini-batch that cuts train batch and ranks evenly.

    A smaller one is preferred, since it needs no more memory; where there is none, the train batch
    grows too.
    """
    data_ranks = batch.split.data_parallel or 1
    candidates = [
        size
        for size in range(1, batch.train_prompts + 1)
        if batch.train_prompts % size == 0 and size * batch.responses % data_ranks == 0
    ]
    if candidates:
        smaller = [size for size in candidates if size <= batch.mini_prompts]
        return (f"{MINI}={max(smaller) if smaller else min(candidates)}",)
    mini = next_multiple(batch.mini_prompts, data_ranks // math.gcd(data_ranks, batch.responses))
    return (f"{MINI}={mini}", f"{TRAIN}={next_multiple(batch.train_prompts, mini)}")


_RULES: tuple[Callable[[VerlSizes], Iterator[Problem]], ...] = (
    _world_problems,
    _critic_world_problems,
    _real_batch_problems,
    _log_prob_micro_problems,
    _mini_in_train_problems,
    _micro_problems,
    _critic_micro_problems,
    _remove_padding_problems,
    _same_dynamic_problems,
    _mini_rows_problems,
    _log_prob_rows_problems,
    _token_budget_problems,
    _dispatch_problems,
    _generation_problems,
)
