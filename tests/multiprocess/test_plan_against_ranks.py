"""What a plan counts for a rank without memory is what a real rank of a gloo group holds."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.config.memory.shape import shape_of
from sluice.config.run import RunConfig
from tests.support.preloaded import PreloadedProcess

MODULE, ANSWER_S = "tests.support.counted_rank", 90.0
LAYERS = 3
DENSE = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": LAYERS,
}


def asked(model: dict[str, Any], ranks: int, *, recompute: bool = False, **sharding: Any) -> str:
    tree = {
        "data": {"max_prompt_length": 32, "max_response_length": 200},
        "actor_rollout_ref": {
            "model": {"path": "unread", "enable_gradient_checkpointing": recompute},
            "actor": {"ppo_micro_batch_size_per_gpu": 2, "fsdp_config": sharding},
        },
    }
    config = msgspec.to_builtins(msgspec.convert(tree, RunConfig))
    return json.dumps({"config": config, "model": model, "ranks": ranks, "layers": [LAYERS]})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def answers(question: str, ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rank 0's bytes as counted there, and as planned."""
    meeting = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    processes = [
        PreloadedProcess(MODULE, [question], {**meeting, "RANK": str(rank), "LOCAL_RANK": "0"})
        for rank in range(ranks)
    ]
    processes.append(PreloadedProcess(MODULE, [question, "fake"], {}))
    lines = [process.stdout.readline() for process in processes]
    assert [process.wait(ANSWER_S) for process in processes] == [0] * (ranks + 1)
    for process in processes:
        process.stdin.close()
        process.stdout.close()
    (real,), (planned,) = json.loads(lines[0]), json.loads(lines[-1])
    return real, planned


EXPERTS = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [],
}


@pytest.mark.parametrize(
    ("ranks", "recompute", "sharding"),
    [
        (2, False, {}),
        (4, True, {"ulysses_sequence_parallel_size": 2}),
        (4, False, {"fsdp_size": 2, "ulysses_sequence_parallel_size": 4}),
        (2, False, {"fsdp_size": 1, "dtype": "float32"}),
    ],
)
def test_a_plan_counts_the_bytes_and_the_collectives_of_a_real_rank(
    ranks: int, recompute: bool, sharding: dict[str, Any]
) -> None:
    real, planned = answers(asked(DENSE, ranks, recompute=recompute, **sharding), ranks)
    assert planned == real
    assert real["backward"] > real["kept"] > 0
    assert ("all_to_all" in real["moved"]) == ("ulysses_sequence_parallel_size" in sharding)


@pytest.mark.parametrize(
    ("recompute", "sharding"),
    [
        (False, {"expert_parallel_size": 4}),
        (True, {"expert_parallel_size": 2, "ulysses_sequence_parallel_size": 2}),
    ],
)
def test_a_plan_counts_experts_that_ranks_divide(recompute: bool, sharding: dict[str, Any]) -> None:
    real, planned = answers(asked(EXPERTS, 4, recompute=recompute, **sharding), 4)
    assert planned == real
    assert real["moved"]["all_to_all"] > 0


def test_config_check_counts_a_trainer_in_a_process_of_its_own(tmp_path: Path) -> None:
    model = {**DENSE, "hidden_size": 256, "head_dim": 32, "vocab_size": 32_768}
    (tmp_path / "config.json").write_text(json.dumps(model), encoding="utf-8")
    overrides = [
        f"actor_rollout_ref.model.path={tmp_path}",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    ]
    command = [sys.executable, "-m", "sluice", "config", "check", "--json", "--no-files"]
    done = subprocess.run(
        [*command, "--rules", "here", *overrides], capture_output=True, text=True, check=True
    )
    assert "counting the trainer's memory" in done.stderr
    trainer = json.loads(done.stdout)["memory"]["trainer"]
    weights = 4 * shape_of(model).total_parameters
    # Beside them: buffers, tokens, and the counts of AdamW.
    for name, copies in {"weights": 1, "gradients": 1, "moments": 2}.items():
        assert 1 <= trainer["parts"][name] / (copies * weights) < 1.01
    assert trainer["phases"]["backward"] > 4 * weights
