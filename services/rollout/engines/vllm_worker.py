"""What sluice adds to each of vLLM's workers; vLLM imports it by name in its own processes.

No method blocks the worker, whose loop draws the tokens, but `sluice_apply`, which is called while
nothing is drawn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeGuard

import msgspec
import torch

from services.rollout.engines.owner_watch import end_with_owner
from services.rollout.engines.vllm_checkpoint import CheckpointNames
from services.rollout.engines.vllm_dummy_weights import keep_buffers
from services.rollout.engines.vllm_staging import Outcome, WorkerStaging, rank_in_group
from services.rollout.engines.vllm_worker_features import WorkerFeatures
from services.rollout.engines.vllm_workers import WorkerBegin
from sluice.device.select import transfer_device
from sluice.errors import SluiceError
from sluice.types import TransferGroupSpec

__all__ = ["WeightWorker"]

# vLLM imports this file before it loads the model, and calls nothing before that.
keep_buffers()
end_with_owner(with_parent=True)  # vLLM's engine process need not have imported anything of ours


class WeightWorker:
    """Methods for vLLM's ``worker_extension_cls``, called by name with plain values."""

    sluice_features: WorkerFeatures | None = None
    sluice_staging: WorkerStaging | None = None
    sluice_names: CheckpointNames | None = None
    rank: int
    device: torch.device | None

    def sluice_begin(self, begin: bytes) -> Outcome:
        """Prepares for weights; `begin` is a `WorkerBegin`, JSON.

        Returns:
            Nothing; or `error` and `kind`, as where this version of vLLM lacks what is needed.
        """
        reported = msgspec.json.decode(begin, type=WorkerBegin)
        return _answered(lambda: _begin(self, reported))

    def sluice_pulse(self) -> int:
        """Samples that the worker holds since its last step; answers from the engine's loop."""
        return _features(self).num_samples()

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
                _features(self).load(iter(weights.items()))
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


def _begin(worker: WeightWorker, reported: WorkerBegin) -> None:
    worker.sluice_features = WorkerFeatures(worker)
    wire = transfer_device(_own_device(reported.device, worker.device), reported.backend)
    worker.sluice_names = CheckpointNames(
        reported.model_path, trust_remote_code=reported.trust_remote_code
    )
    worker.sluice_staging = WorkerStaging(wire, reported.shapes)


def _features(worker: WeightWorker) -> WorkerFeatures:
    if worker.sluice_features is None:
        raise RuntimeError("sluice_begin was not called")
    return worker.sluice_features


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


def _loading_on(device: torch.device | None) -> AbstractContextManager[object]:
    """vllm-ascend's reload makes tensors on the default device; others name theirs."""
    return device if _is_npu(device) else nullcontext()


def _await(device: torch.device | None) -> None:
    """Until an NPU has copied what is staged: the next version is received into the same memory."""
    if _is_npu(device):
        torch.get_device_module(device).synchronize()


def _is_npu(device: torch.device | None) -> TypeGuard[torch.device]:
    return device is not None and device.type == "npu"
