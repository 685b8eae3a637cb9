"""Own decoder layers and experts on several ranks have the gradients of transformers' on one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.layer_parity import MAX_ERROR
from tests.support.rank_parity import compare, made_subject
from tests.support.tiny_policy import make_model

ADAPTED: dict[str, Any] = {"adapts": True}
SIX: dict[str, Any] = {"num_experts": 6, "norm_topk_prob": True}
"""Of experts that two ranks divide: three a rank."""
BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "pad_token_id": 40}
"""The token has an embedding without a gradient, on the second of two ranks."""


@pytest.mark.parametrize(
    ("world_size", "layout", "passes"),
    [
        (2, {}, [("qwen3", {}, False), ("qwen3", ADAPTED, True)]),
        (4, {"ulysses_sequence_parallel_size": 2, "fsdp_size": 2}, [("llama", {}, True)]),
        (4, {"expert_parallel_size": 4}, [("qwen3_moe", ADAPTED, False)]),
        (4, {"expert_parallel_size": 2, "fsdp_size": 2}, [("qwen3_moe", {}, True)]),
        (
            4,  # each expert is shared by two ranks
            {"expert_parallel_size": 2, "ulysses_sequence_parallel_size": 4},
            [("qwen3_moe", SIX, True)],
        ),
        (2, {"tensor_parallel_size": 2}, [("llama", BIASED, True)]),
        (
            4,
            {"tensor_parallel_size": 2},
            [("qwen3", ADAPTED, False), ("qwen3_moe", ADAPTED, True)],
        ),
        (
            4,
            {"tensor_parallel_size": 2, "ulysses_sequence_parallel_size": 2},
            [("qwen2", {}, True)],
        ),
        (
            4,
            {"tensor_parallel_size": 2, "expert_parallel_size": 4},
            [("qwen3_moe", ADAPTED, False)],
        ),
        (
            4,
            {"tensor_parallel_size": 2, "expert_parallel_size": 2, "fsdp_size": 1},
            [("qwen3_moe", SIX, True)],
        ),
    ],
)
def test_gradients_are_those_of_transformers_whatever_the_layout(
    world_size: int,
    layout: dict[str, int],
    passes: list[tuple[str, dict[str, Any], bool]],
    tmp_path: Path,
) -> None:
    subjects = [
        (made_subject(family, **changes), recomputes) for family, changes, recomputes in passes
    ]
    tensor = layout.get("tensor_parallel_size", 1)
    copy = layout.get("fsdp_size", world_size // tensor) * tensor
    found = compare(world_size, layout, subjects, tmp_path)
    for one, (subject, _), (family, changes, _) in zip(found, subjects, passes, strict=True):
        assert one.error <= MAX_ERROR, family
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in subject.expected.values()))
        size = sum(g.numel() for g in subject.expected.values())
        if subject.adapter is not None:
            size += sum(p.numel() for p in make_model(family).parameters())
        for rank in one.ranks:
            assert rank.norm == pytest.approx(norm, rel=1e-5)
            # Each tensor index has norms, routers and halves of adapters whole.
            assert rank.held == pytest.approx(size / copy, rel=0.05 if tensor == 1 else 0.15), (
                changes
            )
