"""The code that sluice adds to each worker process of a vendor's engine: receive weights, check
them, and load them into the model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Protocol, TypeVar

import msgspec
import torch

from services.rollout.engines.causal_lm import build_causal_lm
from services.rollout.engines.protocol import StagedVersion
from services.rollout.engines.vendor_engines.share_recorder import (
    AsInFiles,
    ShareLoading,
    checkpoint_names,
)
from services.rollout.engines.vendor_engines.worker_group import WorkerBegin
from services.rollout.engines.weight_inbox import WeightInbox
from sluice.device.select import transfer_device
from sluice.errors import SluiceError, WeightSyncError
from sluice.types import TensorSpec, TransferGroupSpec
from sluice.weight_share import WeightShare

Outcome = dict[str, object]
_T = TypeVar("_T")
_SENDER = "trainer"


class ModelLoader(Protocol):
    """The vendor's model in one of its processes."""

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights of the model, given by their names in a checkpoint."""
        ...

    def share(self, tensors: Sequence[TensorSpec], as_in_files: AsInFiles) -> WeightShare:
        """Return which part of the weights `load` reads here.

        Args:
            tensors: the weights on the wire.
            as_in_files: converts them to the form that `load` expects.
        """
        ...


def rank_in_group(spec: TransferGroupSpec, worker_rank: int) -> TransferGroupSpec:
    """Return the spec of one worker: a replica's workers take consecutive ranks.

    Raises:
        WeightSyncError: the group has no rank for it.
    """
    if worker_rank >= spec.ranks:
        raise WeightSyncError(
            _SENDER,
            f"joining epoch {spec.epoch}",
            f"the group has {spec.ranks} rank(s) for this replica and none for its worker "
            f"{worker_rank}; run the same version of sluice on both ends",
        )
    return spec.of_worker(worker_rank)


class WeightWorker:
    """Methods that `worker_group.WorkerGroup` calls by name, with plain values.

    The worker's loop samples tokens. Only `sluice_apply` blocks it, and is called while nothing is
    sampled.
    """

    sluice_model: ModelLoader | None = None
    sluice_inbox: WeightInbox | None = None
    sluice_call: Future[str] | Future[StagedVersion] | None = None
    sluice_reported: Future[str] | Future[StagedVersion] | None = None
    sluice_loading: ShareLoading | None = None
    rank: int
    device: torch.device | None

    def sluice_find_model(self) -> ModelLoader:
        """Return the vendor's model here.

        Raises:
            ConfigError: this version of the vendor's engine lacks what is needed.
        """
        raise NotImplementedError

    def sluice_forming(self) -> AbstractContextManager[object]:
        """Return the context to enter while a group with other processes is formed."""
        return nullcontext()

    def sluice_begin(self, begin: bytes) -> Outcome:
        """Prepare for weights; `begin` is a `WorkerBegin`, JSON.

        Returns:
            `share`, the weights that this worker takes; or `error` and `kind`, for example if this
            version of the vendor's engine lacks a feature that sluice needs.
        """
        reported = msgspec.json.decode(begin, type=WorkerBegin)
        try:
            return {"share": msgspec.to_builtins(_begin(self, reported))}
        except SluiceError as error:
            return _failure(error)

    def sluice_process(self) -> int:
        """Return the id of this worker's process."""
        return os.getpid()

    def sluice_join(self, spec: bytes) -> Outcome:
        """Begin to join; `spec` is a `TransferGroupSpec` in msgpack."""
        decoded = msgspec.msgpack.decode(spec, type=TransferGroupSpec)

        def join() -> None:
            self.sluice_call = _require_begun(self.sluice_inbox).join(
                rank_in_group(decoded, self.rank)
            )

        return _run_and_report(join)

    def sluice_stage(self, version: int) -> Outcome:
        """Begin to receive a version."""

        def stage() -> None:
            inbox = _require_begun(self.sluice_inbox)
            self.sluice_call = inbox.stage(inbox.epoch, version)

        return _run_and_report(stage)

    def sluice_outcome(self) -> Outcome | None:
        """Return how the last join or stage ended; ``None`` while it runs, and after its result.

        The result is `plan_digest`, or the fields of a `StagedVersion`, which are many: only one
        call returns it. A failure is `error` (the sentence) and `kind` (the class).
        """
        call = self.sluice_call
        if call is None:
            return {"error": "nothing was begun", "kind": WeightSyncError.__name__}
        if not call.done():
            return None
        error = call.exception()
        if error is not None:
            return _failure(error)
        if call is self.sluice_reported:
            return None
        self.sluice_reported = call
        result = call.result()
        return {"plan_digest": result} if isinstance(result, str) else asdict(result)

    def sluice_check_staged(self, version: int) -> Outcome:
        """Check that `sluice_apply` can begin; change nothing."""
        inbox = _require_begun(self.sluice_inbox)
        return _run_and_report(lambda: inbox.staged_weights(inbox.epoch, version))

    def sluice_apply(self, version: int) -> Outcome:
        """Make the model compute with the staged weights; call it only while nothing is sampled.

        Returns:
            `seconds`; or `error` and `kind`, with `broken` if the model is a mixture of versions.
        """
        inbox = _require_begun(self.sluice_inbox)
        try:
            staged = inbox.staged_weights(inbox.epoch, version)
        except SluiceError as error:
            return _failure(error)
        npu = self.device if self.device is not None and self.device.type == "npu" else None
        started = time.perf_counter()
        try:
            # vllm-ascend's reload uses the default device; others name theirs.
            with npu or nullcontext():
                weights = _require_begun(self.sluice_loading).tensors(staged)
                _require_begun(self.sluice_model).load(weights)
            if npu is not None:  # the next version overwrites the memory that the NPU copies from
                torch.get_device_module(npu).synchronize()
        except Exception as error:  # noqa: BLE001 - crosses a process: the engine is broken by it
            return {"error": repr(error), "kind": "EngineError", "broken": True}
        inbox.release(staged)
        return {"seconds": time.perf_counter() - started}

    def sluice_abort(self, reason: str) -> None:
        """Discard the staged weights and leave the epoch."""
        _require_begun(self.sluice_inbox).leave(reason)

    def sluice_close(self) -> None:
        """Leave the group permanently."""
        _require_begun(self.sluice_inbox).close()


def _begin(worker: WeightWorker, reported: WorkerBegin) -> WeightShare:
    worker.sluice_model = model = worker.sluice_find_model()
    wire = transfer_device(_own_device(reported.device, worker.device), reported.backend)
    described = build_causal_lm(
        reported.model_path,
        torch.device("meta"),
        trust_remote_code=reported.trust_remote_code,
    )
    in_files = checkpoint_names(described.model)
    tensors = reported.tensors
    share = model.share(tensors, in_files)
    worker.sluice_loading = ShareLoading(tensors, share, in_files)
    worker.sluice_inbox = WeightInbox(wire, share=share, forming=worker.sluice_forming)
    return share


def _require_begun(part: _T | None) -> _T:
    if part is None:
        raise RuntimeError("sluice_begin was not called")
    return part


def _own_device(kind: str | None, device: torch.device | None) -> str | None:
    """Return the worker's own device, one of several that it may see."""
    index = None if device is None or device.type != kind else device.index
    return kind if index is None else f"{kind}:{index}"


def _run_and_report(call: Callable[[], object]) -> Outcome:
    try:
        call()
    except SluiceError as error:
        return _failure(error)
    return {}


def _failure(error: BaseException) -> Outcome:
    """Return an error in the form that crosses to the engine's process."""
    if isinstance(error, SluiceError):
        return {"error": str(error), "kind": type(error).__name__}
    return {"error": repr(error), "kind": WeightSyncError.__name__}
