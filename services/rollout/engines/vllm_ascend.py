"""What vLLM needs otherwise on an Ascend NPU, where vllm-ascend takes part in it. Pure.

vllm-ascend is a plugin that vLLM finds by itself (its entry point ``ascend`` under
``vllm.platform_plugins``), so that nothing here imports it. Read from its versions 0.23 and later;
never run.
"""

from __future__ import annotations

from collections.abc import Mapping

from sluice.errors import ConfigError

__all__ = ["ascend_arguments", "ascend_environment"]

_KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"
_DTYPE = "actor_rollout_ref.rollout.dtype"
_NZ_VARIABLE = "VLLM_ASCEND_ENABLE_NZ"
_PLUGINS_VARIABLE = "VLLM_PLUGINS"
_BLOCK_SIZE = 128

_REFUSED: Mapping[str, str] = {
    "enable_sleep_mode": "rollout and trainer have devices of their own, nothing has to sleep",
    "weight_transfer_config": "weights arrive through sluice's own worker extension",
    "worker_cls": "vllm-ascend chooses its worker",
    "attention_backend": "vllm-ascend has its own attention only",
    "kv_transfer_config": "a replica prefills and decodes by itself",
}
"""Arguments of vLLM that engine_kwargs must leave alone on an NPU, and why."""


def ascend_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Variables for vLLM's processes on an NPU, to be set before vLLM is imported.

    Args:
        given: the environment; what it sets stays, and is refused if nothing can work with it.

    Raises:
        ConfigError: a variable is set to what weight updates cannot work with.
    """
    if given.get(_NZ_VARIABLE, "0") != "0":
        raise ConfigError(
            f"{_NZ_VARIABLE}={given[_NZ_VARIABLE]}: vllm-ascend would keep weights in the NPU's "
            "own format (FRACTAL_NZ), into which new weights cannot be copied; set it to 0"
        )
    plugins = given.get(_PLUGINS_VARIABLE)
    if plugins is not None and "ascend" not in plugins.split(","):
        raise ConfigError(
            f"{_PLUGINS_VARIABLE}={plugins!r} leaves vllm-ascend out, and vLLM alone knows no NPU; "
            "add ascend to it, or unset it"
        )
    return {} if _NZ_VARIABLE in given else {_NZ_VARIABLE: "0"}


def ascend_arguments(arguments: Mapping[str, object]) -> dict[str, object]:
    """The engine's arguments as vllm-ascend takes them.

    Args:
        arguments: all of them, by vLLM's names.

    Raises:
        ConfigError: one that vllm-ascend does not have, or with which weights could not be renewed.
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
    """Weights travel as the trainer has them; vllm-ascend's formats are made offline."""
    if method is not None:
        raise ConfigError(
            f"actor_rollout_ref.rollout.quantization={method}: new weights cannot be written into "
            "vllm-ascend's quantized layers; leave it out"
        )


def _additional(given: object) -> dict[str, object]:
    """vllm-ascend's own configuration, with weights in the ordinary format."""
    key = f"{_KWARGS}.additional_config"
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{key} is {given!r}; give a mapping of vllm-ascend's keys")
    chosen: dict[str, object] = {str(name): value for name, value in (given or {}).items()}
    if chosen.get("weight_nz_mode", 0) != 0:
        raise ConfigError(
            f"{key}.weight_nz_mode={chosen['weight_nz_mode']}: new weights cannot be copied into "
            "that format; set it to 0, or leave it out"
        )
    return {**chosen, "weight_nz_mode": 0}
