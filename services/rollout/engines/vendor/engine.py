"""An engine whose client lives in a thread of its own: what the engines of all vendors share.

The service's event loop calls this module; `core` and `request` run in the client's event loop.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any, Generic, TypeVar

from services.rollout.engines.causal_lm import CheckpointLayout
from services.rollout.engines.chunk_stream import ChunkStream
from services.rollout.engines.protocol import (
    CommitResult,
    EngineLoad,
    GenerationRequest,
    PauseMode,
    SampleChunk,
    UnsentTokens,
    num_tokens,
)
from services.rollout.engines.request_rules import ImageTurn, check_capacity, check_request
from services.rollout.engines.state_clock import EngineState, StateClock
from services.rollout.engines.vendor.core import VendorCore
from services.rollout.engines.vendor.request import Pace, PromptImages, RequestRun
from services.rollout.engines.vendor.settings import ClientEngineSettings
from services.rollout.engines.vendor.thread import ClientThread
from sluice.errors import EngineError, NotReadyError
from sluice.telemetry.process import process_age_s
from sluice.types import TensorSpec

_END_TIMEOUT_S = 30.0
_PROBE_TIMEOUT_S = 60.0

CoreT = TypeVar("CoreT", bound=VendorCore)


class ClientEngine(ABC, Generic[CoreT]):
    """All of `services.rollout.engines.protocol.Engine` but starting and receiving weights.

    Args:
        name: of the engine, for messages.
    """

    def __init__(self, name: str, settings: ClientEngineSettings) -> None:
        self._name = name
        self._limits = settings
        self._layout: CheckpointLayout | None = None
        self._thread: ClientThread | None = None
        self._core: CoreT | None = None
        self._numbers = count()
        self._open_samples = 0
        self._image_turn = ImageTurn()
        self._unfinished: set[ChunkStream] = set()
        self._accounting = UnsentTokens()
        self._clock = StateClock(process_age_s())
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @property
    def accounting(self) -> UnsentTokens:
        """What became of the tokens that calls got out of this engine."""
        return self._accounting

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._described().vocab_size

    @property
    def max_model_len(self) -> int:
        """Prompt plus response tokens a sample may have."""
        return self._limits.max_model_len

    @property
    def weight_layout(self) -> Sequence[TensorSpec]:
        """The weights the engine expects, in the order of the wire."""
        return self._described().tensors

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed so far, without those from the prefix cache."""
        return self._in_thread()[1].prefilled_tokens

    def _described(self) -> CheckpointLayout:
        if self._layout is None:
            raise NotReadyError(f"the {self._name} engine was not started")
        return self._layout

    async def _build(self, core: Coroutine[Any, Any, CoreT]) -> CoreT:
        """Start the thread, and in it the core."""
        thread = ClientThread(self._name)
        try:
            built = await thread.call(core, "starting")
        except BaseException:
            await thread.stop()
            raise
        self._thread = thread
        self._core = built
        self._layout = built.layout
        return built

    async def stop(self) -> None:
        """Abort what runs and free everything. Repeating it is harmless."""
        thread, core = self._thread, self._core
        self._thread = self._core = None  # at once: calls that come meanwhile are refused
        if thread is None or core is None:
            return
        try:
            await thread.call(core.close(), "ending")
        finally:
            for stream in list(self._unfinished):
                stream.fail(EngineError(f"the {self._name} engine was stopped"))
            await thread.stop()

    def _in_thread(self) -> tuple[ClientThread, CoreT]:
        if self._core is None or self._thread is None:
            raise NotReadyError(f"the {self._name} engine is not running")
        if self._core.broken is not None:
            raise self._core.broken
        return self._thread, self._core

    async def probe(self) -> EngineLoad:
        """Ask the loop that computes tokens, so that a hung engine does not answer."""
        thread, core = self._in_thread()
        await thread.call(core.heartbeat(_PROBE_TIMEOUT_S), "ending a step")
        return self.load()

    def load(self) -> EngineLoad:
        """Return the latest snapshot, without waiting.

        Raises:
            EngineError: the engine broke.
            NotReadyError: it was stopped.
        """
        _, core = self._in_thread()
        busy = min(self._open_samples, self._limits.slots)
        since = 0.0 if self._busy_since is None else time.monotonic() - self._busy_since
        return EngineLoad(
            slots=self._limits.slots,
            slots_busy=busy,
            queued=self._open_samples - busy,
            **self._accounting.token_counters(core.generated_tokens),
            busy_seconds=self._busy_s + since,
            seconds_by_state=self._clock.seconds_by_state(),
            version=core.version,
            weight_digest=core.digest,
            slots_may_wait=True,
        )

    async def generate(
        self,
        request: GenerationRequest,
        *,
        every_token: bool,
        partial_interval_s: float | None = None,
    ) -> AsyncGenerator[tuple[SampleChunk, ...], None]:
        """Sample a request; see `Engine.generate`."""
        self._admit(request)
        images = await self._read_images(request)
        if images is not None:
            self._admit(request)  # the engine may have stopped meanwhile
        thread, core = self._in_thread()
        samples = len(request.sample_indexes)
        stream = ChunkStream(thread.engine, samples, thread.to_home)
        pace = Pace(every_token, partial_interval_s)
        run = core.new_run(next(self._numbers), request, pace, stream, images)
        self._unfinished.add(stream)
        self._count_open(samples)
        thread.begin(core.run(run))
        yielded = 0  # by this call alone; `request.tokens` belongs to the caller
        try:
            while stream.open_samples:
                chunks = await stream.next()
                yielded += num_tokens(chunks)
                request.tokens.yielded += num_tokens(chunks)
                yield chunks
        finally:
            self._count_open(-samples)
            self._unfinished.discard(stream)
            # Once the run has ended no other thread counts its tokens any more.
            await self._end(thread, core, run)
            self._accounting.of(request).unsent += run.sampled - yielded

    def _admit(self, request: GenerationRequest) -> None:
        """Refuse what cannot be sampled at present."""
        _, core = self._in_thread()
        limits = self._limits
        if core.version is None:
            raise NotReadyError(f"the {self._name} engine has no weights yet")
        check_request(request, self.vocab_size, limits.max_model_len)
        # Samples whose images are being read will be open soon.
        coming = self._open_samples + self._image_turn.samples
        check_capacity(request, coming, limits.slots, limits.max_queued)

    @abstractmethod
    async def _read_images(self, request: GenerationRequest) -> PromptImages | None:
        """Return the images of a request; ``None`` if it has none."""

    async def _end(self, thread: ClientThread, core: CoreT, run: RequestRun) -> None:
        """Abort what is left of a request, and wait until the vendor has."""
        if run.stream.has_ended or self._thread is not thread:
            return
        thread.begin(core.cancel(run))
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await run.stream.wait_until_ended()
        except TimeoutError:
            core.note_broken(
                EngineError(
                    f"{self._name}: samples were not aborted within {_END_TIMEOUT_S:g} s; restart "
                    "the replica"
                )
            )

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
        """Sample no token from its return until `resume`; see the protocol."""
        thread, core = self._in_thread()
        await thread.call(core.pause(mode), f"pausing ({mode})")

    async def resume(self) -> None:
        """Sample again."""
        thread, core = self._in_thread()
        await thread.call(core.resume(), "resuming after a pause")

    async def commit(self, epoch: int, version: int, digest: str) -> CommitResult:
        """Swap the staged version in between two decode steps. Idempotent."""
        thread, core = self._in_thread()
        if (core.version, core.digest) == (version, digest):
            # The swap of a cancelled call may not have resumed sampling yet.
            await thread.call(core.swapped(), f"resuming with version {version}")
            return CommitResult(version, digest, 0.0)
        return CommitResult(version, digest, await self._swap(epoch, version, digest))

    @abstractmethod
    async def _swap(self, epoch: int, version: int, digest: str) -> float:
        """Swap the staged version in; return the seconds without a token."""

    async def _completed(self, swap: Future[float]) -> float:
        """Return the result of a swap; the time until then counts as swapping."""
        self._clock.enter(EngineState.SWAPPING)
        try:
            # A swap that is cancelled half-way would leave a mixture of versions.
            return await asyncio.shield(asyncio.wrap_future(swap))
        finally:
            self._enter_state()
