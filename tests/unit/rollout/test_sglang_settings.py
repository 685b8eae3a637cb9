"""The run configuration in SGLang's words."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.rollout.engines.sglang import client, engine
from services.rollout.engines.sglang.client import engine_environment
from services.rollout.engines.sglang.settings import SglangSettings, sglang_settings
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError, MissingPackageError
from tests.support.causal_lms import save_config

_ROLLOUT = "actor_rollout_ref.rollout"


def _arguments(*overrides: str, device: str = "cuda") -> dict[str, object]:
    return sglang_settings(load_config(None, list(overrides))).engine_arguments(device)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("gpu_memory_utilization=0.8", "mem_fraction_static", 0.8),
        ("max_num_seqs=192", "max_running_requests", 192),
        ("max_num_batched_tokens=22528", "max_prefill_tokens", 22528),
        ("max_num_batched_tokens=22528", "chunked_prefill_size", 22528),
        ("enable_chunked_prefill=false", "chunked_prefill_size", -1),
        ("enable_prefix_caching=false", "disable_radix_cache", True),
        ("enforce_eager=true", "disable_cuda_graph", True),
        ("cudagraph_capture_sizes=[1,2,4]", "cuda_graph_bs_decode", [1, 2, 4]),
        ("quantization=fp8", "quantization", "fp8"),
        ("dtype=float32", "dtype", "float32"),
        ("seed=7", "random_seed", 7),
        ("tensor_model_parallel_size=4", "tp_size", 4),
        ("expert_parallel_size=1", "ep_size", 1),
    ],
)
def test_the_rollouts_keys_reach_sglang(override: str, name: str, value: object) -> None:
    assert _arguments(f"{_ROLLOUT}.{override}")[name] == value


def test_a_float32_head_is_asked_for() -> None:
    assert "enable_fp32_lm_head" not in _arguments()
    assert _arguments("actor_rollout_ref.model.float32_head=true")["enable_fp32_lm_head"] is True


def test_a_sample_may_be_as_long_as_configured_in_spite_of_what_sglang_keeps_for_itself() -> None:
    arguments = _arguments(f"{_ROLLOUT}.max_model_len=4096")
    assert arguments["context_length"] == 4096 + 8
    allowed = engine_environment({}, on_cpu=False, threads=1)
    assert allowed["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"


def test_nccl_chooses_the_memory_of_its_buffers_here_as_it_does_in_the_trainer() -> None:
    """SGLang sets 0 where nothing is set, and such ends cannot connect their GPUs."""
    assert engine_environment({}, on_cpu=False, threads=1)["NCCL_CUMEM_ENABLE"] == "-2"
    given = {"NCCL_CUMEM_ENABLE": "0"}  # the trainer has it too
    assert "NCCL_CUMEM_ENABLE" not in engine_environment(given, on_cpu=False, threads=1)
    assert "NCCL_CUMEM_ENABLE" not in engine_environment({}, on_cpu=True, threads=1)


async def test_samples_longer_than_the_models_positions_are_refused(tmp_path: Path) -> None:
    save_config("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"samples of 129 tokens.*128 positions"):
        await engine.SglangCore.build(SglangSettings(str(tmp_path), max_model_len=129))


def test_first_weights_come_by_wire_and_tokens_one_by_one() -> None:
    arguments = _arguments()
    assert arguments["load_format"] == "dummy"
    assert arguments["skip_tokenizer_init"] is True
    assert (arguments["stream_interval"], arguments["incremental_streaming_output"]) == (1, True)
    served = _arguments("sluice.rollout.serves_model_files=true")
    assert (served["load_format"], served["weight_version"]) == ("auto", "0")


def test_a_kept_sample_has_no_token_under_way_when_the_weights_change() -> None:
    assert _arguments("sluice.weights.recompute_kv=false")["disable_overlap_schedule"] is True
    assert _arguments("sluice.weights.recompute_kv=true")["disable_overlap_schedule"] is False


def test_on_the_cpu_torch_computes_without_graphs_in_a_cache_for_the_slots() -> None:
    arguments = _arguments(
        f"{_ROLLOUT}.max_num_seqs=4", f"{_ROLLOUT}.max_model_len=92", device="cpu"
    )
    assert arguments["attention_backend"] == "torch_native"
    assert (arguments["disable_cuda_graph"], arguments["max_total_tokens"]) == (True, 400)
    assert engine_environment({"OMP_NUM_THREADS": "3"}, on_cpu=True, threads=2) == {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }


def test_each_rank_on_the_cpu_has_cores_which_ranks_share_only_where_these_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cores(ranks: int) -> str | None:
        found = engine_environment({}, on_cpu=True, threads=1, ranks=ranks)
        return found.get("SGLANG_CPU_OMP_THREADS_BIND")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    assert [cores(ranks) for ranks in (1, 2, 4, 5)] == [None, "2,3|5,7", "2|3|5|7", "2|3|5|7|2"]
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in engine_environment(
        {}, on_cpu=False, threads=1, ranks=2
    )


def test_a_replica_has_a_worker_for_each_device_of_tensor_parallelism() -> None:
    assert sglang_settings(RunConfig()).workers == 1
    config = load_config(None, [f"{_ROLLOUT}.tensor_model_parallel_size=4"])
    assert sglang_settings(config).workers == 4


def test_a_numbered_device_is_sglangs_first() -> None:
    assert "base_gpu_id" not in SglangSettings("m", device="cuda").engine_arguments("cuda")
    assert SglangSettings("m", device="cuda:3").engine_arguments("cuda")["base_gpu_id"] == 3


def test_batch_invariance_is_sglangs_deterministic_inference() -> None:
    settings = sglang_settings(load_config(None, ["sluice.rollout.batch_invariant=true"]))
    assert settings.arguments["enable_deterministic_inference"] is True
    assert "enable_deterministic_inference" not in sglang_settings(RunConfig()).arguments


def test_workers_whose_channels_sglang_pins_take_no_weights_by_nccl() -> None:
    invariant = ("sluice.rollout.batch_invariant=true", f"{_ROLLOUT}.tensor_model_parallel_size=2")
    with pytest.raises(ConfigError, match=r"parallel_size=2.*weights.backend=gloo"):
        _arguments(*invariant)
    for permitted in (invariant[:1], invariant[1:], (*invariant, "sluice.weights.backend=gloo")):
        assert _arguments(*permitted)
    assert _arguments(*invariant, device="cpu")


@pytest.mark.parametrize(
    ("error", "is_missing"),
    [
        (OSError("libcudart.so.13: cannot open shared object file"), True),
        (ImportError("No module named 'libcudart'"), True),
        (RuntimeError("libcudart: no device answers"), False),  # a restart may help
    ],
)
async def test_an_sglang_that_cannot_be_imported_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_missing: bool
) -> None:
    def fail(_: str) -> None:
        raise error

    monkeypatch.setattr(client.importlib, "import_module", fail)
    with pytest.raises(
        ConfigError, match=r"cannot be imported.*libcudart.*install sglang"
    ) as caught:
        client.SglangClient({})
    assert isinstance(caught.value, MissingPackageError) is is_missing


async def test_an_sglang_without_what_the_engine_calls_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = ("generate_request", "pause_generation", "continue_generation", "get_internal_state")
    manager = type("TokenizerManager", (), dict.fromkeys(called))
    module = SimpleNamespace(ServerArgs=lambda: None, TokenizerManager=manager, Engine=object)
    module.Socket = type("Socket", (), {})  # of zmq
    monkeypatch.setattr(client.importlib, "import_module", lambda _: module)
    with pytest.raises(ConfigError, match=r"it has no update_weights_from_disk; install 0\.5\.23"):
        client.SglangClient({})
