"""What a plan counts for a rank without memory, and what a real rank of a gloo group holds."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from services.trainer.dry_run.measure import most_of
from sluice.config.run import RunConfig
from sluice.plan.dry_run import PassBytes
from tests.support.preloaded import PreloadedProcess
from tests.support.trainer_ranks import ranks_of

_MODULE, _LAYERS = "tests.support.counted_rank", 3
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": _LAYERS,
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
    model: dict[str, Any], ranks: int, *, recompute: bool = False, **sharding: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`PassBytes` as counted on real ranks, and as planned; `sharding` are keys of FSDP's."""
    asked = _asked(model, ranks, recompute=recompute, **sharding)
    with ranks_of(_MODULE, ranks, asked) as processes:
        answers = [msgspec.convert(one.answer(), list[PassBytes]) for one in processes]
    # Stages hold different layers; a plan has the most of the first and the last one.
    ends = [answers[0][0], answers[-1][0]] if sharding.get("pipeline_parallel_size") else answers[0]
    return msgspec.to_builtins(most_of(ends)), _planned(asked)


def trained_and_planned(
    model: dict[str, Any], ranks: int, *, recompute: bool = False, **sharding: Any
) -> tuple[int, int]:
    """Most bytes that any rank has in the passes of a real step, and as planned."""
    asked = _asked(model, ranks, recompute=recompute, **sharding)
    with ranks_of("tests.support.trained_rank", ranks, asked) as processes:
        found = [one.answer() for one in processes]
    plan = _planned(asked)
    return max(found), max(plan["forward"], plan["backward"])


def _asked(
    model: dict[str, Any], ranks: int, *, recompute: bool, **sharding: Any
) -> dict[str, Any]:
    tree = {
        "data": {"max_prompt_length": 32, "max_response_length": 200},
        "actor_rollout_ref": {
            "model": {"path": "unread", "enable_gradient_checkpointing": recompute},
            "actor": {"ppo_micro_batch_size_per_gpu": 2, "fsdp_config": sharding},
        },
    }
    config = msgspec.to_builtins(msgspec.convert(tree, RunConfig))
    return {"config": config, "model": model, "ranks": ranks, "layers": [_LAYERS]}


def _planned(asked: dict[str, Any]) -> dict[str, Any]:
    alone = PreloadedProcess(_MODULE, [json.dumps(asked), "fake"], {})
    try:
        (planned,) = json.loads(alone.stdout.readline())
    finally:
        alone.close()
    found: dict[str, Any] = planned
    return found
