"""What the settings of vLLM and SGLang have in common, and every value that they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from services.rollout.engines.sglang.settings import sglang_settings
from services.rollout.engines.vllm.settings import vllm_settings
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"
_VENDORS = ("vllm", "sglang")


def _settings(vendor: str, *overrides: str) -> Any:
    config = load_config(None, list(overrides))
    return vllm_settings(config) if vendor == "vllm" else sglang_settings(config)


def _arguments(vendor: str, *overrides: str, on_cpu: bool = False) -> dict[str, object]:
    settings = _settings(vendor, *overrides)
    found: dict[str, object] = (
        settings.engine_arguments(on_cpu=on_cpu)
        if vendor == "vllm"
        else settings.engine_arguments("cpu" if on_cpu else "cuda")
    )
    return found


@pytest.mark.parametrize(
    ("vendor", "eager", "tokens"),
    [
        ("vllm", "enforce_eager", "max_num_batched_tokens"),
        ("sglang", "disable_cuda_graph", "chunked_prefill_size"),
    ],
)
def test_engine_kwargs_win_and_a_null_leaves_the_choice_to_the_vendor(
    vendor: str, eager: str, tokens: str
) -> None:
    (other,) = set(_VENDORS) - {vendor}
    arguments = _arguments(
        vendor,
        f"{_ROLLOUT}.enforce_eager=false",
        f"+{_ROLLOUT}.engine_kwargs.{vendor}.{eager}=true",
        f"+{_ROLLOUT}.engine_kwargs.{vendor}.{tokens}=null",
        f"+{_ROLLOUT}.engine_kwargs.{vendor}.swap_space=4",
        f"+{_ROLLOUT}.engine_kwargs.{other}.attention_backend=fa3",
    )
    assert (arguments[eager], arguments["swap_space"]) == (True, 4)
    assert tokens not in arguments
    assert "attention_backend" not in arguments, "those of another vendor have no effect"


_NAMES = {
    "vllm": "model load_format logprobs_mode worker_extension_cls max_num_seqs generation_config "
    "stream_interval",
    "sglang": "model_path load_format sampling_backend max_running_requests stream_interval "
    "ep_size nnodes enable_memory_saver enable_dp_attention disaggregation_mode enable_lora",
}
_REFUSED = [
    *(
        (vendor, [f"+{_ROLLOUT}.engine_kwargs.{vendor}.{name}=1"], f"{vendor}.{name} cannot be set")
        for vendor, names in _NAMES.items()
        for name in names.split()
    ),
    ("vllm", [f"+{_ROLLOUT}.engine_kwargs.vllm=3"], r"vllm is 3; give a mapping of vLLM's engine"),
    ("sglang", [f"+{_ROLLOUT}.engine_kwargs.sglang=3"], r"sglang is 3; .* SGLang's engine"),
]


@pytest.mark.parametrize(("vendor", "overrides", "message"), _REFUSED)
def test_a_value_that_a_replica_cannot_have_is_refused_with_the_remedy(
    vendor: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _arguments(vendor, *overrides)


def test_experts_shared_among_workers_are_refused_on_the_cpu_with_the_remedy() -> None:
    shared = [f"{_ROLLOUT}.{kind}_parallel_size=2" for kind in ("tensor_model", "expert")]
    with pytest.raises(ConfigError, match=r"expert_parallel_size .* on the CPU.*set it to 1"):
        _arguments("vllm", *shared, on_cpu=True)


@pytest.mark.parametrize("vendor", _VENDORS)
def test_the_services_own_keys_are_taken_over(vendor: str) -> None:
    settings = _settings(vendor, "sluice.weights.recompute_kv=true", "sluice.rollout.max_queued=5")
    assert (settings.recompute_kv, settings.max_queued) == (True, 5)
    data = RunConfig().data
    assert settings.max_model_len == data.max_prompt_length + data.max_response_length
