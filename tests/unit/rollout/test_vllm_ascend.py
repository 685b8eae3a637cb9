"""What vLLM gets otherwise on an NPU, and what is refused there."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest
import torch

from services.rollout.engines.causal_lm import CheckpointLayout
from services.rollout.engines.vllm import engine
from services.rollout.engines.vllm.settings import (
    WORKER_EXTENSION,
    VllmSettings,
    ascend_arguments,
    ascend_environment,
)
from sluice.errors import ConfigError


class _Npu:
    name = "npu:0"
    torch_device = SimpleNamespace(type="npu")
    visible_devices_variable = "ASCEND_RT_VISIBLE_DEVICES"


class _Cpu:
    name = "cpu"
    torch_device = torch.device("cpu")
    visible_devices_variable = None


_PLAIN = VllmSettings(model_path="model", device="npu", dtype="bfloat16")


def test_weights_stay_in_the_format_that_updates_can_write() -> None:
    assert ascend_environment({}) == {"VLLM_ASCEND_ENABLE_NZ": "0"}
    arguments = ascend_arguments(_PLAIN.engine_arguments(on_cpu=False))
    assert arguments["additional_config"] == {"weight_nz_mode": 0}


def test_what_is_set_stays() -> None:
    given = {"VLLM_ASCEND_ENABLE_NZ": "0"}
    assert ascend_environment(given) == {}


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"VLLM_ASCEND_ENABLE_NZ": "1"}, "VLLM_ASCEND_ENABLE_NZ=1.*set it to 0"),
        ({"VLLM_PLUGINS": "lora"}, "VLLM_PLUGINS='lora'.*add ascend"),
    ],
)
def test_a_variable_that_updates_cannot_work_with_is_refused(
    given: dict[str, str], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        ascend_environment(given)


def test_the_worker_extension_is_the_same_as_elsewhere() -> None:
    arguments = ascend_arguments(_PLAIN.engine_arguments(on_cpu=False))
    assert arguments["worker_extension_cls"] == WORKER_EXTENSION
    assert "worker_cls" not in arguments
    assert arguments["dtype"] == "bfloat16"


def test_other_keys_of_vllm_ascends_configuration_travel() -> None:
    given = {"additional_config": {"enable_cpu_binding": False, "weight_nz_mode": 0}}
    assert ascend_arguments(given)["additional_config"] == {
        "enable_cpu_binding": False,
        "weight_nz_mode": 0,
    }


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"enable_sleep_mode": True}, "enable_sleep_mode cannot be set on an NPU"),
        ({"weight_transfer_config": {"backend": "hccl"}}, "sluice's own worker extension"),
        ({"worker_cls": "mine.Worker"}, "vllm-ascend chooses its worker"),
        ({"attention_backend": "FLASH_ATTN"}, "its own attention"),
        ({"dtype": "float32"}, "dtype=float32.*set bfloat16"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype=fp8_e4m3.*leave it out"),
        ({"quantization": "ascend"}, "quantization=ascend"),
        ({"enable_prefix_caching": True, "block_size": 32}, "block_size=32.*128"),
        ({"additional_config": {"weight_nz_mode": 2}}, "weight_nz_mode=2.*set it to 0"),
        ({"additional_config": "fast"}, "give a mapping"),
    ],
)
def test_an_argument_that_vllm_ascend_cannot_take_is_named_with_the_remedy(
    arguments: dict[str, object], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        ascend_arguments(arguments)


def test_arguments_that_are_off_are_no_reason_to_refuse() -> None:
    assert ascend_arguments({"enable_sleep_mode": False, "block_size": 64})["block_size"] == 64


@pytest.mark.parametrize(("device", "is_npu"), [(_Npu(), True), (_Cpu(), False)])
def test_only_on_an_npu_vllm_starts_with_what_vllm_ascend_needs(
    device: object, is_npu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {name: text for name, text in os.environ.items() if "ASCEND" not in name}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(engine, "select_device", lambda _: device)
    described = SimpleNamespace(layout=CheckpointLayout(9, (), ()), image_prompts=None)
    monkeypatch.setattr(engine, "described_model", lambda _: described)

    class Refuses:
        def __init__(self, arguments: dict[str, object], **_: object) -> None:
            given.append(arguments)
            raise ConfigError("seen")

    given: list[dict[str, object]] = []
    monkeypatch.setattr(engine, "VllmClient", Refuses)
    with pytest.raises(ConfigError, match="seen"):
        asyncio.run(engine.VllmCore.build(_PLAIN))
    assert ("additional_config" in given[0]) is is_npu
    assert ("VLLM_ASCEND_ENABLE_NZ" in environment) is is_npu
