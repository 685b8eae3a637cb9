"""What sluice adds to each of vLLM's workers; vLLM imports it by name in its own processes.

No method blocks the worker, whose loop draws the tokens, but `sluice_apply`, which is called while
nothing is drawn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeGuard, runtime_checkable

import msgspec
import torch

from services.rollout.engines.owner_watch import end_with_owner
from services.rollout.engines.vllm_checkpoint import CheckpointNames
from services.rollout.engines.vllm_dummy_weights import keep_buffers
from services.rollout.engines.vllm_staging import Outcome, WorkerStaging, rank_in_group
from services.rollout.engines.vllm_workers import WorkerBegin
from sluice.device.select import transfer_device
from sluice.errors import SluiceError
from sluice.types import TransferGroupSpec

__all__ = ["WeightWorker"]

# vLLM imports this file before it loads the model, and calls nothing before that.
keep_buffers()
end_with_owner(with_parent=True)  # vLLM's engine process need not have imported anything of ours


class _LayerMethod(Protocol):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None: ...


@runtime_checkable
class _ExpertsMethod(Protocol):
    moe_kernel: object | None


class ModelRunner(Protocol):
    """What is used of vLLM's model runner."""

    requests: Mapping[str, object]

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights."""
        ...

    def get_model(self) -> torch.nn.Module:
        """The model as vLLM built it."""
        ...


class WeightWorker:
    """Methods for vLLM's ``worker_extension_cls``, called by name with plain values."""

    sluice_staging: WorkerStaging | None = None
    sluice_names: CheckpointNames | None = None
    rank: int
    device: torch.device | None
    model_runner: ModelRunner

    def sluice_begin(self, begin: bytes) -> str:
        """Prepares for weights; `begin` is a `WorkerBegin`, JSON."""
        told = msgspec.json.decode(begin, type=WorkerBegin)
        wire = transfer_device(_own_device(told.device, self.device), told.backend)
        self.sluice_names = CheckpointNames(
            told.model_path, trust_remote_code=told.trust_remote_code
        )
        self.sluice_staging = WorkerStaging(wire, told.shapes)
        return "ready"

    def sluice_pulse(self) -> int:
        """Samples that the worker holds since its last step; answers from the engine's loop."""
        return len(self.model_runner.requests)

    def sluice_process(self) -> int:
        """This worker's process."""
        return os.getpid()

    def sluice_join(self, spec: bytes) -> Outcome:
        """Begins to join; `spec` is a `TransferGroupSpec` in msgpack."""
        decoded = msgspec.msgpack.decode(spec, type=TransferGroupSpec)
        return _answered(lambda: _staging(self).join(rank_in_group(decoded, self.rank)))

    def sluice_stage(self, version: int) -> Outcome:
        """Begins to receive a version."""
        return _answered(lambda: _staging(self).stage(version))

    def sluice_outcome(self) -> Outcome | None:
        """How the last join or stage ended; ``None`` while it runs."""
        return _staging(self).outcome()

    def sluice_check_staged(self, version: int, digest: str) -> Outcome:
        """Whether `sluice_apply` could begin; changes nothing."""
        staging = _staging(self)
        return _answered(lambda: staging.staged(version, digest))

    def sluice_apply(self, version: int, digest: str) -> Outcome:
        """Has the model compute with what is staged; call it only while nothing is drawn.

        Returns:
            `seconds`; or `error` and `kind`, with `broken` if the model is a mixture of versions.
        """
        staging = _staging(self)
        try:
            staged = staging.staged(version, digest)
        except SluiceError as error:
            return {"error": str(error), "kind": type(error).__name__}
        started = time.perf_counter()
        try:
            with _loading_on(self.device):
                names = self.sluice_names
                weights = staged.tensors if names is None else names.of(staged.tensors)
                _load(self.model_runner, iter(weights.items()))
            _await(self.device)
        except Exception as error:  # noqa: BLE001 - crosses a process: the engine is broken by it
            return {"error": repr(error), "kind": "EngineError", "broken": True}
        staging.release(staged)
        return {"seconds": time.perf_counter() - started}

    def sluice_abort(self, reason: str) -> None:
        """Throws away what is staged and leaves the epoch."""
        _staging(self).abort(reason)

    def sluice_close(self) -> None:
        """Leaves the group for good."""
        _staging(self).close()


def _staging(worker: WeightWorker) -> WorkerStaging:
    if worker.sluice_staging is None:
        raise RuntimeError("sluice_begin was not called")
    return worker.sluice_staging


def _own_device(kind: str | None, device: torch.device | None) -> str | None:
    """The worker's own one of several that it may see."""
    index = None if device is None or device.type != kind else device.index
    return kind if index is None else f"{kind}:{index}"


def _answered(call: Callable[[], object]) -> Outcome:
    try:
        call()
    except SluiceError as error:
        return {"error": str(error), "kind": type(error).__name__}
    return {}


def _load(model_runner: ModelRunner, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Through vLLM's layer by layer reload, which processes each layer's weights anew.

    On the CPU a linear layer computes with a packed copy of its weight. The reload renews that of
    layers that got tensors, which an output layer tied to the embedding does not. Experts compute
    with packed weights too, but vLLM packs them only as it builds their kernel.
    """
    with torch.inference_mode():
        _forget_cpu_kernels(model_runner.get_model())
        model_runner.reload_weights(weights_iterator=weights)
        for module in model_runner.get_model().modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and _is_matrix(weight):
                method: _LayerMethod = module.quant_method  # type: ignore[assignment]
                method.process_weights_after_loading(module)


def _forget_cpu_kernels(model: torch.nn.Module) -> None:
    """Has the reload build kernels of experts anew; no graph holds their addresses on the CPU."""
    for module in model.modules():
        if isinstance(method := getattr(module, "quant_method", None), _ExpertsMethod) and (
            _is_on_cpu(getattr(module, "w13_weight", None))
        ):
            method.moe_kernel = None


def _is_on_cpu(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.device.type == "cpu"


def _loading_on(device: torch.device | None) -> AbstractContextManager[object]:
    """vllm-ascend's reload makes tensors on the default device; others name theirs."""
    return device if _is_npu(device) else nullcontext()


def _await(device: torch.device | None) -> None:
    """Until an NPU has copied what is staged: the next version is received into the same memory."""
    if _is_npu(device):
        torch.get_device_module(device).synchronize()


def _is_npu(device: torch.device | None) -> TypeGuard[torch.device]:
    return device is not None and device.type == "npu"


def _is_matrix(weight: torch.Tensor | None) -> bool:
    """Packed weights leave an empty tensor behind, but for one that is tied."""
    return weight is not None and weight.ndim == 2 and weight.numel() > 0
