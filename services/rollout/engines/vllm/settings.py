"""What vLLM starts with: the run configuration in vLLM's own words, visible devices, and
changes for Ascend NPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from services.rollout.engines.settings import VendorSettings, with_engine_kwargs
from sluice.config.derived import replays_engine_routing, sleeps_while_training
from sluice.config.run import RunConfig
from sluice.config.schema.actor_rollout_ref import RolloutConfig
from sluice.errors import ConfigError
from sluice.vision.image_limits import DEFAULT_LIMITS

_KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"
_DTYPE = "actor_rollout_ref.rollout.dtype"
_NZ_VARIABLE = "VLLM_ASCEND_ENABLE_NZ"
_PLUGINS_VARIABLE = "VLLM_PLUGINS"
_BLOCK_SIZE = 128

_REFUSED: Mapping[str, str] = {
    "enable_sleep_mode": "trainer and replicas share no NPU, so nothing has to sleep",
    "weight_transfer_config": "weights arrive through sluice's own worker extension",
    "worker_cls": "vllm-ascend chooses its worker",
    "attention_backend": "vllm-ascend has its own attention only",
    "kv_transfer_config": "a replica prefills and decodes on its own",
}
"""Arguments of vLLM that engine_kwargs must leave alone on an NPU, and why."""
WORKER_EXTENSION = "services.rollout.engines.vllm.worker_extension.VllmWorker"
_OURS: Mapping[str, str] = {
    "model": "set actor_rollout_ref.model.path",
    "dtype": "set actor_rollout_ref.rollout.dtype",
    "max_model_len": "set actor_rollout_ref.rollout.max_model_len",
    "max_num_seqs": "set actor_rollout_ref.rollout.max_num_seqs",
    "tensor_parallel_size": "set actor_rollout_ref.rollout.tensor_model_parallel_size",
    "data_parallel_size": "set actor_rollout_ref.rollout.data_parallel_size",
    "pipeline_parallel_size": "replicas run without pipeline stages",
    "load_format": "the trainer's weights arrive when the replica joins",
    "stream_interval": "requests say which tokens are wanted one by one",
    "logprobs_mode": "training needs the logprobs of the distribution really sampled",
    "generation_config": "requests say how to sample",
    "enable_return_routed_experts": "set actor_rollout_ref.actor.router_replay.mode=R3",
    "skip_tokenizer_init": "prompts and responses are token ids",
    "worker_extension_cls": "the weights arrive through it",
}
"""Arguments that engine_kwargs must leave alone, with what to do instead."""


def ascend_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for vLLM's processes on an NPU, to be set before vLLM is imported.

    Args:
        environment: the environment; its values stay, or are refused if they cannot work.

    Raises:
        ConfigError: a variable has a value that weight updates cannot work with.
    """
    if environment.get(_NZ_VARIABLE, "0") != "0":
        raise ConfigError(
            f"{_NZ_VARIABLE}={environment[_NZ_VARIABLE]}: vllm-ascend would keep weights in the "
            "NPU's own format (FRACTAL_NZ), which new weights cannot be copied into; set it to 0"
        )
    plugins = environment.get(_PLUGINS_VARIABLE)
    if plugins is not None and "ascend" not in plugins.split(","):
        raise ConfigError(
            f"{_PLUGINS_VARIABLE}={plugins!r} leaves vllm-ascend out, and vLLM alone knows no NPU; "
            "add ascend to it, or unset it"
        )
    return {} if _NZ_VARIABLE in environment else {_NZ_VARIABLE: "0"}


def ascend_arguments(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the engine's arguments as vllm-ascend takes them.

    Args:
        arguments: all of them, by vLLM's names.

    Raises:
        ConfigError: one that vllm-ascend does not have, or that prevents new weights.
    """
    for name, reason in _REFUSED.items():
        if arguments.get(name):
            raise ConfigError(f"{_KWARGS}.{name} cannot be set on an NPU: {reason}")
    if arguments.get("dtype") not in (None, "auto", "bfloat16", "float16"):
        raise ConfigError(
            f"{_DTYPE}={arguments['dtype']}: vllm-ascend's attention computes with bfloat16 or "
            "float16; set bfloat16"
        )
    _check_cache(arguments)
    _check_quantization(arguments.get("quantization"))
    return {**arguments, "additional_config": _additional(arguments.get("additional_config"))}


def _check_cache(arguments: Mapping[str, object]) -> None:
    block_size = arguments.get("block_size")
    if arguments.get("enable_prefix_caching") and block_size not in (None, _BLOCK_SIZE):
        raise ConfigError(
            f"{_KWARGS}.block_size={block_size}: vllm-ascend shares prompts in blocks of "
            f"{_BLOCK_SIZE} tokens; leave it out, or set enable_prefix_caching=False"
        )
    cache_dtype = str(arguments.get("kv_cache_dtype", "auto"))
    if cache_dtype.startswith("fp8"):
        raise ConfigError(
            f"{_KWARGS}.kv_cache_dtype={cache_dtype}: there is no such cache on an NPU; leave it "
            "out"
        )


def _check_quantization(method: object) -> None:
    """Refuse quantization: weights travel as the trainer has them, and formats are made offline."""
    if method is not None:
        raise ConfigError(
            f"actor_rollout_ref.rollout.quantization={method}: new weights cannot be written into "
            "vllm-ascend's quantized layers; leave it out"
        )


def _additional(configured: object) -> dict[str, object]:
    """Return vllm-ascend's own configuration, with weights in the ordinary format."""
    key = f"{_KWARGS}.additional_config"
    if configured is not None and not isinstance(configured, Mapping):
        raise ConfigError(f"{key} is {configured!r}; give a mapping of vllm-ascend's keys")
    chosen: dict[str, object] = {str(name): value for name, value in (configured or {}).items()}
    if chosen.get("weight_nz_mode", 0) != 0:
        raise ConfigError(
            f"{key}.weight_nz_mode={chosen['weight_nz_mode']}: new weights cannot be copied into "
            "that format; set it to 0, or leave it out"
        )
    return {**chosen, "weight_nz_mode": 0}


def visible_environment(
    name: str | None, variable: str | None, count: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variable that makes the configured device the first one that vLLM sees.

    Args:
        name: ``sluice.rollout.device``; without an index nothing has to be set.
        variable: the one that makes devices of that kind visible.
        count: devices that the engine takes: the named one and those after it.
        environment: the environment, which may show fewer devices than the machine has.

    Raises:
        ConfigError: `environment` shows too few.
    """
    index = (name or "").partition(":")[2]
    if variable is None or not index:
        return {}
    first_number = int(index)
    visible = environment.get(variable)
    if visible is None:
        return {variable: ",".join(str(first_number + place) for place in range(count))}
    devices = [device.strip() for device in visible.split(",") if device.strip()]
    chosen_devices = devices[first_number : first_number + count]
    if len(chosen_devices) < count:
        raise ConfigError(
            f"sluice.rollout.device={name}: the engine takes {count} device(s) from number "
            f"{first_number} on, but {variable}={visible} hands out {len(devices)}; correct the "
            "index, actor_rollout_ref.rollout.tensor_model_parallel_size or that variable"
        )
    return {variable: ",".join(chosen_devices)}


@dataclass(frozen=True, slots=True)
class VllmSettings(VendorSettings):
    """Settings of one `VllmEngine`.

    Attributes:
        batch_invariant: make vLLM choose kernels whose results do not depend on the batch.
        max_prompt_images: a prompt with more is refused before vLLM gets it.
        with_routing: vLLM notes the experts of each token.
        sleeps: it sleeps while the trainer uses the device.
    """

    batch_invariant: bool = False
    max_prompt_images: int = DEFAULT_LIMITS.max_images
    with_routing: bool = False
    sleeps: bool = False

    @property
    def workers(self) -> int:
        """Processes that hold a share of the model, each on a device of its own."""
        return msgspec.convert(self.arguments.get("tensor_parallel_size", 1), int)

    def engine_arguments(self, *, on_cpu: bool, takes_images: bool = False) -> dict[str, object]:
        """Return all arguments of vLLM's engine, `arguments` last.

        Args:
            on_cpu: whether vLLM computes on the CPU. There it has no graphs to capture, and its
                blocks of 128 tokens are longer than many prompts, which could then not be shared.
            takes_images: whether the model does; vLLM lays them out with the model's tokenizer.

        Raises:
            ConfigError: vLLM cannot compute like that on the CPU.
        """
        fixed: dict[str, object] = {
            "model": self.model_path,
            "trust_remote_code": self.trust_remote_code,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.slots,
            "load_format": "auto" if self.serves_model_files else "dummy",
            "skip_tokenizer_init": not takes_images,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": WORKER_EXTENSION,
            "disable_log_stats": True,
            "scheduling_policy": "priority",
        }
        if takes_images:
            fixed |= {"limit_mm_per_prompt": {"image": self.max_prompt_images, "video": 0}}
        if self.with_routing:
            fixed |= {"enable_return_routed_experts": True}
        if on_cpu:
            fixed |= {"block_size": 32}
        elif self.sleeps:
            fixed |= {"enable_sleep_mode": True}
        chosen = fixed | dict(self.arguments)
        if self.float32_head:
            overrides = msgspec.convert(chosen.get("hf_overrides", {}), dict[str, object])
            chosen["hf_overrides"] = {**overrides, "head_dtype": "float32"}
        if on_cpu:
            _refuse_shared_experts(chosen)
            _refuse_routing(chosen)
            chosen["enforce_eager"] = True
        return chosen


def vllm_settings(config: RunConfig) -> VllmSettings:
    """Return the part of a run configuration that concerns this engine.

    Raises:
        ConfigError: engine_kwargs.vllm is no mapping or sets what another key decides.
    """
    rollout = config.actor_rollout_ref.rollout
    return VllmSettings.of(
        config,
        arguments=_arguments(rollout),
        batch_invariant=bool(config.sluice.rollout.batch_invariant),
        max_prompt_images=config.sluice.limits.max_prompt_images,
        with_routing=replays_engine_routing(config),
        sleeps=sleeps_while_training(config),
    )


def _arguments(rollout: RolloutConfig) -> dict[str, object]:
    """Return the rollout's keys by vLLM's names, and what `engine_kwargs` add."""
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
    """Refuse a share of the experts on the CPU: vLLM's kernel there indexes all of them."""
    if arguments.get("enable_expert_parallel") and arguments.get("tensor_parallel_size", 1) != 1:
        raise ConfigError(
            "actor_rollout_ref.rollout.expert_parallel_size is more than 1 on the CPU, where vLLM "
            "has no kernel that computes with a share of the experts; set it to 1"
        )


def _refuse_routing(arguments: Mapping[str, object]) -> None:
    """Refuse to note experts on the CPU: only vLLM's model runner V2 does, which needs Triton."""
    if arguments.get("enable_return_routed_experts"):
        raise ConfigError(
            "actor_rollout_ref.actor.router_replay.mode=R3 with vLLM on the CPU, where it does not "
            "return the experts of its tokens; set actor_rollout_ref.rollout.name=torch, or R2"
        )
