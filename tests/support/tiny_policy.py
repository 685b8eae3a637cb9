"""Tiny policies on disk, run configurations for them, and train batches of made-up samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import structs
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from services.trainer.learner.model.loading import LoadedModel, load_policy
from sluice.config.run import RunConfig
from sluice.config.schema.service import SourceConfig
from sluice.types import (
    DataProgress,
    FinishReason,
    Rollout,
    Scored,
    TrainBatch,
    TrainGroup,
    VersionSpan,
    expert_dtype,
)

VOCABULARY = 61
NUM_SAMPLES = 4
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 12, 16

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED: dict[str, Any] = {**COMMON, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {**_GROUPED, "head_dim": 16, "tie_word_embeddings": True},
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS},
    "granite": {**_GROUPED, "logits_scaling": 3.0, "attention_multiplier": 0.3},
    "gpt_neox": COMMON,
    "qwen3_moe": {
        **_GROUPED,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [],
    },
    "bloom": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    },
}


def make_model(family: str = "qwen3", **changes: object) -> PreTrainedModel:
    """A model with random weights, always the same ones, in evaluation mode."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def save_model(folder: Path, family: str = "qwen3", **changes: object) -> Path:
    """Write such a model, and something that passes for its tokenizer, into `folder`."""
    transformers_logging.disable_progress_bar()
    make_model(family, **changes).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


def make_config(model: Path, num_groups: int = 6, **actor: object) -> RunConfig:
    """Two optimizer steps a batch, of unequal micro-batches, float32; `actor` changes that."""
    settings: dict[str, object] = {
        "ppo_mini_batch_size": num_groups // 2,
        "ppo_micro_batch_size_per_gpu": max(5, num_groups * NUM_SAMPLES // 3),
        "clip_ratio_high": 0.28,
        # A large epsilon, or rounding of gradients near 0 would become visible in the weights.
        "optim": {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-2},
        "fsdp_config": {"dtype": "float32"},
    }
    tree = {
        "data": {
            "train_batch_size": num_groups,
            "max_prompt_length": MAX_PROMPT_TOKENS,
            "max_response_length": MAX_RESPONSE_TOKENS,
        },
        "actor_rollout_ref": {"model": {"path": str(model)}, "actor": settings | actor},
        "trainer": {"device": "cpu"},
    }
    return msgspec.convert(tree, RunConfig)


def with_critic(config: RunConfig, **keys: object) -> RunConfig:
    """The same run by PPO, with a critic in float32. `keys` are the critic's."""
    critic = {"fsdp": {"dtype": "float32"}} | keys
    return structs.replace(
        config,
        algorithm=structs.replace(config.algorithm, adv_estimator="gae"),
        critic=msgspec.convert(critic, type(config.critic)),
    )


def recomputing(config: RunConfig) -> RunConfig:
    """The same run; the backward pass computes layers again."""
    policy = config.actor_rollout_ref
    model = structs.replace(policy.model, enable_gradient_checkpointing=True)
    return structs.replace(config, actor_rollout_ref=structs.replace(policy, model=model))


def adapting(config: RunConfig, **keys: object) -> RunConfig:
    """The same run; low-rank adapters are trained. `keys` are those of the model."""
    policy = config.actor_rollout_ref
    model = msgspec.convert(msgspec.to_builtins(policy.model) | keys, type(policy.model))
    return structs.replace(config, actor_rollout_ref=structs.replace(policy, model=model))


def on_device(config: RunConfig, device: str) -> RunConfig:
    """The same run, trained on another device."""
    return structs.replace(config, trainer=structs.replace(config.trainer, device=device))


def skipping(config: RunConfig) -> RunConfig:
    """The same run; samples without an advantage are skipped."""
    trainer = structs.replace(config.sluice.trainer, skip_zero_advantage=True)
    return structs.replace(config, sluice=structs.replace(config.sluice, trainer=trainer))


def with_sources(config: RunConfig, sources: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The same run with these sources, of equal shares, by their settings."""
    policy = config.actor_rollout_ref
    given = {
        name: SourceConfig(files="made-up.parquet", share=1 / len(sources), **settings)
        for name, settings in sources.items()
    }
    return structs.replace(
        config,
        actor_rollout_ref=structs.replace(
            policy, rollout=structs.replace(policy.rollout, n=NUM_SAMPLES)
        ),
        sluice=structs.replace(config.sluice, sources=given),
    )


def of_sources(batch: TrainBatch, names: Sequence[str]) -> TrainBatch:
    """The batch; the names in turn are the sources of its groups."""
    groups = [
        replace(group, source=names[number % len(names)])
        for number, group in enumerate(batch.groups)
    ]
    return replace(batch, groups=tuple(groups))


def uniform(batch: TrainBatch, numbers: Iterable[int]) -> TrainBatch:
    """The batch, with equal rewards in these groups."""
    groups = list(batch.groups)
    for number in numbers:
        scores = tuple(replace(scored, reward=-1.0) for scored in groups[number].scores)
        groups[number] = replace(groups[number], scores=scores)
    return replace(batch, groups=tuple(groups))


def freezing(name: str) -> Callable[..., LoadedModel]:
    """`load_policy`, but this parameter is not trained."""

    def load(*arguments: Any, **options: Any) -> LoadedModel:
        loaded = load_policy(*arguments, **options)
        loaded.model.get_parameter(name).requires_grad_(False)
        return loaded

    return load


def make_group(seed: int, lengths: tuple[int, ...] | None = None) -> TrainGroup:
    """One prompt with samples of mixed rewards; response lengths as given, or sampled."""
    random = np.random.default_rng(seed)
    sampled = random.integers(1, MAX_RESPONSE_TOKENS + 1, NUM_SAMPLES).tolist()
    chosen = sampled if lengths is None else list(lengths)
    prompt = random.integers(VOCABULARY, size=random.integers(2, MAX_PROMPT_TOKENS + 1))
    rewards = [1.0, *random.choice([-1.0, 1.0], len(chosen) - 2), -1.0]
    return TrainGroup(
        prompt_id=f"prompt-{seed}",
        prompt_token_ids=prompt.astype(np.uint32),
        rollouts=tuple(_rollout(random, i, length) for i, length in enumerate(chosen)),
        scores=tuple(Scored(float(r), float(r), {"acc": (r + 1) / 2}) for r in rewards),
        data_source="made up",
    )


def made_up_routing(group: TrainGroup, num_experts: int, layers: int = 2) -> TrainGroup:
    """The group, with two experts at random for each of a sample's tokens in each layer."""
    random = np.random.default_rng(num_experts)
    prompt, rollouts = group.prompt_token_ids.size, []
    for rollout in group.rollouts:
        size = (prompt + max(0, rollout.num_tokens - 1), layers, num_experts)
        chosen = random.random(size).argsort(-1)[..., :2]
        rollouts.append(rollout.with_routing(chosen.astype(expert_dtype(num_experts))))
    return replace(group, rollouts=tuple(rollouts))


def make_batch(num_groups: int = 6, seed: int = 0) -> TrainBatch:
    """A batch of `make_group`s; equal seeds give equal batches."""
    groups = tuple(make_group(1000 * seed + number) for number in range(num_groups))
    return TrainBatch(f"batch-{seed}", seed, groups, DataProgress(num_groups), {})


def routed(batch: TrainBatch, num_experts: int, *, without: int = 0, layers: int = 2) -> TrainBatch:
    """The batch, with `made_up_routing` for all but its first `without` groups."""
    groups = tuple(made_up_routing(one, num_experts, layers) for one in batch.groups[without:])
    return replace(batch, groups=batch.groups[:without] + groups)


def _rollout(random: np.random.Generator, index: int, length: int) -> Rollout:
    return Rollout.of_one_turn(
        sample_index=index,
        token_ids=random.integers(VOCABULARY, size=length).astype(np.uint32),
        behavior_logprobs=-4.0 - random.random(length).astype(np.float32),
        version_spans=(VersionSpan(0, 0, length),) if length else (),
        finish_reason=FinishReason.STOP,
        text="",
    )
