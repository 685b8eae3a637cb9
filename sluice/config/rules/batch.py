"""verl's own rules about batch and parallel sizes, all at once, each with a value that would do.

verl checks some when it reads the configuration and others only inside a worker, minutes later;
here all of them come first. The order is verl's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from sluice.config.problems import Violation, violation
from sluice.config.verl_run import (
    ACTOR,
    CRITIC,
    MEGATRON,
    REF,
    ROLLOUT,
    BatchPlan,
    VerlRun,
    largest_divisor,
    next_multiple,
)

MINI, MICRO = f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
TRAIN, GLOBAL_MICRO = "data.train_batch_size", f"{ACTOR}.ppo_micro_batch_size"
SP = f"{ACTOR}.ulysses_sequence_parallel_size"
CRITIC_SP = f"{CRITIC}.ulysses_sequence_parallel_size"
RANKS = "trainer.n_gpus_per_node"


def verl_violations(run: VerlRun) -> list[Violation]:
    """Every rule that `run` breaks, in verl's order."""
    return [broken for rule in _RULES for broken in rule(run)]


def _world(run: VerlRun) -> Iterator[Violation]:
    split = run.batch.split
    if split.world % split.ranks_per_replica:
        keys = (
            f"{MEGATRON}: tensor {split.tp} * pipeline {split.pp} * context {split.cp}"
            if split.megatron
            else f"{SP} = {split.sp}"
        )
        step = split.ranks_per_replica // math.gcd(split.nodes, split.ranks_per_replica)
        yield violation(
            "world-divides",
            f"trainer.nnodes * {RANKS} = {split.world} ranks cannot be divided into replicas of "
            f"{split.ranks_per_replica} ranks ({keys})",
            f"{RANKS}={next_multiple(split.ranks_per_node, step)}",
        )
    if not split.megatron and 0 < split.fsdp_size < split.world and split.world % split.fsdp_size:
        yield violation(
            "fsdp-size",
            f"{ACTOR}.fsdp_config.fsdp_size = {split.fsdp_size} does not divide the {split.world} "
            "trainer ranks",
            f"{ACTOR}.fsdp_config.fsdp_size={largest_divisor(split.world, split.fsdp_size)}",
            here=True,
        )


def _critic_world(run: VerlRun) -> Iterator[Violation]:
    world = run.batch.split.world
    if run.critic is not None and not run.batch.split.megatron and world % run.critic.sp:
        yield violation(
            "critic-world-divides",
            f"trainer.nnodes * {RANKS} = {world} ranks cannot be divided into replicas of "
            f"{CRITIC_SP} = {run.critic.sp} ranks",
            f"{CRITIC_SP}={largest_divisor(world, run.critic.sp)}",
        )


def _real_batch(run: VerlRun) -> Iterator[Violation]:
    batch, replicas = run.batch, run.batch.split.data_parallel
    if run.dynamic or replicas is None:
        return
    minimal = batch.split.world
    if batch.split.megatron:
        minimal = replicas * (batch.micro_rows or 1)
    if batch.rows % minimal:
        yield violation(
            "real-batch",
            f"{TRAIN} * {ROLLOUT}.n = {batch.train_prompts} * {batch.responses} = {batch.rows} "
            f"rows are no multiple of {minimal}, the smallest batch that gives every rank the same",
            f"{TRAIN}={_train_prompts(batch, minimal)}",
        )


def _log_prob_micro(run: VerlRun) -> Iterator[Violation]:
    for one in run.log_prob_passes:
        key = f"{one.section}.log_prob_micro_batch_size"
        if one.dynamic:
            continue
        if one.micro_rows is None and one.global_micro_rows is None:
            yield violation(
                "log-prob-micro",
                f"{key}_per_gpu is null while {one.section}.log_prob_use_dynamic_bsz is false",
                f"{key}_per_gpu={_fitting_micro(run.batch)}",
            )
        elif one.micro_rows is not None and one.global_micro_rows is not None:
            yield violation(
                "log-prob-micro",
                f"{key}_per_gpu = {one.micro_rows} and the deprecated {key} = "
                f"{one.global_micro_rows} are both set",
                f"{key}=null",
            )


def _mini_in_train(run: VerlRun) -> Iterator[Violation]:
    batch = run.batch
    if batch.mini_prompts > batch.train_prompts:
        yield violation(
            "mini-in-train",
            f"{MINI} = {batch.mini_prompts} is more than {TRAIN} = {batch.train_prompts} (both "
            "count prompts)",
            f"{MINI}={batch.train_prompts}",
            here=True,
        )
    elif batch.train_prompts % batch.mini_prompts:
        yield violation(
            "whole-mini-batches",
            f"{TRAIN} = {batch.train_prompts} is no multiple of {MINI} = {batch.mini_prompts}, so "
            "the last mini-batch would be smaller",
            *_mini_prompts(batch),
            here=True,
        )


def _micro(run: VerlRun) -> Iterator[Violation]:
    batch, old = run.batch, run.global_micro_rows
    if run.dynamic:
        return
    per_gpu = f"{MICRO}={_fitting_micro(batch)}"
    if old is None and run.micro_rows is None:
        yield violation(
            "micro-batch",
            f"{MICRO} is null while {ACTOR}.use_dynamic_bsz is false",
            per_gpu,
            here=True,
        )
    if old is None:
        return
    if run.micro_rows is not None:
        yield violation(
            "micro-batch",
            f"{MICRO} = {run.micro_rows} and the deprecated {GLOBAL_MICRO} = {old} are both set",
            f"{GLOBAL_MICRO}=null",
        )
    elif batch.mini_prompts % old or old * batch.split.sp < batch.split.world:
        yield violation(
            "global-micro-batch",
            f"the deprecated {GLOBAL_MICRO} = {old} must divide {MINI} = {batch.mini_prompts} and "
            f"give each of {batch.split.world} ranks a row",
            f"{GLOBAL_MICRO}=null",
            per_gpu,
        )


def _remove_padding(run: VerlRun) -> Iterator[Violation]:
    for key, sp in ((SP, run.batch.split.sp), *_log_prob_sp(run)):
        if sp > 1 and not run.remove_padding:
            yield violation(
                "sp-needs-packing",
                f"{key} = {sp} with actor_rollout_ref.model.use_remove_padding = false: sequences "
                "can only be cut once they are packed",
                "actor_rollout_ref.model.use_remove_padding=true",
            )
    critic = run.critic
    if critic is not None and critic.sp > 1 and not critic.remove_padding:
        yield violation(
            "sp-needs-packing",
            f"{CRITIC_SP} = {critic.sp} with {CRITIC}.model.use_remove_padding = false: sequences "
            "can only be cut once they are packed",
            f"{CRITIC}.model.use_remove_padding=true",
        )


def _log_prob_sp(run: VerlRun) -> Iterator[tuple[str, int]]:
    for one in run.log_prob_passes:
        if one.section == REF:
            yield f"{REF}.ulysses_sequence_parallel_size", one.sp


def _sampling(run: VerlRun) -> Iterator[Violation]:
    if run.val_do_sample and run.temperature <= 0:
        yield violation(
            "validation-temperature",
            f"{ROLLOUT}.val_kwargs.do_sample = true needs {ROLLOUT}.temperature > 0, got "
            f"{run.temperature:g}",
            f"{ROLLOUT}.temperature=1.0",
        )


def _same_dynamic(run: VerlRun) -> Iterator[Violation]:
    for one in run.log_prob_passes:
        if one.section == ROLLOUT and one.dynamic != run.dynamic:
            yield violation(
                "dynamic-alike",
                f"{ROLLOUT}.log_prob_use_dynamic_bsz = {str(one.dynamic).lower()} differs from "
                f"{ACTOR}.use_dynamic_bsz = {str(run.dynamic).lower()}",
                f"{ROLLOUT}.log_prob_use_dynamic_bsz={str(run.dynamic).lower()}",
            )


def _mini_rows(run: VerlRun) -> Iterator[Violation]:
    batch, replicas = run.batch, run.batch.split.data_parallel
    if replicas is None:
        return
    normalised = batch.mini_rows_per_replica
    if normalised is None:
        yield violation(
            "mini-rows",
            f"{MINI} * {ROLLOUT}.n = {batch.mini_prompts} * {batch.responses} = {batch.mini_rows} "
            f"rows cannot be divided among {replicas} data-parallel ranks",
            *_mini_prompts(batch),
        )
    elif not run.dynamic and batch.micro_rows and normalised % batch.micro_rows:
        yield violation(
            "micro-divides-mini",
            f"normalised {MINI} = {batch.mini_rows} rows / {replicas} data-parallel ranks = "
            f"{normalised} is no multiple of {MICRO} = {batch.micro_rows}",
            f"{MICRO}={largest_divisor(normalised, batch.micro_rows)}",
        )


def _log_prob_rows(run: VerlRun) -> Iterator[Violation]:
    rows = run.batch.rows_per_replica
    for one in run.log_prob_passes:
        if one.dynamic or rows is None or one.micro_rows is None or rows % one.micro_rows == 0:
            continue
        key = f"{one.section}.log_prob_micro_batch_size_per_gpu"
        yield violation(
            "log-prob-divides",
            f"{rows} rows per data-parallel rank ({TRAIN} * {ROLLOUT}.n / "
            f"{run.batch.split.data_parallel}) are no multiple of {key} = {one.micro_rows}",
            f"{key}={largest_divisor(rows, one.micro_rows)}",
        )


def _token_budget(run: VerlRun) -> Iterator[Violation]:
    sp = run.batch.split.cp if run.batch.split.megatron else run.batch.split.sp
    budgets = [(f"{ACTOR}.ppo_max_token_len_per_gpu", run.dynamic, run.token_budget, sp)]
    budgets += [
        (f"{one.section}.log_prob_max_token_len_per_gpu", one.dynamic, one.token_budget, one.sp)
        for one in run.log_prob_passes
    ]
    if (critic := run.critic) is not None:
        key = f"{CRITIC}.ppo_max_token_len_per_gpu"
        budgets.append((key, critic.dynamic, critic.token_budget, critic.sp))
    for key, dynamic, budget, ranks in budgets:
        if dynamic and budget * ranks < run.longest_row:
            shared = f" * {ranks} ranks that share a row" if ranks > 1 else ""
            yield violation(
                "token-budget",
                f"{key} = {budget}{shared} cannot hold the longest row of {run.longest_row} "
                "tokens (data.max_prompt_length + data.max_response_length)",
                f"{key}={math.ceil(run.longest_row / ranks)}",
            )


def _dispatch(run: VerlRun) -> Iterator[Violation]:
    batch, replicas = run.batch, run.batch.split.data_parallel
    if replicas is not None and batch.rows_per_replica is None:
        yield violation(
            "rows-divide",
            f"{TRAIN} * {ROLLOUT}.n = {batch.rows} rows cannot be divided among {replicas} "
            "data-parallel ranks",
            f"{TRAIN}={_train_prompts(batch, replicas)}",
        )


def _generation(run: VerlRun) -> Iterator[Violation]:
    batch = run.batch
    if not run.filters_groups and batch.gen_prompts != batch.train_prompts:
        yield violation(
            "generation-batch",
            f"data.gen_batch_size = {batch.gen_prompts} without algorithm.filter_groups.enable "
            f"would silently replace {TRAIN} = {batch.train_prompts}",
            f"data.gen_batch_size={batch.train_prompts}",
        )
    if run.num_generations not in (None, batch.responses):
        yield violation(
            "group-size",
            f"algorithm.num_generations = {run.num_generations} differs from {ROLLOUT}.n = "
            f"{batch.responses}",
            f"algorithm.num_generations={batch.responses}",
            here=run.adpo,
        )


def _train_prompts(batch: BatchPlan, minimal: int) -> int:
    """The next train batch whose rows are a multiple of `minimal`, in whole mini-batches."""
    prompts = minimal // math.gcd(minimal, batch.responses)
    return next_multiple(batch.train_prompts, math.lcm(prompts, batch.mini_prompts))


def _mini_prompts(batch: BatchPlan) -> tuple[str, ...]:
    """The nearest mini-batch that cuts train batch and ranks evenly; a larger train batch if none.

    A smaller one is preferred, since it needs no more memory.
    """
    replicas = batch.split.data_parallel or 1
    possible = [
        size
        for size in range(1, batch.train_prompts + 1)
        if batch.train_prompts % size == 0 and size * batch.responses % replicas == 0
    ]
    if possible:
        smaller = [size for size in possible if size <= batch.mini_prompts]
        return (f"{MINI}={max(smaller) if smaller else min(possible)}",)
    mini = next_multiple(batch.mini_prompts, replicas // math.gcd(replicas, batch.responses))
    return (f"{MINI}={mini}", f"{TRAIN}={next_multiple(batch.train_prompts, mini)}")


def _fitting_micro(batch: BatchPlan) -> int:
    """Rows of a micro-batch that divide the normalised mini-batch; small, as memory is unknown."""
    return largest_divisor(batch.mini_rows_per_replica or 1, 4)


_RULES: tuple[Callable[[VerlRun], Iterator[Violation]], ...] = (
    _world,
    _critic_world,
    _real_batch,
    _log_prob_micro,
    _mini_in_train,
    _micro,
    _remove_padding,
    _sampling,
    _same_dynamic,
    _mini_rows,
    _log_prob_rows,
    _token_budget,
    _dispatch,
    _generation,
)
