"""What vLLM starts with: settings, engine_kwargs and its environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.rollout.engines.causal_lm import build_causal_lm
from services.rollout.engines.vllm.client import engine_environment
from services.rollout.engines.vllm.settings import visible_environment, vllm_settings
from sluice.config.loading.loader import load_config
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


def test_a_float32_head_is_asked_for_beside_other_changes_of_the_models_config() -> None:
    key, given = "actor_rollout_ref.model.float32_head=true", f"+{_ROLLOUT}.engine_kwargs.vllm"
    assert "hf_overrides" not in _arguments()
    assert _arguments(key)["hf_overrides"] == {"head_dtype": "float32"}
    both = _arguments(key, f"{given}.hf_overrides.rope_theta=10000")["hf_overrides"]
    assert both == {"rope_theta": 10000, "head_dtype": "float32"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sluice.limits.max_prompt_images=5", {"image": 5, "video": 0}),
        (f"{_ROLLOUT}.limit_images=3", {"image": 3, "video": 0}),
        (f"+{_ROLLOUT}.engine_kwargs.vllm.limit_mm_per_prompt.image=7", {"image": 7}),
    ],
)
def test_vllm_knows_how_many_images_a_prompt_may_have(
    override: str, expected: dict[str, int]
) -> None:
    settings = vllm_settings(load_config(None, [override]))
    arguments = settings.engine_arguments(on_cpu=False, takes_images=True)
    assert arguments["limit_mm_per_prompt"] == expected


def test_for_a_text_model_vllm_gets_no_settings_of_images() -> None:
    assert "limit_mm_per_prompt" not in _arguments(f"{_ROLLOUT}.limit_images=3")


def test_logprobs_are_of_the_distribution_sampled_and_first_weights_come_by_wire() -> None:
    arguments = _arguments()
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["load_format"] == "dummy"
    assert arguments["skip_tokenizer_init"] is True
    served = _arguments("sluice.rollout.serves_model_files=true")
    assert served["load_format"] == "auto"


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


def test_batch_invariance_is_vllms_own() -> None:
    assert vllm_settings(load_config(None, ["sluice.rollout.batch_invariant=true"])).batch_invariant


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_without_memory_is_the_layout_that_the_torch_engine_has(
    family: str, tmp_path: Path
) -> None:
    save_config(family, tmp_path)
    layout, built = (
        build_causal_lm(str(tmp_path), torch.device(device), dtype="bfloat16").layout
        for device in ("meta", "cpu")
    )
    assert layout == built
    assert (layout.vocab_size, layout.eos_token_ids) == (VOCABULARY, (EOS,))


_CUDA, _START = "CUDA_VISIBLE_DEVICES", "VLLM_WORKER_MULTIPROC_METHOD"
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def test_vllm_sleeps_only_on_a_device_that_the_trainer_shares_in_synchronous_mode() -> None:
    shared = (f"{_ROLLOUT}.name=vllm", "sluice.weights.backend=gloo")
    synchronous = (*shared, "sluice.asynchrony.max_staleness=0")
    assert _arguments(*synchronous)["enable_sleep_mode"] is True
    others = (
        (f"{_ROLLOUT}.name=vllm", "sluice.asynchrony.max_staleness=0"),
        (*synchronous, f"{_ROLLOUT}.free_cache_engine=false"),
        (*shared, "sluice.asynchrony.max_staleness=1"),
    )
    for overrides in others:
        assert "enable_sleep_mode" not in _arguments(*overrides)
    assert "enable_sleep_mode" not in _arguments(*synchronous, on_cpu=True)


def _environment(
    given: dict[str, str], *, on_cpu: bool = False, version: str = "0.32.0"
) -> dict[str, str]:
    return engine_environment(
        given, on_cpu=on_cpu, threads=2, batch_invariant=False, version=version
    )


def test_what_is_set_already_stays() -> None:
    on_cpu = _environment({"OMP_NUM_THREADS": "5"}, on_cpu=True)
    assert on_cpu["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "OMP_NUM_THREADS" not in on_cpu
    assert _environment({}, on_cpu=True)["OMP_NUM_THREADS"] == "2"


def test_on_a_device_processes_are_spawned_and_forked_ones_refused() -> None:
    assert _environment({})[_START] == "spawn"
    assert _START not in _environment({_START: "spawn"})
    with pytest.raises(ConfigError, match=f"{_START}=fork: .* set it to spawn, or unset it"):
        _environment({_START: "fork"})


def test_on_the_cpu_vllm_sees_to_that_itself() -> None:
    assert _START not in _environment({_START: "fork"}, on_cpu=True)


@pytest.mark.parametrize(
    ("name", "count", "visible", "expected"),
    [
        ("cuda:2", 1, None, "2"),
        ("cuda:2", 2, None, "2,3"),
        ("cuda:1", 2, "4,5,7", "5,7"),
        ("cuda:0", 1, "GPU-aa,GPU-bb", "GPU-aa"),
    ],
)
def test_the_named_device_is_the_first_that_vllm_sees(
    name: str, count: int, visible: str | None, expected: str
) -> None:
    given = {} if visible is None else {_CUDA: visible}
    assert visible_environment(name, _CUDA, count, given) == {_CUDA: expected}


@pytest.mark.parametrize("name", [None, "auto", "cuda", "cpu"])
def test_without_an_index_nothing_is_hidden(name: str | None) -> None:
    assert visible_environment(name, _CUDA, 2, {_CUDA: "3,4"}) == {}


def test_too_few_devices_are_refused_with_the_keys_to_change() -> None:
    with pytest.raises(
        ConfigError,
        match=r"device=cuda:1: the engine takes 2 .*CUDA_VISIBLE_DEVICES=0,1 hands out 2; correct",
    ):
        visible_environment("cuda:1", _CUDA, 2, {_CUDA: "0,1"})


def test_with_r3_vllm_notes_experts_by_its_runner_v2_and_on_the_cpu_it_cannot() -> None:
    replay = "actor_rollout_ref.actor.router_replay.mode=R3"
    assert "enable_return_routed_experts" not in _arguments()
    assert _arguments(replay)["enable_return_routed_experts"] is True
    with pytest.raises(ConfigError, match=r"mode=R3 with vLLM on the CPU.*name=torch, or R2"):
        _arguments(replay, on_cpu=True)
    environment = engine_environment(
        {}, on_cpu=False, threads=2, batch_invariant=False, with_routing=True
    )
    assert environment[_RUNNER] == "1"


def test_model_runner_v1_is_taken_where_v2_misses_recomputed_samples() -> None:
    assert _RUNNER not in _environment({}, version="0.25.0")
    assert _environment({}, version="0.23.0")[_RUNNER] == "0"
    assert _RUNNER not in _environment({_RUNNER: "0"}, version="0.24.0")
    with pytest.raises(ConfigError, match=rf"{_RUNNER}=1: vLLM 0\.24\.0 .* set it to 0"):
        _environment({_RUNNER: "1"}, version="0.24.0")
