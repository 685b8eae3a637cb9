"""Deadlines follow from the launch where the user sets none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.config.deadlines import (
    command_timeout_s,
    commit_timeout_s,
    generate_timeout_s,
    replica_wait_timeout_s,
)
from sluice.config.loading.loader import load_config

# The shape of Qwen2.5-7B: 7.6e9 parameters, 15.2 GB in bfloat16.
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


def test_a_stream_lasts_as_long_as_its_longest_answer_at_ten_tokens_a_second() -> None:
    short = load_config(None, ["data.max_response_length=1024"])
    assert generate_timeout_s(short) == 600
    long = load_config(None, ["data.max_response_length=20480"])
    assert generate_timeout_s(long) == 2048
    chosen = load_config(
        None, ["data.max_response_length=20480", "sluice.reward.generate_timeout_s=100"]
    )
    assert generate_timeout_s(chosen) == 100


@pytest.mark.parametrize(("engine", "min_s"), [("torch", 120), ("vllm", 600)])
def test_a_start_may_last_as_long_as_reading_the_model(
    engine: str, min_s: float, tmp_path: Path
) -> None:
    keys = [f"actor_rollout_ref.rollout.name={engine}", f"actor_rollout_ref.model.path={tmp_path}"]
    unknown = load_config(None, keys)
    assert replica_wait_timeout_s(unknown) == min_s
    assert command_timeout_s(unknown) == 120
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    known = load_config(None, keys)
    assert replica_wait_timeout_s(known) == pytest.approx(min_s + 61, abs=1)
    assert command_timeout_s(known) == pytest.approx(120 + 61, abs=1)
    chosen = load_config(
        None,
        [
            *keys,
            "sluice.trainer.replica_wait_timeout_s=5",
            "sluice.trainer.command_timeout_s=6",
        ],
    )
    assert (replica_wait_timeout_s(chosen), command_timeout_s(chosen)) == (5, 6)


def test_a_model_of_another_kind_has_the_least_deadlines(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = load_config(None, [f"actor_rollout_ref.model.path={tmp_path}"])
    assert command_timeout_s(config) == 120


@pytest.mark.parametrize(
    ("engine", "devices", "loading_s"),
    [
        ("torch", 1, 120),
        ("vllm", 4, 30),
        ("sglang", 4, 30),
    ],
)
def test_a_commit_has_the_time_to_load_what_a_device_reads_of_a_large_model(
    engine: str, devices: int, loading_s: float
) -> None:
    rollout = "actor_rollout_ref.rollout"
    config = load_config(
        None,
        [
            "sluice.weights.timeout_s=30",
            f"{rollout}.name={engine}",
            f"{rollout}.tensor_model_parallel_size={devices}",
        ],
    )
    assert commit_timeout_s(config, 0) == 30
    assert commit_timeout_s(config, 60e9) == 30 + loading_s
