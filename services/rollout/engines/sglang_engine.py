"""SGLang behind the engine Protocol.

SGLang's client runs in a thread with an event loop of its own; its scheduler is a process, into
which `sglang_features` brings the sampler. New weights are received here, in the replica's process,
and handed over as a checkpoint in memory. This file is what the service's event loop sees of them.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from services.rollout.engines.checkpoint_layout import CheckpointLayout
from services.rollout.engines.chunk_stream import ChunkStream
from services.rollout.engines.client_thread import ClientThread
from services.rollout.engines.protocol import (
    CommitResult,
    EngineLoad,
    GenerationRequest,
    PauseMode,
    SampleChunk,
    StagedVersion,
    TokenBooks,
    num_tokens,
)
from services.rollout.engines.request_rules import check_request
from services.rollout.engines.sglang_core import SglangCore
from services.rollout.engines.sglang_features import installed_sglang
from services.rollout.engines.sglang_handover import WeightHandover
from services.rollout.engines.sglang_request import Pace
from services.rollout.engines.sglang_settings import SglangSettings, sglang_settings
from services.rollout.engines.state_clock import EngineState, StateClock
from services.rollout.engines.weight_inbox import WeightInbox
from sluice.config.run import RunConfig
from sluice.device.select import transfer_device
from sluice.errors import (
    ConfigError,
    EngineError,
    ExhaustedError,
    InvalidRequestError,
    NotReadyError,
)
from sluice.telemetry.process_age import process_age_s
from sluice.types import TensorSpec, TransferGroupSpec

if TYPE_CHECKING:
    import torch

__all__ = ["SglangEngine", "create"]

_PROBE_TIMEOUT_S = 60.0


def create(config: RunConfig) -> SglangEngine:
    """The engine for a run configuration.

    Raises:
        ConfigError: SGLang is not installed, or keys contradict each other.
    """
    if installed_sglang() is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name is 'sglang', but SGLang is not installed here; install "
            "sglang 0.5.23 beside sluice, in an environment of its own (it needs another torch "
            "than vLLM does), or set actor_rollout_ref.rollout.name=torch"
        )
    return SglangEngine(sglang_settings(config))


class SglangEngine:
    """See `services.rollout.engines.protocol.Engine`."""

    def __init__(self, settings: SglangSettings) -> None:
        self._settings = settings
        self._layout: CheckpointLayout | None = None
        self._thread: ClientThread | None = None
        self._core: SglangCore | None = None
        self._inbox: WeightInbox | None = None
        self._epoch: int | None = None
        self._handover: WeightHandover | None = None
        self._swap: tuple[tuple[int, str], Future[float]] | None = None  # of (version, digest)
        self._numbers = itertools.count()
        self._open_samples = 0
        self._unfinished: set[ChunkStream] = set()
        self._books = TokenBooks()
        self._clock = StateClock(process_age_s())
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @property
    def books(self) -> TokenBooks:
        """What became of the tokens that calls got out of this engine."""
        return self._books

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._described().vocab_size

    @property
    def max_model_len(self) -> int:
        """Prompt plus response tokens a sample may have."""
        return self._settings.max_model_len

    @property
    def weight_layout(self) -> Sequence[TensorSpec]:
        """The weights the engine expects, in the order of the wire."""
        return self._described().tensors

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed so far, those of the prefix cache not among them."""
        return self._in_thread()[1].prefilled_tokens

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of the processes that SGLang computes in."""
        return self._in_thread()[1].processes

    async def running_samples(self) -> int:
        """Samples that SGLang's scheduler held when it last published its load."""
        thread, core = self._in_thread()
        return await thread.call(core.running_samples(), "asking for its load")

    def _described(self) -> CheckpointLayout:
        if self._layout is None:
            raise NotReadyError("the SGLang engine was not started")
        return self._layout

    async def start(self) -> None:
        """Starts SGLang without weights. Raises ConfigError for a path that holds no model."""
        settings = self._settings
        _survive_quit_signals()
        thread = ClientThread("SGLang")
        try:
            core = await thread.call(SglangCore.build(settings), "starting")
        except BaseException:
            await thread.stop()
            raise
        self._thread, self._core, self._layout = thread, core, core.layout
        wire = transfer_device(settings.device, settings.weights_backend)
        self._inbox = WeightInbox(wire, core.layout.tensors, {})

    async def stop(self) -> None:
        """Aborts what runs and frees everything. Repeating it is harmless."""
        thread, core, inbox = self._thread, self._core, self._inbox
        self._thread = self._core = self._inbox = None
        self._drop_handover()
        if inbox is not None:
            inbox.close()
        if thread is None or core is None:
            return
        try:
            await thread.call(core.close(), "ending")
        finally:
            for stream in list(self._unfinished):
                stream.fail(EngineError("the SGLang engine was stopped"))
            await thread.stop()

    def _in_thread(self) -> tuple[ClientThread, SglangCore]:
        if self._core is None or self._thread is None:
            raise NotReadyError("the SGLang engine is not running")
        if self._core.broken is not None:
            raise self._core.broken
        return self._thread, self._core

    async def probe(self) -> EngineLoad:
        """Answers from inside the engine's loop, so that a hung engine does not answer."""
        thread, core = self._in_thread()
        await thread.call(core.pulse(_PROBE_TIMEOUT_S), "ending a step")
        return self.load()

    def load(self) -> EngineLoad:
        """The latest snapshot, without waiting.

        Raises:
            EngineError: the engine broke.
            NotReadyError: it was stopped.
        """
        _, core = self._in_thread()
        sent, unsent, generated = self._books.sent, self._books.unsent, core.generated_tokens
        busy = min(self._open_samples, self._settings.slots)
        since = 0.0 if self._busy_since is None else time.monotonic() - self._busy_since
        return EngineLoad(
            slots=self._settings.slots,
            slots_busy=busy,
            queued=self._open_samples - busy,
            generated_tokens=generated,
            unsent_tokens=unsent,
            running_tokens=generated - unsent - sent,
            busy_seconds=self._busy_s + since,
            seconds_by_state=self._clock.seconds_by_state(),
            version=core.version,
            weight_digest=core.digest,
        )

    async def generate(
        self,
        request: GenerationRequest,
        *,
        every_token: bool,
        partial_interval_s: float | None = None,
    ) -> AsyncGenerator[tuple[SampleChunk, ...], None]:
        """Draws the samples; see the protocol."""
        thread, core = self._admit(request)
        samples = len(request.sample_indexes)
        stream = ChunkStream(thread, samples)
        run = core.new_run(
            next(self._numbers), request, Pace(every_token, partial_interval_s), stream.post
        )
        self._unfinished.add(stream)
        self._count_open(samples)
        thread.begin(core.run(run, stream))
        yielded = 0
        try:
            while stream.open_samples:
                chunks = await stream.next()
                yielded += num_tokens(chunks)
                request.tokens.yielded += num_tokens(chunks)
                yield chunks
        finally:
            self._count_open(-samples)
            self._unfinished.discard(stream)
            await self._end(thread, core, stream)
            self._books.unsent += run.drawn - yielded

    async def _end(self, thread: ClientThread, core: SglangCore, stream: ChunkStream) -> None:
        if stream.has_ended or self._thread is not thread:
            return
        thread.begin(core.cancel(stream))
        await stream.wait_until_ended()

    def _admit(self, request: GenerationRequest) -> tuple[ClientThread, SglangCore]:
        thread, core = self._in_thread()
        settings = self._settings
        if core.version is None:
            raise NotReadyError("the SGLang engine has no weights yet")
        check_request(request, self.vocab_size, settings.max_model_len)
        if request.images:
            raise InvalidRequestError(
                f"request {request.request_id}: {len(request.images)} images; replicas with SGLang "
                "take text only: set actor_rollout_ref.rollout.name to vllm or torch"
            )
        wanted = self._open_samples + len(request.sample_indexes)
        if wanted > settings.slots + settings.max_queued:
            raise ExhaustedError(
                f"request {request.request_id}: {wanted} samples would be under way; the engine "
                f"takes {settings.slots} in slots and {settings.max_queued} waiting: try later"
            )
        return thread, core

    def _count_open(self, change: int) -> None:
        self._open_samples += change
        if self._open_samples and self._busy_since is None:
            self._busy_since = time.monotonic()
        elif not self._open_samples and self._busy_since is not None:
            self._busy_s += time.monotonic() - self._busy_since
            self._busy_since = None
        self._enter_state()

    def _enter_state(self) -> None:
        self._clock.enter(EngineState.GENERATING if self._open_samples else EngineState.IDLE)

    async def pause(self, mode: PauseMode) -> None:
        """Draws no token from its return until `resume`; see the protocol."""
        thread, core = self._in_thread()
        await thread.call(core.pause(mode), f"pausing ({mode})")

    async def resume(self) -> None:
        """Draws on."""
        thread, core = self._in_thread()
        await thread.call(core.resume(), "going on after a pause")

    def _weights(self) -> WeightInbox:
        self._in_thread()
        if self._inbox is None:
            raise NotReadyError("the SGLang engine is not running")
        return self._inbox

    async def join_group(self, spec: TransferGroupSpec) -> str:
        """Joins one epoch's transfer group, leaving any earlier one; returns the plan's digest."""
        inbox = self._weights()
        self._drop_handover()
        self._epoch = spec.epoch
        return await inbox.join(spec)

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        """Receives one version while generation goes on, and lays it out for SGLang."""
        inbox = self._weights()
        self._drop_handover()
        staged = await inbox.stage(epoch, version)
        tensors = inbox.staged(epoch, version, staged.digest).tensors
        handover = await _handed_over(tensors)
        try:
            inbox.staged(epoch, version, staged.digest)
        except BaseException:
            handover.close()
            raise
        self._drop_handover()
        self._handover = handover
        return staged

    async def commit(self, epoch: int, version: int, digest: str) -> CommitResult:
        """Swaps the staged version in between two decode steps. Idempotent."""
        thread, core = self._in_thread()
        if (core.version, core.digest) == (version, digest):
            return CommitResult(version, digest, 0.0)
        inbox = self._weights()
        staged = inbox.staged(epoch, version, digest)
        handover, self._handover = self._handover, None
        if handover is not None:
            swap = thread.begin(core.swap(str(handover.folder), version, digest))
            swap.add_done_callback(lambda _: handover.close())
            self._swap = (version, digest), swap
        elif self._swap is not None and self._swap[0] == (version, digest):
            swap = self._swap[1]  # begun by a call that was cancelled
        else:
            raise NotReadyError(f"version {version} is not staged")
        self._clock.enter(EngineState.SWAPPING)
        try:
            # Not to be cancelled half-way: the model would be a mixture of versions.
            stall_s = await asyncio.shield(asyncio.wrap_future(swap))
        finally:
            self._enter_state()
        inbox.release(staged)
        return CommitResult(version, digest, stall_s)

    async def abort_update(self, epoch: int, reason: str) -> None:
        """Throws away what is staged and leaves the group. Idempotent."""
        if epoch == self._epoch:
            self._drop_handover()
        self._weights().abort(epoch, reason)

    def _drop_handover(self) -> None:
        handover, self._handover = self._handover, None
        if handover is not None:
            handover.close()


async def _handed_over(tensors: Mapping[str, torch.Tensor]) -> WeightHandover:
    """Made in a thread; what it makes for a call that was cancelled meanwhile is closed."""
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
    """A process of SGLang that fails sends one; that it has ended is noticed anyway."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
        signal.signal(signal.SIGQUIT, lambda *_: None)
