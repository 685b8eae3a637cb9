"""Base classes of engines, which compute in a separate thread.

The service's event loop calls `ThreadedEngine`. Its `EngineCore` runs in the event loop of a
`LoopThread`; each engine subclasses the core.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from services.rollout.engines.causal_lm import CheckpointLayout
from services.rollout.engines.protocol import (
    EngineLoad,
    GenerationRequest,
    RequestTokens,
    SampleChunk,
    StagedVersion,
    check_capacity,
    check_request,
)
from services.rollout.engines.settings import EngineSettings
from services.rollout.engines.thread import ChunkStream, ImageTurn, LoopThread
from sluice.concurrency.process import process_age_s
from sluice.concurrency.waits import deadline
from sluice.errors import EngineError, InvalidRequestError, NotReadyError
from sluice.types import TensorSpec, TransferGroupSpec
from sluice.vision.image_prompts import ImagePromptReader
from sluice.weight_share import WeightShare

_CLOSE_TIMEOUT_S = 60.0
_LIVENESS_TIMEOUT_S = 60.0
_TRAINER = "trainer"


class EngineState(StrEnum):
    """The activity of an engine."""

    STARTING = "starting"  # until the first weights serve
    GENERATING = "generating"  # prefill and decode
    IDLE = "idle"  # nothing to run
    SWAPPING = "swapping"  # weights are swapped; no token is sampled


class StateTimer:
    """Measures a replica's time: every second of the process belongs to one state.

    One thread enters states, any thread reads.

    Args:
        elapsed_s: seconds that have passed already, counted as starting.
        now_s: a monotonic clock, seconds.
    """

    def __init__(self, elapsed_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        # Replaced as a whole, so that a reader in another thread never sees half of a change.
        self._account: tuple[EngineState, float, dict[EngineState, float]] = (
            EngineState.STARTING,
            now_s() - elapsed_s,
            {},
        )

    @property
    def state(self) -> EngineState:
        """The current state."""
        return self._account[0]

    def enter(self, state: EngineState) -> None:
        """Enter a state; nothing happens if it is the current one."""
        previous, since_s, seconds = self._account
        if state is previous:
            return
        now_s = self._now_s()
        spent = {**seconds, previous: seconds.get(previous, 0.0) + now_s - since_s}
        self._account = (state, now_s, spent)

    def seconds_by_state(self) -> Mapping[str, float]:
        """Return the seconds of every state so far, the current one included."""
        state, since_s, seconds = self._account
        totals = {str(engine_state): seconds.get(engine_state, 0.0) for engine_state in EngineState}
        totals[state] += self._now_s() - since_s
        return totals


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """When to send tokens of unfinished samples to the consumer; see `Engine.generate`."""

    every_token: bool
    interval_s: float | None


class EngineRun:
    """One request in a core.

    Attributes:
        sampled: tokens so far; the consumer reads it once the stream has ended.

    Args:
        stream: receives the chunks.
        images: the prompt's images, as the core takes them.
    """

    def __init__(
        self,
        request: GenerationRequest,
        pace: FlushPolicy,
        stream: ChunkStream,
        images: Any = None,  # noqa: ANN401 - each core's own
    ) -> None:
        self.request = request
        self.pace = pace
        self.stream = stream
        self.images = images
        self.sampled = 0


RunT = TypeVar("RunT", bound=EngineRun)


class CoreCounts(Protocol):
    """The serving version and counters; other threads may read them.

    Attributes:
        version: the policy version that serves; ``None`` before the first weights.
        digest: of its weights.
        generated_tokens: response tokens sampled so far.
        prompt_tokens: prompt tokens of samples that began so far, if the engine counts them.
        reused_tokens: those of `prompt_tokens` that came from a prefix cache.
    """

    version: int | None
    digest: str
    generated_tokens: int
    prompt_tokens: int
    reused_tokens: int


class EngineCore(ABC, Generic[RunT]):
    """Computes tokens with the weights that it serves.

    The event loop of its thread calls the methods; other threads may read the properties.

    Args:
        layout: the layout of the model's checkpoint.
        image_prompts: prepares images for the model; ``None`` if it takes none.
    """

    name: ClassVar[str]
    """The engine, for messages."""
    slots_may_wait: ClassVar[bool]
    """See `EngineLoad`."""
    counts: CoreCounts
    weight_shares: Sequence[WeightShare] = ()
    """See `Engine`."""
    is_asleep = False
    """Whether it sleeps, or may be half asleep; other threads may read it."""
    kv_tokens = 0
    """See `EngineLoad`."""
    abort_timeout_s: ClassVar[float | None]
    """Seconds to abort samples, after which the engine counts as broken; ``None`` for no limit."""

    def __init__(
        self, layout: CheckpointLayout, image_prompts: ImagePromptReader | None = None
    ) -> None:
        self.layout = layout
        self.image_prompts = image_prompts
        self._broken: EngineError | None = None

    @property
    def broken(self) -> EngineError | None:
        """Why the engine is broken; ``None`` while it works."""
        return self._broken

    def note_broken(self, error: EngineError) -> None:
        """Mark the engine as broken; called in any thread."""
        self._broken = error

    def _check_works(self) -> None:
        if self.broken is not None:
            raise self.broken

    def read_images(self, request: GenerationRequest, reader: ImagePromptReader) -> object:
        """Return a request's images in the form that its run takes; called in a separate thread.

        Raises:
            InvalidRequestError: one cannot be read, or they do not fit the prompt.
        """
        return reader.read(request.prompt_token_ids, request.images)

    @abstractmethod
    def new_run(
        self,
        number: int,
        request: GenerationRequest,
        pace: FlushPolicy,
        stream: ChunkStream,
        images: Any,  # noqa: ANN401 - each core's own
    ) -> RunT:
        """Return a run for `run`; `number` is unique in this engine."""

    @abstractmethod
    async def run(self, run: RunT) -> None:
        """Sample a request; in every case its stream ends, at the latest with this call."""

    @abstractmethod
    async def cancel(self, run: RunT) -> None:
        """Abort the samples of one request; its stream then ends."""

    @abstractmethod
    async def check_alive(self, timeout_s: float) -> object:
        """Wait for an answer of the loop that computes tokens."""

    @abstractmethod
    async def join(self, spec: TransferGroupSpec) -> str:
        """Join one epoch's transfer group, leaving any earlier one; return the plan's digest."""

    @abstractmethod
    async def stage(self, epoch: int, version: int) -> StagedVersion:
        """Receive one version into staging memory while sampling continues."""

    @abstractmethod
    async def commit(self, epoch: int, version: int, digest: str) -> float:
        """Swap the staged version in; return the seconds without a token, 0 if it served already.

        Raises:
            WeightSyncError: nothing is staged with this version and digest; the old weights stay.
            EngineError: the engine is broken.
        """

    async def wait_until_swapped(self) -> None:
        """Wait until no swap is running; `counts` may name a version before its swap has ended.

        Raises:
            EngineError: the engine is broken, for example by a swap that could not resume.
        """
        self._check_works()

    @abstractmethod
    async def abort(self, epoch: int, reason: str) -> None:
        """Discard the staged weights and leave the epoch, if it is joined."""

    async def sleep(self) -> bool:
        """Do nothing: most engines cannot sleep. See `Engine.sleep`."""
        return False

    @abstractmethod
    async def close(self) -> None:
        """Abort and deliver running samples, and end the engine's processes, if any."""


CoreT = TypeVar("CoreT", bound=EngineCore[Any])


class ThreadedEngine(Generic[CoreT]):
    """See `services.rollout.engines.protocol.Engine`. A core computes, in a thread of its own.

    Args:
        name: of the engine, for messages.
        build: makes the core; called in the thread.
    """

    def __init__(
        self, name: str, settings: EngineSettings, build: Callable[[], Coroutine[Any, Any, CoreT]]
    ) -> None:
        self._name = name
        self._settings = settings
        self._build = build
        self._thread: LoopThread | None = None
        self._core: CoreT | None = None
        self._numbers = count()
        self._unfinished: set[ChunkStream] = set()
        self._image_turn = ImageTurn()
        self.accounting = RequestTokens()
        self._clock = StateTimer(process_age_s())
        self._swap: asyncio.Future[float] | None = None

    @property
    def vocab_size(self) -> int:
        return self._in_thread()[1].layout.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._settings.max_model_len

    @property
    def weight_layout(self) -> Sequence[TensorSpec]:
        return self._in_thread()[1].layout.tensors

    @property
    def weight_shares(self) -> Sequence[WeightShare]:
        return self._in_thread()[1].weight_shares

    async def start(self) -> None:
        """Build the model, in the new thread; see the protocol."""
        thread = LoopThread(self._name)
        try:
            built = await thread.call(self._build(), "starting")
        except BaseException:
            await thread.stop()
            raise
        self._thread, self._core = thread, built
        self._enter_state()  # with weights of its files it has started

    async def stop(self) -> None:
        """Abort running samples and free everything. Idempotent.

        Raises:
            DeadlineError: the thread hangs.
        """
        thread, core = self._thread, self._core
        self._thread = self._core = None  # at once, so that calls are refused meanwhile
        if thread is None or core is None:
            return
        try:
            async with deadline(_CLOSE_TIMEOUT_S, peer=f"{self._name} engine", phase="ending"):
                await thread.call(core.close(), "ending")
        finally:
            try:
                await thread.stop()
            finally:
                for stream in list(self._unfinished):
                    stream.fail(EngineError(f"the {self._name} engine was stopped"))

    def _in_thread(self) -> tuple[LoopThread, CoreT]:
        if self._core is None or self._thread is None:
            raise NotReadyError(f"the {self._name} engine is not running")
        if self._core.broken is not None:
            raise self._core.broken
        return self._thread, self._core

    async def check_alive(self) -> EngineLoad:
        thread, core = self._in_thread()
        await thread.call(core.check_alive(_LIVENESS_TIMEOUT_S), "ending a step")
        return self.load()

    def load(self) -> EngineLoad:
        """Return the latest snapshot, without waiting.

        Raises:
            EngineError: the engine broke.
            NotReadyError: it was stopped.
        """
        _, core = self._in_thread()
        # Work that waits for the end of a sleep would look like a stall, and nothing wakes a
        # replica that is out of use for one.
        open_samples = 0 if core.is_asleep else self._open_samples
        busy = min(open_samples, self._settings.slots)
        seconds = self._clock.seconds_by_state()
        generated = core.counts.generated_tokens
        services, direct = self.accounting.services, self.accounting.direct
        unsent = services.unsent + direct.unsent
        return EngineLoad(
            slots=self._settings.slots,
            slots_busy=busy,
            queued=open_samples - busy,
            generated_tokens=generated,
            unsent_tokens=unsent,
            running_tokens=generated - unsent - services.sent - direct.sent,
            direct_sent_tokens=direct.sent,
            direct_unsent_tokens=direct.unsent,
            prompt_tokens=core.counts.prompt_tokens,
            reused_tokens=core.counts.reused_tokens,
            busy_seconds=seconds[EngineState.GENERATING],
            seconds_by_state=seconds,
            version=core.counts.version,
            weight_digest=core.counts.digest,
            slots_may_wait=core.slots_may_wait,
            kv_tokens=core.kv_tokens,
        )

    async def generate(
        self,
        request: GenerationRequest,
        *,
        every_token: bool,
        partial_interval_s: float | None = None,
    ) -> AsyncGenerator[tuple[SampleChunk, ...], None]:
        self._admit(request)
        images = await self._read_images(request)
        if images is not None:
            self._admit(request)  # the engine may have stopped meanwhile
        thread, core = self._in_thread()
        stream = ChunkStream(
            thread.engine, len(request.sample_indexes), thread.call_in_service_loop
        )
        pace = FlushPolicy(every_token, partial_interval_s)
        run = core.new_run(next(self._numbers), request, pace, stream, images)
        self._unfinished.add(stream)
        self._enter_state()
        thread.begin(core.run(run))
        try:
            while stream.open_samples:
                yield await stream.next()
        finally:
            try:
                await self._end(thread, core, run)
            finally:
                self._unfinished.discard(stream)
                self._enter_state()
                request.tokens.sampled += run.sampled

    @property
    def _open_samples(self) -> int:
        return sum(stream.open_samples for stream in self._unfinished)

    def _admit(self, request: GenerationRequest) -> None:
        """Refuse a request that cannot be sampled now."""
        _, core = self._in_thread()
        limits = self._settings
        if core.counts.version is None:
            raise NotReadyError(f"the {self._name} engine has no weights yet")
        check_request(request, self.vocab_size, limits.max_model_len)
        # Samples whose images are being read will be open soon.
        coming = self._open_samples + self._image_turn.samples
        check_capacity(request, coming, limits.slots, limits.max_queued)

    async def _read_images(self, request: GenerationRequest) -> object | None:
        """Return the images of a request for its run; ``None`` if it has none."""
        if not request.images:
            return None
        _, core = self._in_thread()
        reader = core.image_prompts
        if reader is None:
            raise InvalidRequestError(
                f"request {request.request_id}: {len(request.images)} images for a model that "
                "takes none; serve a vision-language model, or leave them out"
            )
        return await self._image_turn.read(
            len(request.sample_indexes), lambda: core.read_images(request, reader)
        )

    async def _end(self, thread: LoopThread, core: CoreT, run: EngineRun) -> None:
        """Abort the rest of a request and wait for the core, after which `sampled` is final."""
        if run.stream.has_ended or self._thread is not thread:
            return
        thread.begin(core.cancel(run))
        try:
            async with asyncio.timeout(core.abort_timeout_s):
                await run.stream.wait_until_ended()
        except TimeoutError:
            core.note_broken(
                EngineError(
                    f"{self._name}: samples were not aborted within {core.abort_timeout_s:g} s; "
                    "restart the replica"
                )
            )

    def _enter_state(self) -> None:
        if self._swap is not None and not self._swap.done():
            return
        if self._core is not None and self._core.counts.version is not None:
            self._clock.enter(EngineState.GENERATING if self._unfinished else EngineState.IDLE)

    async def join_group(self, spec: TransferGroupSpec) -> str:
        thread, core = self._in_thread()
        return await thread.call(core.join(spec), f"joining epoch {spec.epoch}", _TRAINER)

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        thread, core = self._in_thread()
        return await thread.call(core.stage(epoch, version), f"staging version {version}", _TRAINER)

    async def commit(self, epoch: int, version: int, digest: str) -> float:
        thread, core = self._in_thread()
        if (core.counts.version, core.counts.digest) == (version, digest):
            # The swap of a cancelled call may not have resumed sampling yet.
            await thread.call(core.wait_until_swapped(), f"resuming with version {version}")
            return 0.0
        return await self._await_swap(thread.begin(core.commit(epoch, version, digest)))

    async def abort_update(self, epoch: int, reason: str) -> None:
        thread, core = self._in_thread()
        # Even a caller whose time ran out during a long step has left the group.
        await asyncio.shield(asyncio.wrap_future(thread.begin(core.abort(epoch, reason))))

    async def sleep(self) -> bool:
        thread, core = self._in_thread()
        return await thread.call(core.sleep(), "falling asleep")

    async def _await_swap(self, swap: Future[float]) -> float:
        """Return the result of a swap; count the time until its end as swapping."""
        waited = asyncio.wrap_future(swap)
        # The first weights belong to the start, which is one state from the process's begin.
        if self._clock.state is not EngineState.STARTING:
            self._clock.enter(EngineState.SWAPPING)
            self._swap = waited
        waited.add_done_callback(lambda _: self._enter_state())
        # A swap that is cancelled half-way would leave a mixture of versions.
        return await asyncio.shield(waited)
