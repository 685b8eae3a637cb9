"""What a plan counts for a rank without memory, and what a real rank of a gloo group holds."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from sluice.config.parallel_layout import different_stages, stage_layers
from sluice.config.run import RunConfig
from tests.support.preloaded import PreloadedProcess
from tests.support.trainer_ranks import ranks_of

_MODULE = "tests.support.counted_rank"
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 2,  # of a stage, without a cut
}
EXPERTS: dict[str, Any] = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [],
}


def counted_and_planned(
    model: dict[str, Any],
    ranks: int,
    *,
    recompute: bool = False,
    cut: dict[str, int] | None = None,
    **sharding: Any,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """`PassBytes` of each stage that differs, as counted on real ranks, and as planned.

    `cut` are keys of Megatron's that cut layers into stages, `sharding` keys of FSDP's.
    """
    asked = _asked(model, ranks, recompute, cut, sharding)
    with ranks_of(_MODULE, ranks, asked) as processes:
        answers = [one.answer() for one in processes]
    return [answers[one.start] for one in _stage_ranks(asked)], _planned(asked)


def trained_and_planned(
    model: dict[str, Any],
    ranks: int,
    *,
    recompute: bool = False,
    cut: dict[str, int] | None = None,
    **sharding: Any,
) -> tuple[list[dict[str, Any]], list[int], list[dict[str, Any]]]:
    """As above; between them, by stage, most bytes that any rank has in passes of a real step."""
    asked = _asked(model, ranks, recompute, cut, sharding)
    with ranks_of("tests.support.trained_rank", ranks, asked) as processes:
        counts = [one.answer() for one in processes]
        peaks = [one.answer() for one in processes]
    places = _stage_ranks(asked)
    return (
        [counts[one.start] for one in places],
        [max(peaks[one.start : one.stop]) for one in places],
        _planned(asked),
    )


def _asked(
    model: dict[str, Any],
    ranks: int,
    recompute: bool,
    cut: dict[str, int] | None,
    sharding: dict[str, Any],
) -> dict[str, Any]:
    tree = {
        "data": {"max_prompt_length": 32, "max_response_length": 200},
        "actor_rollout_ref": {
            "model": {"path": "unread", "enable_gradient_checkpointing": recompute},
            "actor": {
                "ppo_micro_batch_size_per_gpu": 2,
                "fsdp_config": sharding,
                "megatron": {"override_transformer_config": cut or {}},
            },
        },
    }
    config = msgspec.convert(tree, RunConfig)
    number = config.actor_rollout_ref.actor.fsdp_config.pipeline_parallel_size
    overrides = config.actor_rollout_ref.actor.megatron.override_transformer_config
    layers = model["num_hidden_layers"] * number
    stages = stage_layers(layers, number, overrides)
    return {
        "config": msgspec.to_builtins(config),
        "model": {**model, "num_hidden_layers": layers},
        "ranks": ranks,
        "runs": [(stage, len(stages[stage])) for stage in different_stages(number)],
    }


def _stage_ranks(asked: dict[str, Any]) -> list[range]:
    """The ranks of each stage that differs."""
    each = asked["ranks"] // (asked["runs"][-1][0] + 1)
    return [range(stage * each, (stage + 1) * each) for stage, _ in asked["runs"]]


def _planned(asked: dict[str, Any]) -> list[dict[str, Any]]:
    alone = PreloadedProcess(_MODULE, [json.dumps(asked), "fake"], {})
    try:
        planned: list[dict[str, Any]] = json.loads(alone.stdout.readline())
    finally:
        alone.close()
    return planned
