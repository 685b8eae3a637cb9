"""What SGLang starts with: the run configuration in SGLang's own words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from services.rollout.engines.settings import FILES_VERSION, VendorSettings, with_engine_kwargs
from sluice.config.run import RunConfig
from sluice.config.schema.actor_rollout_ref import RolloutConfig
from sluice.errors import ConfigError

_RESERVED_TOKENS = 8
"""SGLang refuses prompts that come within 6 tokens of the end of its context."""
_OURS: Mapping[str, str] = {
    "model_path": "set actor_rollout_ref.model.path",
    "trust_remote_code": "set actor_rollout_ref.model.trust_remote_code",
    "device": "set sluice.rollout.device",
    "dtype": "set actor_rollout_ref.rollout.dtype",
    "context_length": "set actor_rollout_ref.rollout.max_model_len",
    "max_running_requests": "set actor_rollout_ref.rollout.max_num_seqs",
    "tp_size": "set actor_rollout_ref.rollout.tensor_model_parallel_size",
    "dp_size": "set actor_rollout_ref.rollout.data_parallel_size",
    "ep_size": "set actor_rollout_ref.rollout.expert_parallel_size",
    "enable_dp_attention": "a replica is one engine; start more replicas",
    "pp_size": "replicas run without pipeline stages",
    "nnodes": "a replica's devices are on one machine",
    "disaggregation_mode": "a replica prefills and decodes on its own",
    "enable_memory_saver": "rollout and trainer have devices of their own, nothing has to sleep",
    "enable_lora": "the trainer's adapters are merged into the weights that arrive",
    "weight_cache_mode": "the trainer's weights arrive in memory of the replica's own",
    "checkpoint_engine_wait_weights_before_ready": "the first weights arrive after the start",
    "enable_return_routed_experts": "the adapter does not return them",
    "language_model_only": "the model says whether it takes images",
    "tokenizer_worker_num": "prompts and responses are token ids",
    "load_format": "the trainer's weights arrive when the replica joins",
    "sampling_backend": "sluice's own sampler samples tokens and reports their logprobs",
    "skip_tokenizer_init": "prompts and responses are token ids",
    "stream_interval": "requests say which tokens are wanted one by one",
    "incremental_streaming_output": "tokens are taken as they come",
    "enable_priority_scheduling": "requests say their priority",
    "schedule_low_priority_values_first": "requests say their priority",
    "speculative_algorithm": "drafts are not updated with the weights",
    "enable_beam_search": "samples are generated one by one",
}
"""Arguments that engine_kwargs must leave alone, with what to do instead."""


@dataclass(frozen=True, slots=True)
class SglangSettings(VendorSettings):
    """Settings of one `SglangEngine`."""

    @property
    def workers(self) -> int:
        """Scheduler processes that hold a share of the model, each on a device of its own."""
        return msgspec.convert(self.arguments.get("tp_size", 1), int)

    def engine_arguments(self, device_type: str) -> dict[str, object]:
        """Return all arguments of SGLang's engine, `arguments` last.

        Args:
            device_type: ``cpu`` or ``cuda``. On the CPU there are no graphs to capture, torch
                computes the attention, and the cache holds what the slots need.

        Raises:
            ConfigError: no weights would come with these.
        """
        fixed: dict[str, object] = {
            "model_path": self.model_path,
            "trust_remote_code": self.trust_remote_code,
            "device": device_type,
            "dtype": self.dtype,
            "context_length": self.max_model_len + _RESERVED_TOKENS,
            "max_running_requests": self.slots,
            "load_format": "auto" if self.serves_model_files else "dummy",
            "sampling_backend": "pytorch",
            "skip_tokenizer_init": True,
            "stream_interval": 1,
            "incremental_streaming_output": True,
            "enable_priority_scheduling": True,
            "disable_priority_preemption": True,
            "log_level": "warning",
            "sleep_on_idle": True,
            # Kept samples would end with a token that the old weights sampled and that comes after
            # the swap; retracted ones hand it on first.
            "disable_overlap_schedule": not self.recompute_kv,
        }
        if device_type == "cpu":
            fixed |= {
                "attention_backend": "torch_native",
                "max_total_tokens": self.slots * (self.max_model_len + _RESERVED_TOKENS),
                "disable_overlap_schedule": True,
            }
        if self.serves_model_files:
            fixed["weight_version"] = str(FILES_VERSION)
        if self.float32_head:
            fixed["enable_fp32_lm_head"] = True
        chosen = fixed | dict(self.arguments)
        self._refuse_pinned_channels(chosen, device_type)
        if device_type == "cpu":
            chosen["disable_cuda_graph"] = True
        elif device_type.startswith("cuda") and self.device and ":" in self.device:
            chosen.setdefault("base_gpu_id", int(self.device.partition(":")[2]))
        return chosen

    def _refuse_pinned_channels(self, arguments: Mapping[str, object], device_type: str) -> None:
        """Refuse NCCL between a trainer and workers that have their own number of channels."""
        is_pinned = self.workers > 1 and arguments.get("enable_deterministic_inference")
        if is_pinned and device_type == "cuda" and self.weights_backend != "gloo":
            raise ConfigError(
                "sluice.rollout.batch_invariant with "
                f"actor_rollout_ref.rollout.tensor_model_parallel_size={self.workers}: SGLang sets "
                "the number of NCCL's channels for its workers, whose collectives with the trainer "
                "would never end; set sluice.weights.backend=gloo"
            )


def sglang_settings(config: RunConfig) -> SglangSettings:
    """Return the part of a run configuration that concerns this engine.

    Raises:
        ConfigError: engine_kwargs.sglang is no mapping or sets what another key decides.
    """
    rollout = config.actor_rollout_ref.rollout
    deterministic = bool(config.sluice.rollout.batch_invariant)
    return SglangSettings.of(config, arguments=_arguments(rollout, deterministic=deterministic))


def _arguments(rollout: RolloutConfig, *, deterministic: bool) -> dict[str, object]:
    """Return the rollout's keys by SGLang's names, and what `engine_kwargs` add."""
    tokens = rollout.max_num_batched_tokens
    arguments: dict[str, object] = {
        "random_seed": rollout.seed,
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "tp_size": rollout.tensor_model_parallel_size,
        "dp_size": rollout.data_parallel_size,
        "ep_size": rollout.expert_parallel_size,
        "max_prefill_tokens": tokens,
        "chunked_prefill_size": tokens if rollout.enable_chunked_prefill else -1,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "disable_cuda_graph": rollout.enforce_eager,
        "cuda_graph_bs_decode": rollout.cudagraph_capture_sizes,
        "quantization": rollout.quantization,
        "enable_deterministic_inference": deterministic or None,
    }
    return with_engine_kwargs(arguments, rollout, "SGLang", _OURS)
