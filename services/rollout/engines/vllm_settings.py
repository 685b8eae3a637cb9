"""What the vLLM engine needs to know: the run configuration's keys in vLLM's own words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from services.rollout.engines.client_engine_settings import ClientEngineSettings
from services.rollout.engines.engine_kwargs import with_engine_kwargs
from sluice.config.rollout import RolloutConfig
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.vision.image_limits import DEFAULT_LIMITS

__all__ = ["WORKER_EXTENSION", "VllmSettings", "vllm_settings"]

WORKER_EXTENSION = "services.rollout.engines.vllm_worker.WeightWorker"
_OURS: Mapping[str, str] = {
    "model": "set actor_rollout_ref.model.path",
    "dtype": "set actor_rollout_ref.rollout.dtype",
    "max_model_len": "set actor_rollout_ref.rollout.max_model_len",
    "max_num_seqs": "set actor_rollout_ref.rollout.max_num_seqs",
    "tensor_parallel_size": "set actor_rollout_ref.rollout.tensor_model_parallel_size",
    "data_parallel_size": "set actor_rollout_ref.rollout.data_parallel_size",
    "pipeline_parallel_size": "replicas run without pipeline stages",
    "load_format": "the trainer's weights arrive when the replica joins",
    "stream_interval": "a token belongs to the version that serves when it comes",
    "logprobs_mode": "training needs the logprobs of the distribution really sampled",
    "generation_config": "requests say how to sample",
    "skip_tokenizer_init": "prompts and responses are token ids",
    "worker_extension_cls": "the weights arrive through it",
}
"""Arguments that engine_kwargs must leave alone, with what to do instead."""


@dataclass(frozen=True, slots=True)
class VllmSettings(ClientEngineSettings):
    """Settings of one `VllmEngine`.

    Attributes:
        batch_invariant: have vLLM choose kernels whose results do not depend on the batch.
        max_prompt_images: more than these in a prompt are refused before vLLM gets it.
    """

    batch_invariant: bool = False
    max_prompt_images: int = DEFAULT_LIMITS.max_images

    @property
    def workers(self) -> int:
        """Processes that hold a share of the model, each on a device of its own."""
        return msgspec.convert(self.arguments.get("tensor_parallel_size", 1), int)

    def engine_arguments(self, *, on_cpu: bool, takes_images: bool = False) -> dict[str, object]:
        """All arguments of vLLM's engine, `arguments` last.

        Args:
            on_cpu: whether vLLM computes on the CPU, where there are no graphs to capture and
                where its blocks of 128 tokens are longer than many prompts, which could then not
                be shared.
            takes_images: whether the model does; vLLM lays them out with the model's tokenizer.

        Raises:
            ConfigError: vLLM cannot compute so on the CPU.
        """
        fixed: dict[str, object] = {
            "model": self.model_path,
            "trust_remote_code": self.trust_remote_code,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.slots,
            "load_format": "dummy",
            "skip_tokenizer_init": not takes_images,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": WORKER_EXTENSION,
            "disable_log_stats": True,
            "scheduling_policy": "priority",
        }
        if takes_images:
            fixed |= {"limit_mm_per_prompt": {"image": self.max_prompt_images, "video": 0}}
        if on_cpu:
            fixed |= {"block_size": 32}
        chosen = fixed | dict(self.arguments)
        if on_cpu:
            _refuse_shared_experts(chosen)
            chosen["enforce_eager"] = True
        return chosen


def vllm_settings(config: RunConfig) -> VllmSettings:
    """The part of a run configuration that concerns this engine.

    Raises:
        ConfigError: engine_kwargs.vllm is no mapping or sets what another key decides, or parallel
            sizes that a replica cannot have.
    """
    rollout = config.actor_rollout_ref.rollout
    _check_sizes(rollout)
    settings = VllmSettings.of(config, _arguments(rollout))
    return replace(
        settings,
        batch_invariant=bool(config.sluice.rollout.batch_invariant),
        max_prompt_images=config.sluice.limits.max_prompt_images,
    )


def _arguments(rollout: RolloutConfig) -> dict[str, object]:
    """The rollout's keys by vLLM's names, and what `engine_kwargs` add."""
    arguments: dict[str, object] = {
        "seed": rollout.seed,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "data_parallel_size": rollout.data_parallel_size,
        "enable_expert_parallel": rollout.expert_parallel_size > 1,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": rollout.enforce_eager,
        "cudagraph_capture_sizes": rollout.cudagraph_capture_sizes,
        "quantization": rollout.quantization,
    }
    return with_engine_kwargs(arguments, rollout, "vLLM", _OURS)


def _refuse_shared_experts(arguments: Mapping[str, object]) -> None:
    """On the CPU vLLM's kernel for experts indexes all of them: a worker with some would crash."""
    if arguments.get("enable_expert_parallel") and arguments.get("tensor_parallel_size", 1) != 1:
        raise ConfigError(
            "actor_rollout_ref.rollout.expert_parallel_size is more than 1 on the CPU, where vLLM "
            "has no kernel that computes with a share of the experts; set it to 1"
        )


def _check_sizes(rollout: RolloutConfig) -> None:
    """A replica is one engine of vLLM's, whose workers share experts as they share the rest."""
    section = "actor_rollout_ref.rollout"
    if rollout.data_parallel_size > 1:
        raise ConfigError(
            f"{section}.data_parallel_size = {rollout.data_parallel_size} with name=vllm: a "
            "replica is one engine; set it to 1 and start more replicas "
            "(sluice.rollout.replicas)"
        )
    tp, ep = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    if ep not in (1, tp):
        raise ConfigError(
            f"{section}.expert_parallel_size = {ep}: vLLM shares experts among all of a replica's "
            f"{tp} workers, or among none; set it to 1 or to tensor_model_parallel_size = {tp}"
        )
