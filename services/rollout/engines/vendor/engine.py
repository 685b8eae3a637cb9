"""An engine whose client lives in its own thread, and the settings that every vendor's engine
reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from services.rollout.engines.causal_lm import CheckpointLayout
from services.rollout.engines.protocol import (
    EngineLoad,
    GenerationRequest,
    PauseMode,
    SampleChunk,
    UnsentTokens,
    num_tokens,
)
from services.rollout.engines.request_rules import check_capacity, check_request
from services.rollout.engines.state_clock import EngineState, StateClock
from services.rollout.engines.vendor.thread import ChunkStream, ClientThread
from sluice.config.derived import max_model_len
from sluice.config.run import RunConfig
from sluice.config.schema.rollout import RolloutConfig
from sluice.errors import ConfigError, EngineError, NotReadyError
from sluice.telemetry.process import process_age_s
from sluice.types import TensorSpec


@dataclass(frozen=True, slots=True)
class ClientEngineSettings:
    """Settings of one engine.

    Attributes:
        model_path: directory with a Hugging Face configuration; weight files are not needed.
        trust_remote_code: run model code that ships with it.
        device: ``cpu``, ``cuda``, ``cuda:N``, ``npu`` ...; ``None`` for what is there.
        dtype: of weights, cache and activations.
        slots: samples generated at once.
        max_model_len: prompt plus response tokens of a sample.
        max_queued: samples that may wait for a slot.
        torch_threads: intra-op threads of the vendor's processes where they compute on the CPU.
        weights_backend: collectives that weights arrive by; ``None`` is the device's own.
        recompute_kv: after a weight swap, recompute the cache of running samples.
        arguments: of the vendor's engine, by its own names.
    """

    model_path: str
    trust_remote_code: bool = False
    device: str | None = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    slots: int = 256
    max_model_len: int = 2048
    max_queued: int = 4096
    torch_threads: int = 1
    weights_backend: str | None = None
    recompute_kv: bool = False
    arguments: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, arguments: Mapping[str, object]) -> Self:
        """The part of a run configuration that concerns the engine, with its `arguments`."""
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        service = config.sluice.rollout
        return cls(
            model_path=model.path,
            trust_remote_code=model.trust_remote_code,
            device=service.device,
            dtype=rollout.dtype,
            slots=rollout.max_num_seqs,
            max_model_len=max_model_len(config),
            max_queued=service.max_queued,
            torch_threads=service.torch_threads,
            weights_backend=config.sluice.weights.backend,
            recompute_kv=config.sluice.weights.recompute_kv,
            arguments=arguments,
        )


def with_engine_kwargs(
    arguments: Mapping[str, object], rollout: RolloutConfig, owner: str, ours: Mapping[str, str]
) -> dict[str, object]:
    """`arguments`, and those of `engine_kwargs` in their place; nulls are left out, as verl does.

    Args:
        arguments: the rollout's keys by the vendor's names.
        owner: the vendor as it writes itself; below its name in small letters its arguments stand.
        ours: names that must be left alone, with what to do instead.

    Raises:
        ConfigError: they are no mapping, or set what is to be left alone.
    """
    name = owner.lower()
    section = f"actor_rollout_ref.rollout.engine_kwargs.{name}"
    given = rollout.engine_kwargs.get(name) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{section} is {given!r}; give a mapping of {owner}'s engine arguments")
    for key in given:
        if key in ours:
            raise ConfigError(f"{section}.{key} cannot be set: {ours[key]}")
    chosen = {**arguments, **{str(key): value for key, value in given.items()}}
    return {key: value for key, value in chosen.items() if value is not None}


# An engine whose client lives in a thread of its own: what all vendors' engines have in common.
#
# The service's event loop calls it. What happens in the client's event loop is its core's.


_END_TIMEOUT_S = 30.0


class Run(Protocol):
    """One request in the client's event loop."""

    @property
    def sampled(self) -> int:
        """Tokens so far."""
        ...


RunT = TypeVar("RunT", bound=Run, contravariant=True)


class Core(Protocol[RunT]):
    """What happens in the client's event loop, where its coroutines run."""

    layout: CheckpointLayout
    version: int | None
    digest: str
    generated_tokens: int
    prefilled_tokens: int

    @property
    def broken(self) -> EngineError | None:
        """Why nothing works any more."""
        ...

    def note_broken(self, error: EngineError) -> None:
        """It is `broken` for good; called in any thread."""
        ...

    async def run(self, run: RunT, stream: ChunkStream) -> None:
        """Draws a request's samples into its stream, and ends that in any case."""
        ...

    async def cancel(self, stream: ChunkStream) -> None:
        """Aborts the samples of one stream."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Draws nothing from its return until `resume`."""
        ...

    async def resume(self) -> None:
        """Draws on."""
        ...

    async def close(self) -> None:
        """Ends what runs, has it delivered, and ends the vendor's processes."""
        ...


CoreT = TypeVar("CoreT", bound=Core[Any])


class ClientEngine(Generic[CoreT]):
    """All of `services.rollout.engines.protocol.Engine` but requests and weights.

    Args:
        name: of the engine, for messages.
    """

    def __init__(self, name: str, settings: ClientEngineSettings) -> None:
        self._name, self._limits = name, settings
        self._layout: CheckpointLayout | None = None
        self._thread: ClientThread | None = None
        self._core: CoreT | None = None
        self._numbers = count()
        self._open_samples = 0
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
        """Prompt tokens computed so far, those of the prefix cache not among them."""
        return self._in_thread()[1].prefilled_tokens

    def _described(self) -> CheckpointLayout:
        if self._layout is None:
            raise NotReadyError(f"the {self._name} engine was not started")
        return self._layout

    async def _build(self, core: Coroutine[Any, Any, CoreT]) -> CoreT:
        """Starts the thread, and in it the core."""
        thread = ClientThread(self._name)
        try:
            built = await thread.call(core, "starting")
        except BaseException:
            await thread.stop()
            raise
        self._thread, self._core, self._layout = thread, built, built.layout
        return built

    async def stop(self) -> None:
        """Aborts what runs and frees everything. Repeating it is harmless."""
        thread, core = self._thread, self._core
        self._thread = self._core = None
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

    def load(self) -> EngineLoad:
        """The latest snapshot, without waiting.

        Raises:
            EngineError: the engine broke.
            NotReadyError: it was stopped.
        """
        _, core = self._in_thread()
        services, direct = self._accounting.services, self._accounting.direct
        unsent, generated = services.unsent + direct.unsent, core.generated_tokens
        busy = min(self._open_samples, self._limits.slots)
        since = 0.0 if self._busy_since is None else time.monotonic() - self._busy_since
        return EngineLoad(
            slots=self._limits.slots,
            slots_busy=busy,
            queued=self._open_samples - busy,
            generated_tokens=generated,
            unsent_tokens=unsent,
            running_tokens=generated - unsent - services.sent - direct.sent,
            direct_sent_tokens=direct.sent,
            direct_unsent_tokens=direct.unsent,
            busy_seconds=self._busy_s + since,
            seconds_by_state=self._clock.seconds_by_state(),
            version=core.version,
            weight_digest=core.digest,
            slots_may_wait=True,
        )

    def _admit(self, request: GenerationRequest, coming: int = 0) -> None:
        """Refuses what cannot be drawn at present; `coming` samples are to be counted as open."""
        _, core = self._in_thread()
        limits = self._limits
        if core.version is None:
            raise NotReadyError(f"the {self._name} engine has no weights yet")
        check_request(request, self.vocab_size, limits.max_model_len)
        check_capacity(request, self._open_samples + coming, limits.slots, limits.max_queued)

    async def _sample(
        self,
        request: GenerationRequest,
        new_run: Callable[[CoreT, Callable[[list[SampleChunk]], None]], Run],
    ) -> AsyncGenerator[tuple[SampleChunk, ...], None]:
        """The chunks of an admitted request; see `Engine.generate`.

        Args:
            new_run: makes its run in a core, given where chunks are to be posted.
        """
        thread, core = self._in_thread()
        samples = len(request.sample_indexes)
        stream = ChunkStream(thread, samples)
        run = new_run(core, stream.post)
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
            self._accounting.of(request).unsent += run.sampled - yielded

    async def _end(self, thread: ClientThread, core: CoreT, stream: ChunkStream) -> None:
        if stream.has_ended or self._thread is not thread:
            return
        thread.begin(core.cancel(stream))
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await stream.wait_until_ended()
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

    @contextmanager
    def _swapping(self) -> Iterator[None]:
        """The time in it is counted as that of a swap."""
        self._clock.enter(EngineState.SWAPPING)
        try:
            yield
        finally:
            self._enter_state()

    async def pause(self, mode: PauseMode) -> None:
        """Draws no token from its return until `resume`; see the protocol."""
        thread, core = self._in_thread()
        await thread.call(core.pause(mode), f"pausing ({mode})")

    async def resume(self) -> None:
        """Draws on."""
        thread, core = self._in_thread()
        await thread.call(core.resume(), "going on after a pause")
