"""The run configuration in vLLM's words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.rollout.engines.causal_lm import (
    build_causal_lm,
    checkpoint_layout,
)
from services.rollout.engines.registry import create_engine
from services.rollout.engines.vllm import engine
from services.rollout.engines.vllm.settings import vllm_settings
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from tests.support.causal_lms import EOS, FAMILIES, VOCABULARY, save_config

_ROLLOUT = "actor_rollout_ref.rollout"


def _arguments(*overrides: str, on_cpu: bool = False) -> dict[str, object]:
    return vllm_settings(load_config(None, list(overrides))).engine_arguments(on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("gpu_memory_utilization=0.8", "gpu_memory_utilization", 0.8),
        ("max_num_seqs=192", "max_num_seqs", 192),
        ("max_num_batched_tokens=22528", "max_num_batched_tokens", 22528),
        ("max_model_len=4096", "max_model_len", 4096),
        ("enable_chunked_prefill=false", "enable_chunked_prefill", False),
        ("enable_prefix_caching=false", "enable_prefix_caching", False),
        ("enforce_eager=true", "enforce_eager", True),
        ("cudagraph_capture_sizes=[1,2,4]", "cudagraph_capture_sizes", [1, 2, 4]),
        ("quantization=fp8", "quantization", "fp8"),
        ("dtype=float32", "dtype", "float32"),
        ("seed=7", "seed", 7),
        ("tensor_model_parallel_size=1", "tensor_parallel_size", 1),
        ("expert_parallel_size=1", "enable_expert_parallel", False),
    ],
)
def test_the_rollouts_keys_reach_vllm(override: str, name: str, value: object) -> None:
    assert _arguments(f"{_ROLLOUT}.{override}")[name] == value


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sluice.limits.max_prompt_images=5", {"image": 5, "video": 0}),
        (f"{_ROLLOUT}.limit_images=3", {"image": 3, "video": 0}),
        (f"+{_ROLLOUT}.engine_kwargs.vllm.limit_mm_per_prompt.image=7", {"image": 7}),
    ],
)
def test_vllm_is_told_how_many_images_a_prompt_may_have(
    override: str, expected: dict[str, int]
) -> None:
    settings = vllm_settings(load_config(None, [override]))
    arguments = settings.engine_arguments(on_cpu=False, takes_images=True)
    assert arguments["limit_mm_per_prompt"] == expected


def test_of_a_model_of_text_vllm_is_told_nothing_of_images() -> None:
    assert "limit_mm_per_prompt" not in _arguments(f"{_ROLLOUT}.limit_images=3")


def test_engine_kwargs_win_and_a_null_leaves_the_choice_to_vllm() -> None:
    arguments = _arguments(
        f"{_ROLLOUT}.enforce_eager=false",
        f"+{_ROLLOUT}.engine_kwargs.vllm.enforce_eager=true",
        f"+{_ROLLOUT}.engine_kwargs.vllm.max_num_batched_tokens=null",
        f"+{_ROLLOUT}.engine_kwargs.vllm.swap_space=4",
        f"+{_ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3",
    )
    assert arguments["enforce_eager"] is True
    assert "max_num_batched_tokens" not in arguments
    assert arguments["swap_space"] == 4
    assert "attention_backend" not in arguments


@pytest.mark.parametrize(
    "name",
    [
        *("model", "load_format", "logprobs_mode", "worker_extension_cls", "max_num_seqs"),
        *("generation_config", "stream_interval"),
    ],
)
def test_engine_kwargs_leave_alone_what_the_adapter_relies_on(name: str) -> None:
    with pytest.raises(ConfigError, match=f"engine_kwargs.vllm.{name} cannot be set"):
        _arguments(f"+{_ROLLOUT}.engine_kwargs.vllm.{name}=1")


def test_logprobs_are_of_the_distribution_sampled_and_first_weights_come_by_wire() -> None:
    arguments = _arguments()
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["load_format"] == "dummy"
    assert arguments["skip_tokenizer_init"] is True


def test_requests_are_scheduled_by_priority_unless_the_run_wants_the_order_of_arrival() -> None:
    assert _arguments()["scheduling_policy"] == "priority"
    plain = _arguments(f"+{_ROLLOUT}.engine_kwargs.vllm.scheduling_policy=fcfs")
    assert plain["scheduling_policy"] == "fcfs"


def test_on_the_cpu_blocks_are_short_and_there_are_no_graphs() -> None:
    assert (_arguments(on_cpu=True)["block_size"], _arguments(on_cpu=True)["enforce_eager"]) == (
        32,
        True,
    )
    assert "block_size" not in _arguments()
    longer = _arguments(f"+{_ROLLOUT}.engine_kwargs.vllm.block_size=64", on_cpu=True)
    assert longer["block_size"] == 64


def test_several_workers_share_a_model_and_its_experts_or_none_of_them() -> None:
    two = f"{_ROLLOUT}.tensor_model_parallel_size=2"
    assert _arguments(two)["tensor_parallel_size"] == 2
    assert _arguments(two)["enable_expert_parallel"] is False
    assert _arguments(two, f"{_ROLLOUT}.expert_parallel_size=2")["enable_expert_parallel"] is True
    assert vllm_settings(load_config(None, [two])).workers == 2
    with pytest.raises(ConfigError, match=r"expert_parallel_size = 4: .* set it to 1 or to .*= 2"):
        _arguments(two, f"{_ROLLOUT}.expert_parallel_size=4")


def test_experts_shared_among_workers_are_refused_on_the_cpu_with_the_remedy() -> None:
    shared = [f"{_ROLLOUT}.{kind}_parallel_size=2" for kind in ("tensor_model", "expert")]
    with pytest.raises(ConfigError, match=r"expert_parallel_size .* on the CPU.*set it to 1"):
        _arguments(*shared, on_cpu=True)


def test_several_engines_a_replica_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"data_parallel_size = 2 .*start more replicas"):
        _arguments(f"{_ROLLOUT}.data_parallel_size=2")


def test_the_services_own_keys_are_taken_over() -> None:
    config = load_config(
        None,
        [
            "sluice.weights.recompute_kv=true",
            "sluice.rollout.max_queued=5",
            "sluice.rollout.batch_invariant=true",
        ],
    )
    settings = vllm_settings(config)
    assert (settings.recompute_kv, settings.max_queued, settings.batch_invariant) == (True, 5, True)
    data = RunConfig().data
    assert settings.max_model_len == data.max_prompt_length + data.max_response_length


def test_without_vllm_the_engine_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "installed_vllm", lambda: None)
    config = load_config(None, [f"{_ROLLOUT}.name=vllm"])
    with pytest.raises(ConfigError, match="vLLM is not installed here; install vllm"):
        create_engine(config)
    monkeypatch.setattr(engine, "installed_vllm", lambda: "0.32.0")
    assert isinstance(create_engine(config), engine.VllmEngine)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_without_memory_is_the_layout_that_the_torch_engine_has(
    family: str, tmp_path: Path
) -> None:
    save_config(family, tmp_path)
    layout = checkpoint_layout(str(tmp_path), dtype="bfloat16")
    built = build_causal_lm(str(tmp_path), torch.device("cpu"), dtype="bfloat16")
    assert layout.tensors == built.layout
    assert (layout.vocab_size, layout.eos_token_ids) == (VOCABULARY, (EOS,))
