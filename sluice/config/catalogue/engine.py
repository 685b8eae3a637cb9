"""`actor_rollout_ref.rollout.*` that tune vLLM and SGLang."""

from __future__ import annotations

from typing import Unpack

from sluice.config.catalogue.entry import Entry, Texts, honoured, inapplicable, refused

_KEY = "actor_rollout_ref.rollout"
_NOT_TORCH = "vllm and sglang read it, torch does without"


def _tuning(name: str, **more: Unpack[Texts]) -> Entry:
    effect = more.get("effect")
    more["effect"] = (
        f"{effect}; {_NOT_TORCH}" if effect else _NOT_TORCH[:1].upper() + _NOT_TORCH[1:]
    )
    more["engines"] = ("vllm", "sglang")
    return honoured(f"{_KEY}.{name}", **more)


def _fixed(name: str, annotation: object, default: object, meaning: str, instead: str) -> Entry:
    return inapplicable(f"{_KEY}.{name}", annotation, default, meaning, instead, silent=(default,))


ENTRIES: tuple[Entry, ...] = (
    _tuning(
        "gpu_memory_utilization",
        effect="More room for the cache: more sequences at once",
        advice=(
            "0.8 to 0.9 where the engine has the device to itself, as here; lower values in verl "
            "launches leave room for the trainer. Graphs are not counted in it"
        ),
    ),
    _tuning(
        "tensor_model_parallel_size",
        unit="devices",
        verl_default="2",
        effect="Weights per device divided by it; every layer then communicates",
        advice=(
            "The smallest for which memory * gpu_memory_utilization * this exceeds two bytes a "
            "parameter: smaller means more replicas"
        ),
        silent=(1,),
    ),
    _tuning("data_parallel_size", unit="devices", silent=(1,)),
    _tuning("expert_parallel_size", unit="devices", silent=(1,)),
    refused(
        f"{_KEY}.pipeline_model_parallel_size",
        int,
        1,
        "Stages of layers in the engine.",
        "engines run without pipeline stages, as in verl; raise tensor_model_parallel_size",
    ),
    _tuning(
        "max_num_batched_tokens",
        unit="tokens",
        advice="At least 8192, max_model_len and the longest row",
    ),
    _tuning(
        "enable_chunked_prefill",
        advice="On; without it max_num_batched_tokens must hold a row",
        silent=(True,),
    ),
    _tuning(
        "enable_prefix_caching",
        advice="On: the samples of a group share their prompt",
        silent=(True,),
    ),
    _tuning(
        "enforce_eager",
        effect="true saves the graphs' memory and decodes more slowly",
        advice="false; true where memory is short",
        silent=(False,),
    ),
    _tuning(
        "cudagraph_capture_sizes",
        effect="Fewer sizes take less memory",
        advice="[1, 2, 4, 8, 16, 32] where memory is short",
    ),
    _tuning(
        "quantization",
        effect="fp8: faster rollouts on Hopper and later",
        advice="Set algorithm.rollout_correction.rollout_is=token with it",
    ),
    _tuning(
        "engine_kwargs",
        advice="vllm.enable_expert_parallel=true for mixtures of experts",
        silent=({},),
    ),
    inapplicable(
        f"{_KEY}.quantization_config_file",
        str | None,
        None,
        "File that describes the quantisation.",
        "rollout.quantization decides",
        silent=(None,),
    ),
    _fixed(
        "load_format",
        str,
        "dummy",
        "Where the engine takes its first weights from.",
        "an engine starts from the model's folder and takes the trainer's weights when it joins",
    ),
    _fixed(
        "disable_log_stats",
        bool,
        True,
        "Silence the engine's own statistics.",
        "the engine's statistics are silenced",
    ),
    _fixed(
        "scheduling_policy",
        str,
        "fcfs",
        "Order of waiting requests.",
        "waiting samples are drawn by priority, those of one priority in the order they came",
    ),
    _fixed(
        "logprobs_mode",
        str,
        "processed_logprobs",
        "Which log-probabilities are returned.",
        "those of the distribution that was sampled from",
    ),
)
