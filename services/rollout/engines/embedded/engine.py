"""The embedded engine: any Hugging Face causal language model, in this process, on torch alone.

Consumes: commands, as coroutines that the service's event loop begins in the engine's thread.
Produces: chunks, posted to the requests' streams.
Waits for: the thread that receives weights; steps wait for nothing. A turn of the thread's event
    loop runs one step (`loop`); without work there is no turn. An idle engine waits a moment for
    other requests to come with the first.
Unblocked by: any command.
On failure: the first unexpected error ends the loop; every running generation and every later call
    gets it.
On shutdown: running samples are aborted and delivered, then the thread ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from services.rollout.engines.causal_lm import (
    CausalLM,
    build_causal_lm,
    read_weights,
    use_float32_head,
)
from services.rollout.engines.embedded.batch_invariance import prove_shapes
from services.rollout.engines.embedded.decoder_choice import choose_decoder
from services.rollout.engines.embedded.loop import EmbeddedEngineSettings, GenerationLoop
from services.rollout.engines.embedded.routing import RoutedDecoder
from services.rollout.engines.embedded.rows import EmbeddedRun
from services.rollout.engines.protocol import GenerationRequest, StagedVersion
from services.rollout.engines.settings import FILES_DIGEST, FILES_VERSION
from services.rollout.engines.thread import ChunkStream
from services.rollout.engines.threaded_engine import EngineCore, FlushPolicy, ThreadedEngine
from services.rollout.engines.weight_inbox import WeightInbox
from sluice.config.derived import batch_invariant, replays_engine_routing
from sluice.config.run import RunConfig
from sluice.device.select import select_device, transfer_device
from sluice.errors import EngineError, InvalidRequestError, SluiceError
from sluice.types import TransferGroupSpec
from sluice.vision.image_prompts import ImagePrompt

logger = logging.getLogger(__name__)

# A sleep, not a timer: each request would wake this thread, and take the interpreter's turn from
# the service's event loop, which needs it to let the next request in.
_GATHER_S = 0.005
_MAX_GATHER_S = 0.1
_MAX_PROMPT_LOGITS = 1 << 30

_T = TypeVar("_T")


def create(config: RunConfig) -> EmbeddedEngine:
    """Return the engine for a run configuration."""
    return EmbeddedEngine(
        EmbeddedEngineSettings.of(
            config,
            batch_invariant=batch_invariant(config),
            keeps_prefixes=config.actor_rollout_ref.rollout.enable_prefix_caching,
            with_routing=replays_engine_routing(config),
        )
    )


class EmbeddedCore(EngineCore[EmbeddedRun]):
    """The generation loop of one model; see `build`."""

    name = "torch"
    slots_may_wait = False
    abort_timeout_s = None  # it aborts between two steps, and may recover if it hangs

    def __init__(self, loop: GenerationLoop, language_model: CausalLM, inbox: WeightInbox) -> None:
        super().__init__(language_model.layout, language_model.image_prompts)
        self.loop = self.counts = loop
        self._inbox = inbox
        self._receiving: set[asyncio.Future[Any]] = set()
        self._has_turn = False
        self._is_closed = False
        self._gather_until_s = 0.0
        self._num_gathered = 0

    @classmethod
    async def build(cls, settings: EmbeddedEngineSettings) -> EmbeddedCore:
        """Build the model in this thread: torch sets device and threads per thread.

        Raises:
            CheckpointError: a file of the weights to serve is missing or damaged.
            ConfigError: the path holds no model, or its results depend on the rest of the batch
                although they must not.
        """
        device = select_device(settings.device)
        device.set_device()
        torch.set_num_threads(settings.torch_threads)
        language_model = build_causal_lm(
            settings.model_path,
            device.torch_device,
            trust_remote_code=settings.trust_remote_code,
            dtype=settings.dtype,
        )
        if settings.float32_head:
            use_float32_head(language_model.model)
        model, slots, longest = language_model.model, settings.slots, settings.max_model_len
        decoder = choose_decoder(model, slots, longest)
        if settings.with_routing:
            decoder = RoutedDecoder(decoder, model, slots, longest)
        shapes = None
        if settings.batch_invariant:
            language_model.refuse_row_dependence()
            vocab = language_model.layout.vocab_size
            shapes = prove_shapes(decoder, slots, longest, vocab, model.dtype)
        loop = GenerationLoop(language_model, decoder, settings, shapes)
        if settings.serves_model_files:
            weights = read_weights(
                settings.model_path,
                [spec.name for spec in language_model.layout.tensors],
                trust_remote_code=settings.trust_remote_code,
                dtype=settings.dtype,
            )
            loop.swap(weights, FILES_VERSION, FILES_DIGEST)
        wire = transfer_device(settings.device, settings.weights_backend)
        return cls(loop, language_model, WeightInbox(wire, loop.weights))

    def new_run(
        self,
        _number: int,
        request: GenerationRequest,
        pace: FlushPolicy,
        stream: ChunkStream,
        images: ImagePrompt | None,
    ) -> EmbeddedRun:
        return EmbeddedRun(request, pace, stream, images)

    async def run(self, run: EmbeddedRun) -> None:
        """Queue a request; its stream ends with its last sample."""
        if self._broken is not None:
            run.stream.end(self._broken)
            return
        try:
            with self._between_steps():
                self.loop.submit(run)
        except SluiceError as error:  # nothing else waits for this call
            run.stream.end(EngineError(str(error)))

    async def cancel(self, run: EmbeddedRun) -> None:
        """Free the rows of a request before the next step, and end its stream."""
        with self._between_steps():
            self.loop.cancel(run)

    async def check_alive(self, _timeout_s: float) -> None:
        """Answer between two steps."""
        self._check_works()

    async def join(self, spec: TransferGroupSpec) -> str:
        return await self._await_result(self._inbox.join(spec), f"joining epoch {spec.epoch}")

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        received = self._inbox.stage(epoch, version)
        return await self._await_result(received, f"staging version {version}")

    async def _await_result(self, result: Future[_T], phase: str) -> _T:
        epoch, received = self._inbox.epoch, asyncio.wrap_future(result)
        self._receiving.add(received)
        try:
            return await received
        except asyncio.CancelledError:
            # The inbox's thread cannot be interrupted; without the group its call fails soon.
            if self._inbox.epoch == epoch:  # otherwise the next epoch has begun and left this one
                self._inbox.leave(f"the call was cancelled while {phase}")
            raise
        finally:
            self._receiving.discard(received)

    async def commit(self, epoch: int, version: int, digest: str) -> float:
        """Swap the staged version in between two steps; return the seconds without a token."""
        if (self.loop.version, self.loop.digest) == (version, digest):  # by a cancelled call
            return 0.0
        staged = self._inbox.staged_weights(epoch, version, digest)
        stall_s = await self.swap(staged, version, digest)
        self._inbox.release(staged)
        return stall_s

    async def swap(self, tensors: Mapping[str, torch.Tensor], version: int, digest: str) -> float:
        """Swap to new weights between two steps; return the seconds without a token.

        Raises:
            WeightSyncError: the weights do not fit the model; the old weights stay.
            EngineError: the engine is broken.
        """
        started = time.perf_counter()
        with self._between_steps():
            self.loop.swap(tensors, version, digest)
        return time.perf_counter() - started

    async def abort(self, epoch: int, reason: str) -> None:
        if epoch == self._inbox.epoch:
            self._inbox.leave(reason)

    async def close(self) -> None:
        """Abort and deliver running samples; run no further step."""
        self._is_closed = True
        self._inbox.close()
        if self._broken is None:
            self.loop.abort_all()
        if self._receiving:  # without the group they fail soon
            await asyncio.wait(self._receiving)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Change the loop; then schedule steps if there is work.

        Raises:
            EngineError: the engine is broken, perhaps by an unexpected error of the change, after
                which the loop's state is unknown.
        """
        self._check_works()
        try:
            yield
        except SluiceError:
            raise
        except Exception as error:
            raise self._break(error) from error
        if not self._has_turn and self.loop.has_work:
            self._has_turn = True
            if not self.loop.slots_busy:
                self._gather_until_s = time.monotonic() + _MAX_GATHER_S
                self._num_gathered = 0
            asyncio.get_running_loop().call_soon(self._run_turn)

    def _run_turn(self) -> None:
        """Run a step, and plan the next one."""
        self._has_turn = self.loop.has_work and not self._is_closed and self._broken is None
        if not self._has_turn:
            return
        events = asyncio.get_running_loop()
        if self._waits_for_more():
            # Two turns of the event loop, as a command that came meanwhile needs: the first turn
            # begins its coroutine, and the second runs it.
            events.call_soon(events.call_soon, self._run_turn)
            return
        try:
            self.loop.step()
        except Exception as error:  # noqa: BLE001 - the loop ends: callers get the error
            self._break(error)
        events.call_soon(self._run_turn)

    def _waits_for_more(self) -> bool:
        """Make an idle engine wait for requests that arrive together, as for a train batch.

        Steps and prefills of a few rows take nearly as long as those of many, and would slow the
        event loop that receives the other requests.
        """
        may_wait = self._num_gathered < self.loop.queued < self.loop.slots
        if not may_wait or time.monotonic() >= self._gather_until_s:
            self._gather_until_s = 0.0  # until the engine is idle again
            return False
        self._num_gathered = self.loop.queued
        time.sleep(_GATHER_S)
        return True

    def _break(self, cause: Exception) -> EngineError:
        """End every stream with the error that broke the loop; return it."""
        logger.error("the embedded engine broke", exc_info=cause)
        self._broken = EngineError(f"the embedded engine broke: {cause!r}")
        for run in self.loop.runs:
            run.stream.end(self._broken)
        return self._broken


class EmbeddedEngine(ThreadedEngine[EmbeddedCore]):
    """See `services.rollout.engines.protocol.Engine`. It receives weights in this process."""

    def __init__(self, settings: EmbeddedEngineSettings) -> None:
        super().__init__(EmbeddedCore.name, settings, partial(EmbeddedCore.build, settings))

    def _admit(self, request: GenerationRequest) -> None:
        super()._admit(request)
        longest = _MAX_PROMPT_LOGITS // self.vocab_size
        if request.with_prompt_logprobs and request.prompt_token_ids.size > longest:
            raise InvalidRequestError(
                f"request {request.request_id}: logprobs of a prompt of "
                f"{request.prompt_token_ids.size} tokens; the torch engine holds all their logits "
                f"at once, of at most {longest} tokens of this model: send a shorter prompt, or "
                "serve with actor_rollout_ref.rollout.name=vllm"
            )
