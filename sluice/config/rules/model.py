"""Rules that need the model's shape, and rules of the inference engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from sluice.config import derived
from sluice.config.memory.shape import ModelShape, find_shape
from sluice.config.parallel_layout import EXPERT_KEY, TENSOR_KEY, shares_heads, stage_layers
from sluice.config.problems import Problem, problem_of, verl_problem
from sluice.config.run import RunConfig
from sluice.config.schema.actor_rollout_ref import VENDOR_ENGINES
from sluice.config.verl_sizes import (
    ACTOR,
    MEGATRON,
    ROLLOUT,
    VerlSizes,
    expert_tensor_parallel,
    largest_divisor,
)
from sluice.errors import ConfigError

REPLAY_KEY = "actor_rollout_ref.actor.router_replay.mode"


def shape_problems(config: RunConfig, sizes: VerlSizes, shape: ModelShape) -> list[Problem]:
    """Return parallel sizes that cannot cut the model's heads and experts evenly."""
    experts = (
        _megatron_expert_problems(sizes, shape)
        if sizes.batch.split.megatron
        else _expert_problems(
            config.actor_rollout_ref.actor.fsdp_config.expert_parallel_size, shape
        )
    )
    cuts = _tensor_cut_problems(
        config.actor_rollout_ref.actor.fsdp_config.tensor_parallel_size, shape
    )
    return [
        *_sequence_head_problems(sizes, shape),
        *_tensor_head_problems(sizes, shape),
        *cuts,
        *experts,
    ]


def context_problems(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    """Yield rows that are longer than the model's positions."""
    context, data = shape.context, config.data
    model_len = config.actor_rollout_ref.rollout.max_model_len
    if context is None:
        return
    stated = f"the model's context of {context} tokens (max_position_embeddings)"
    if derived.max_row_tokens(data) > context:
        yield Problem(
            "data.max_response_length",
            data.max_response_length,
            f"with data.max_prompt_length = {data.max_prompt_length}: together they exceed "
            f"{stated}",
            "lower one of the two, or take a model with a longer context",
        )
    elif model_len is not None and model_len > context:
        key = f"{ROLLOUT}.max_model_len"
        yield Problem(key, model_len, f"exceeds {stated}", overrides=(f"{key}=null",))


def repeat_problems(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    """Yield a mixture of experts whose samples the torch engine is to repeat bit for bit."""
    is_torch = config.actor_rollout_ref.rollout.name == "torch"
    if is_torch and shape.experts > 1 and derived.batch_invariant(config):
        key = "sluice.rollout.batch_invariant"
        yield Problem(
            key,
            config.sluice.rollout.batch_invariant,
            "with sluice.asynchrony.max_staleness = "
            f"{config.sluice.asynchrony.max_staleness}: samples would have to repeat bit for bit, "
            "but those of a mixture of experts depend on the rest of the batch",
            overrides=(f"{key}=false",),
        )


def routing_problems(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    """Yield routing replay of a dense model, and samples with more experts than a message holds."""
    key, mode = REPLAY_KEY, config.actor_rollout_ref.actor.router_replay.mode
    if mode == "disabled":
        return
    if not shape.experts:
        yield Problem(key, mode, ": the model has no experts", overrides=(f"{key}=disabled",))
    elif derived.replays_engine_routing(config):
        tokens, max_mb = derived.max_row_tokens(config.data), derived.message_mb(config)
        num_bytes = tokens * shape.expert_bytes_per_token
        # Beside them: ids, logprobs and sampled text of the response, and ids of the prompt.
        num_bytes += 12 * config.data.max_response_length + 4 * config.data.max_prompt_length
        needed_mb = (num_bytes >> 20) + 1  # beside a little else
        if needed_mb > max_mb:
            yield Problem(
                "sluice.max_message_mb",
                max_mb,
                f"with {key} = R3: a sample of {tokens} tokens has up to {needed_mb} MiB of "
                "experts",
                overrides=(f"sluice.max_message_mb={needed_mb}",),
            )


def stage_problems(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    """Yield stages of the trainer that the layers of the model, or of the critic, do not make."""
    actor, path = config.actor_rollout_ref.actor, config.critic.model.path
    size = actor.fsdp_config.pipeline_parallel_size
    layers = {"": shape.layers}
    if path and derived.uses_critic(config) and (critic := find_shape(path)) is not None:
        layers[f"critic.model.path={path}: "] = critic.layers
    for prefix, number in layers.items():
        try:
            stage_layers(number, size, actor.megatron.override_transformer_config)
        except ConfigError as error:
            yield problem_of(ConfigError(f"{prefix}{error}"))


def cut_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what sluice does not cut over tensor ranks, whatever the model."""
    sizes, critic = config.actor_rollout_ref.actor.fsdp_config, config.critic.fsdp
    has_critic = derived.uses_critic(config)
    compiled = {f"{ACTOR}.fsdp_config": sizes.use_torch_compile}
    compiled["critic.fsdp"] = has_critic and critic.use_torch_compile
    for section, is_compiled in compiled.items():
        if is_compiled and (ranks := sizes.tensor_parallel_size) > 1:
            key = f"{section}.use_torch_compile"
            no_layers = f"with {TENSOR_KEY} = {ranks}: layers that ranks cut are not compiled"
            yield Problem(key, True, no_layers, overrides=(f"{key}=false",))


def engine_problems(sizes: VerlSizes) -> Iterator[Problem]:
    """Yield what the engines of verl refuse, whatever the model."""
    # What an engine of both refuses is not a rule of verl alone.
    engine, is_error = sizes.rollout, sizes.rollout.name in VENDOR_ENGINES
    if sizes.keys.value(f"{ROLLOUT}.mode") == "sync":
        key = f"{ROLLOUT}.mode"
        yield verl_problem("engine-mode", key, "sync", ": verl has dropped it", f"{key}=async")
    key = f"{ROLLOUT}.pipeline_model_parallel_size"
    if (stages := sizes.keys.integer(key)) != 1:
        none = ": engines have no pipeline stages"
        yield verl_problem("engine-pipeline", key, stages, none, f"{key}=1")
    tp, dp, ep = (
        engine.tensor_model_parallel_size,
        engine.data_parallel_size,
        engine.expert_parallel_size,
    )
    if ep > 1 and ep != tp * dp:
        yield verl_problem(
            "engine-experts",
            f"{ROLLOUT}.expert_parallel_size",
            ep,
            f"must be tensor_model_parallel_size * data_parallel_size = {tp} * {dp}",
            f"{ROLLOUT}.expert_parallel_size={tp * dp}",
            is_error=is_error,
        )
    context = derived.max_model_len(sizes.config)
    if not engine.enable_chunked_prefill and engine.max_num_batched_tokens < context:
        yield verl_problem(
            "engine-tokens",
            f"{ROLLOUT}.max_num_batched_tokens",
            engine.max_num_batched_tokens,
            f"is less than the context of {context} tokens while "
            f"{ROLLOUT}.enable_chunked_prefill is false",
            f"{ROLLOUT}.max_num_batched_tokens={context}",
            is_error=is_error,
        )
    if is_error and engine.data_parallel_size > 1:
        yield verl_problem(
            "engine-replicas",
            f"{ROLLOUT}.data_parallel_size",
            engine.data_parallel_size,
            f"with name = {engine.name}, but a replica is one engine; start more of them "
            "(sluice.rollout.replicas)",
            f"{ROLLOUT}.data_parallel_size=1",
            is_error=True,
        )


def _sequence_head_problems(sizes: VerlSizes, shape: ModelShape) -> Iterator[Problem]:
    sharding = sizes.actor.fsdp_config
    degrees = [(ACTOR, sharding.ulysses_sequence_parallel_size, sharding.tensor_parallel_size)]
    if not sizes.batch.split.megatron:
        passes = [log_probs for log_probs in sizes.log_prob_passes if log_probs.section != ROLLOUT]
        degrees += [(log_probs.section, log_probs.sp, 1) for log_probs in passes]
    for section, sp, tensor in degrees:
        if shape.heads % tensor or shape.kv_heads % tensor:
            continue  # `_tensor_cut_problems` says so
        heads, kv_heads = shape.heads // tensor, shape.kv_heads // tensor
        can_share = partial(shares_heads, heads=heads, kv_heads=kv_heads)
        if can_share(sp):
            continue
        nearest = _largest_possible_divisor(sp, sizes.batch.split.world, can_share)
        key = f"{section}.ulysses_sequence_parallel_size"
        remainder = f" that {TENSOR_KEY} = {tensor} leaves" if tensor > 1 else ""
        cannot = (
            f"cannot cut {heads} attention heads and {kv_heads} key-value heads{remainder} evenly"
        )
        is_error = section == ACTOR
        yield verl_problem("sp-heads", key, sp, cannot, f"{key}={nearest}", is_error=is_error)


def _tensor_head_problems(sizes: VerlSizes, shape: ModelShape) -> Iterator[Problem]:
    key, tp = f"{ROLLOUT}.tensor_model_parallel_size", sizes.rollout.tensor_model_parallel_size
    if shape.heads % tp:
        cannot = f"cannot cut {shape.heads} attention heads evenly"
        nearest = largest_divisor(shape.heads, tp)
        is_error = sizes.rollout.name in VENDOR_ENGINES
        yield verl_problem("tp-heads", key, tp, cannot, f"{key}={nearest}", is_error=is_error)


def _tensor_cut_problems(size: int, shape: ModelShape) -> Iterator[Problem]:
    numbers = {"attention heads": shape.heads, "key-value heads": shape.kv_heads}
    if not shape.experts or shape.dense_layers:
        numbers["columns of the multilayer perceptron"] = shape.intermediate
    for things, number in numbers.items():
        if number % size:
            nearest = largest_divisor(math.gcd(*numbers.values()), size)
            change = f"{TENSOR_KEY}={nearest}"
            cannot = f"does not divide the {number} {things}"
            yield verl_problem("tp-heads", TENSOR_KEY, size, cannot, change, is_error=True)
            return


def _expert_problems(size: int, shape: ModelShape) -> Iterator[Problem]:
    if size > 1 and (shape.experts == 0 or shape.experts % size):
        cannot = (
            f"does not divide the {shape.experts} experts of a layer"
            if shape.experts
            else "for a model without experts"
        )
        nearest = largest_divisor(shape.experts, size) if shape.experts else 1
        change = f"{EXPERT_KEY}={nearest}"
        yield verl_problem("experts", EXPERT_KEY, size, cannot, change, is_error=True)


def _megatron_expert_problems(sizes: VerlSizes, shape: ModelShape) -> Iterator[Problem]:
    split, key = sizes.batch.split, f"{MEGATRON}.expert_model_parallel_size"
    ep, etp = sizes.keys.integer(key), expert_tensor_parallel(sizes.keys)
    if ep == 1:
        return
    if shape.experts == 0:
        none = "for a model without experts"
        yield verl_problem("experts", key, ep, none, f"{key}=1", is_error=True)
        return
    ranks = ep * etp * split.pp
    if shape.experts % ep or split.world % ranks:
        nearest = _largest_possible_divisor(
            ep,
            shape.experts,
            lambda size: split.world % (size * etp * split.pp) == 0,
        )
        yield verl_problem(
            "experts",
            key,
            ep,
            f"must divide {shape.experts} experts, and with expert tensor {etp} and pipeline "
            f"{split.pp} the {split.world} trainer ranks",
            f"{key}={nearest}",
            is_error=bool(shape.experts % ep),
        )


def _largest_possible_divisor(
    at_most: int, dividing: int, is_possible: Callable[[int], bool]
) -> int:
    """Return the largest divisor of `dividing` up to `at_most` that is possible, at least 1."""
    sizes = range(at_most, 0, -1)
    return next((size for size in sizes if dividing % size == 0 and is_possible(size)), 1)
