"""SGLang behind the engine Protocol.

SGLang's client runs in the thread of the engine; SGLang's scheduler is a process, and
`sglang.client` brings the sampler into it. New weights are received here, in the replica's process,
and handed over as a checkpoint in memory. This module is what the service's event loop sees of
them.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import torch

from services.rollout.engines.protocol import (
    GenerationRequest,
    StagedVersion,
)
from services.rollout.engines.sglang.client import installed_sglang
from services.rollout.engines.sglang.core import SglangCore
from services.rollout.engines.sglang.settings import SglangSettings, sglang_settings
from services.rollout.engines.threaded_engine import InboxEngine
from sluice.config.run import RunConfig
from sluice.errors import InvalidRequestError, MissingPackageError, NotReadyError
from sluice.types import TransferGroupSpec

_ALIGNMENT = 8
_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(descriptor: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors on the CPU into an open file, in the format safetensors.

    Raises:
        OSError: there is no space.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    # The format allows spaces after the header; tensors then begin at aligned offsets.
    text += b" " * (-len(text) % _ALIGNMENT)
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


class WeightHandover:
    """A folder that holds one version; close it.

    Args:
        tensors: on the CPU, by checkpoint name; copied.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._descriptor = os.memfd_create("sluice-weights")
        self.folder = Path(tempfile.mkdtemp(prefix="sluice-weights-"))
        try:
            write_safetensors(self._descriptor, tensors)
            link = self.folder / "model.safetensors"
            link.symlink_to(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the memory, as soon as nothing reads it. Repeating it is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            shutil.rmtree(self.folder, ignore_errors=True)


def create(config: RunConfig) -> SglangEngine:
    """Return the engine for a run configuration.

    Raises:
        ConfigError: SGLang is not installed, or keys contradict each other.
    """
    if installed_sglang() is None:
        raise MissingPackageError(
            "actor_rollout_ref.rollout.name is 'sglang', but SGLang is not installed here; install "
            "sglang 0.5.23 beside sluice, in an environment of its own (it needs another torch "
            "than vLLM does), or set actor_rollout_ref.rollout.name=torch"
        )
    return SglangEngine(sglang_settings(config))


class SglangEngine(InboxEngine[SglangCore]):
    """See `services.rollout.engines.protocol.Engine`."""

    def __init__(self, settings: SglangSettings) -> None:
        super().__init__("SGLang", settings)
        self._settings = settings
        self._handover: WeightHandover | None = None
        self._begun: tuple[tuple[int, str], Future[float]] | None = None  # (version, digest), swap

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of the processes that SGLang computes in."""
        return self._in_thread()[1].client.processes

    async def running_samples(self) -> int:
        """Return the samples that SGLang's scheduler held when it last published its load."""
        thread, core = self._in_thread()
        return await thread.call(core.client.running_samples(), "asking for its load")

    async def start(self) -> None:
        """Start SGLang without weights. Raises ConfigError for a path that holds no model."""
        _survive_quit_signals()
        await self._build(SglangCore.build(self._settings))
        self._open_inbox()

    async def stop(self) -> None:
        """Abort what runs and free everything. Repeating it is harmless."""
        self._drop_handover()
        await super().stop()

    async def _read_images(self, request: GenerationRequest) -> None:
        if request.images:
            raise InvalidRequestError(
                f"request {request.request_id}: {len(request.images)} images; replicas with SGLang "
                "take text only: set actor_rollout_ref.rollout.name to vllm or torch"
            )

    async def join_group(self, spec: TransferGroupSpec) -> str:
        """Join one epoch's transfer group, leaving any earlier one; return the plan's digest."""
        self._drop_handover()
        return await super().join_group(spec)

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        """Receive one version while generation continues, and lay it out for SGLang."""
        inbox = self._weights()
        self._drop_handover()
        staged = await super().stage(epoch, version)
        tensors = inbox.staged(epoch, version, staged.digest).tensors
        handover = await _handed_over(tensors)
        try:  # the epoch may have been left while the weights were laid out
            inbox.staged(epoch, version, staged.digest)
        except BaseException:
            handover.close()
            raise
        self._drop_handover()
        self._handover = handover
        return staged

    async def _swap(self, epoch: int, version: int, digest: str) -> float:
        thread, core = self._in_thread()
        inbox = self._weights()
        staged = inbox.staged(epoch, version, digest)
        handover, self._handover = self._handover, None
        if handover is not None:
            swap = thread.begin(core.swap(str(handover.folder), version, digest))
            # Not at the end of this call, which may be cancelled while SGLang still reads.
            swap.add_done_callback(lambda _: handover.close())
            self._begun = (version, digest), swap
        elif self._begun is not None and self._begun[0] == (version, digest):
            swap = self._begun[1]  # by a call that was cancelled
        else:
            raise NotReadyError(f"version {version} is not staged")
        stall_s = await self._completed(swap)
        inbox.release(staged)
        return stall_s

    async def abort_update(self, epoch: int, reason: str) -> None:
        """Discard the staged weights and leave the group. Idempotent."""
        if epoch == self._weights().epoch:
            self._drop_handover()
        await super().abort_update(epoch, reason)

    def _drop_handover(self) -> None:
        handover, self._handover = self._handover, None
        if handover is not None:
            handover.close()


async def _handed_over(tensors: Mapping[str, torch.Tensor]) -> WeightHandover:
    """Lay weights out in a thread; close what it makes for a call that was cancelled meanwhile."""
    made = asyncio.get_running_loop().run_in_executor(None, WeightHandover, tensors)
    try:
        return await asyncio.shield(made)
    except asyncio.CancelledError:
        made.add_done_callback(_close_made)
        raise


def _close_made(made: asyncio.Future[WeightHandover]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()


def _survive_quit_signals() -> None:
    """Ignore SIGQUIT, which a failing process of SGLang sends; its end is noticed anyway."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
        signal.signal(signal.SIGQUIT, lambda *_: None)
