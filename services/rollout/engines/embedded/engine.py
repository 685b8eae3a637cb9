"""The embedded engine: any Hugging Face causal language model, in this process, on torch alone.

The step loop runs in a thread of its own (`thread`, `loop`); this module is what the event loop
sees of it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from services.rollout.engines.causal_lm import CausalLM, build_causal_lm
from services.rollout.engines.chunk_stream import ChunkStream
from services.rollout.engines.embedded.batch_invariance import prove_shapes
from services.rollout.engines.embedded.decoder_choice import choose_decoder
from services.rollout.engines.embedded.loop import EngineRequest, GenerationLoop, RequestOutput
from services.rollout.engines.embedded.thread import EngineThread
from services.rollout.engines.protocol import (
    CommitResult,
    EngineLoad,
    GenerationRequest,
    PauseMode,
    SampleChunk,
    StagedVersion,
    UnsentTokens,
    num_tokens,
)
from services.rollout.engines.request_rules import ImageTurn, check_capacity, check_request
from services.rollout.engines.weight_inbox import NewWeights, WeightInbox
from sluice.concurrency.waits import waiting_for
from sluice.config.derived import batch_invariant, max_model_len
from sluice.config.run import RunConfig
from sluice.device.protocol import Device
from sluice.device.select import select_device, transfer_device
from sluice.errors import ConfigError, EngineError, InvalidRequestError, NotReadyError
from sluice.types import TensorSpec, TransferGroupSpec
from sluice.vision.image_prompts import ImagePrompt


@dataclass(frozen=True, slots=True)
class TorchEngineSettings:
    """Settings of one `TorchEngine`.

    Attributes:
        model_path: directory with a Hugging Face configuration; weight files are not needed.
        trust_remote_code: run model code that ships with it.
        device: ``cpu``, ``cuda``, ``cuda:N``, ``npu`` ...; ``None`` takes what the machine has.
        dtype: of weights, cache and activations. Probabilities are always float32.
        slots: samples generated at once.
        max_model_len: prompt plus response tokens of a sample.
        max_queued: samples that may wait for a slot.
        torch_threads: intra-op threads of the step loop; more than 1 slows tiny models down.
        batch_invariant: a sample's tokens and logprobs do not depend on other rows, to the bit.
        weights_backend: collectives that bring weights; ``None`` is the device's own.
        recompute_kv: after a weight swap, recompute the cache of running samples.
    """

    model_path: str
    trust_remote_code: bool = False
    device: str | None = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    slots: int = 256
    max_model_len: int = 2048
    max_queued: int = 4096
    torch_threads: int = 1
    batch_invariant: bool = False
    weights_backend: str | None = None
    recompute_kv: bool = False

    def __post_init__(self) -> None:
        for name in ("slots", "max_queued", "torch_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"torch engine: {name} is {getattr(self, name)}; give at least 1")
        if self.max_model_len < 2:
            raise ConfigError(
                f"torch engine: max_model_len is {self.max_model_len}; give at least 2, space for "
                "a prompt token and a response token"
            )


def torch_settings(config: RunConfig) -> TorchEngineSettings:
    """Return the part of a run configuration that concerns this engine."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    service = config.sluice.rollout
    return TorchEngineSettings(
        model_path=model.path,
        trust_remote_code=model.trust_remote_code,
        device=service.device,
        dtype=rollout.dtype,
        slots=rollout.max_num_seqs,
        max_model_len=max_model_len(config),
        max_queued=service.max_queued,
        torch_threads=service.torch_threads,
        batch_invariant=batch_invariant(config),
        weights_backend=config.sluice.weights.backend,
        recompute_kv=config.sluice.weights.recompute_kv,
    )


def create(config: RunConfig) -> TorchEngine:
    """Return the engine for a run configuration."""
    return TorchEngine(torch_settings(config))


class TorchEngine:
    """See `services.rollout.engines.protocol.Engine`."""

    def __init__(self, settings: TorchEngineSettings) -> None:
        self._settings = settings
        self._language_model: CausalLM | None = None
        self._thread: EngineThread | None = None
        self._loop: GenerationLoop | None = None
        self._inbox: WeightInbox | None = None
        self._streams: dict[EngineRequest, ChunkStream] = {}
        self._open_samples = 0
        self._image_turn = ImageTurn()
        self._broken: EngineError | None = None
        self._accounting = UnsentTokens()

    @property
    def accounting(self) -> UnsentTokens:
        """What became of the tokens that calls got out of this engine."""
        return self._accounting

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._model().vocab_size

    @property
    def max_model_len(self) -> int:
        """Prompt plus response tokens a sample may have."""
        return self._settings.max_model_len

    @property
    def weight_layout(self) -> Sequence[TensorSpec]:
        """The weights the engine expects, in the order of the wire."""
        return self._model().layout

    def _model(self) -> CausalLM:
        if self._language_model is None:
            raise NotReadyError("the torch engine was not started")
        return self._language_model

    async def start(self) -> None:
        """Build the model without weights. Raises ConfigError for a path that holds no model."""
        device = select_device(self._settings.device)
        # The model is built in the thread that will compute with it.
        thread = EngineThread(lambda: self._build(device), self._receive, self._fail_streams)
        self._loop = await thread.start()
        self._thread = thread
        wire = transfer_device(self._settings.device, self._settings.weights_backend)
        self._inbox = WeightInbox(wire, self._model().layout, self._loop.weights.places)

    def _build(self, device: Device) -> GenerationLoop:
        """Build the loop in the engine's thread: torch sets device and threads per thread."""
        settings = self._settings
        device.set_device()
        torch.set_num_threads(settings.torch_threads)
        language_model = build_causal_lm(
            settings.model_path,
            device.torch_device,
            trust_remote_code=settings.trust_remote_code,
            dtype=settings.dtype,
        )
        decoder = choose_decoder(language_model.model, settings.slots, settings.max_model_len)
        shapes = None
        if settings.batch_invariant:
            language_model.refuse_row_dependence()
            shapes = prove_shapes(
                decoder,
                settings.slots,
                settings.max_model_len,
                language_model.vocab_size,
                language_model.model.dtype,
            )
        self._language_model = language_model
        return GenerationLoop(
            language_model,
            decoder,
            slots=settings.slots,
            max_model_len=settings.max_model_len,
            invariant_shapes=shapes,
            recompute_kv=settings.recompute_kv,
        )

    async def stop(self) -> None:
        """Abort what runs and free everything. Repeating it is harmless."""
        thread, inbox = self._thread, self._inbox
        self._thread = self._inbox = self._loop = None
        if inbox is not None:
            inbox.close()
        if thread is not None:
            await thread.stop()

    def _running(self) -> EngineThread:
        if self._thread is None:
            raise NotReadyError("the torch engine is not running")
        return self._thread

    async def probe(self) -> EngineLoad:
        """Ask the loop that computes tokens, so that a hung engine does not answer."""
        return await self._running().call(self._snapshot)

    def load(self) -> EngineLoad:
        """Return the latest snapshot, without waiting.

        Raises:
            EngineError: the engine broke or was stopped.
        """
        if self._broken is not None:
            raise self._broken
        if self._loop is None:
            raise NotReadyError("the torch engine is not running")
        return self._snapshot(self._loop)

    def _snapshot(self, loop: GenerationLoop) -> EngineLoad:
        # Read before `generated_tokens`: every token that is counted here was sampled earlier.
        entered = self._accounting.plus(loop.dropped)
        return EngineLoad(
            slots=self._settings.slots,
            slots_busy=loop.slots_busy,
            queued=loop.queued,
            **entered.token_counters(loop.generated_tokens),
            busy_seconds=loop.busy_seconds,
            seconds_by_state=loop.clock.seconds_by_state(),
            version=loop.version,
            weight_digest=loop.digest,
        )

    async def generate(
        self,
        request: GenerationRequest,
        *,
        every_token: bool,
        partial_interval_s: float | None = None,
    ) -> AsyncGenerator[tuple[SampleChunk, ...], None]:
        """Generate the samples; see the protocol."""
        thread = self._admit(request)
        images = await self._read_images(request)
        if images is not None:
            thread = self._admit(request)  # the engine may have stopped meanwhile
        samples = len(request.sample_indexes)
        engine_request = EngineRequest(
            request, every_token, samples, partial_interval_s, images=images
        )
        stream = ChunkStream("torch engine", samples)
        thread.post(lambda loop: loop.submit(engine_request))
        self._streams[engine_request] = stream
        self._open_samples += samples
        try:
            while stream.open_samples:
                chunks = await stream.next()
                request.tokens.yielded += num_tokens(chunks)
                yield chunks
        finally:
            self._forget(engine_request)

    def _admit(self, request: GenerationRequest) -> EngineThread:
        thread, settings = self._running(), self._settings
        if self._loop is None or self._loop.version is None:
            raise NotReadyError("the torch engine has no weights yet")
        check_request(request, self.vocab_size, settings.max_model_len)
        under_way = self._open_samples + self._image_turn.samples
        check_capacity(request, under_way, settings.slots, settings.max_queued)
        return thread

    async def _read_images(self, request: GenerationRequest) -> ImagePrompt | None:
        """Decode images in a thread: neither the event loop nor the step loop may wait."""
        if not request.images:
            return None
        reader = self._model().image_prompts
        if reader is None:
            raise InvalidRequestError(
                f"request {request.request_id}: {len(request.images)} images for a model that "
                "reads text alone; send none, or serve a vision-language model"
            )
        return await self._image_turn.read(
            len(request.sample_indexes),
            lambda: reader.read(request.prompt_token_ids, request.images),
        )

    def _forget(self, engine_request: EngineRequest) -> None:
        stream = self._streams.pop(engine_request, None)
        if stream is None:
            return
        self._accounting.of(engine_request.request).unsent += stream.waiting_tokens
        if not stream.open_samples:
            return
        self._open_samples -= stream.open_samples
        if self._thread is not None and self._thread.is_alive:
            self._thread.post(lambda loop: loop.cancel(engine_request))

    def _receive(self, deliveries: list[RequestOutput]) -> None:
        for delivery in deliveries:
            stream = self._streams.get(delivery.engine_request)
            if stream is None:  # the call has ended while these tokens were on their way
                accounting = self._accounting.of(delivery.engine_request.request)
                accounting.unsent += num_tokens(delivery.chunks)
                continue
            before = stream.open_samples
            stream.post(delivery.chunks)
            self._open_samples -= before - stream.open_samples

    def _fail_streams(self, error: EngineError) -> None:
        self._broken = error
        for stream in self._streams.values():
            stream.fail(error)

    def _weights(self) -> WeightInbox:
        if self._inbox is None:
            raise NotReadyError("the torch engine is not running")
        return self._inbox

    async def pause(self, mode: PauseMode) -> None:
        """Sample no token from its return until `resume`; see the protocol."""
        thread = self._running()
        await thread.call(lambda loop: loop.pause(mode))
        with waiting_for("torch engine", "draining its slots"):
            while await thread.call(lambda loop: loop.is_draining):
                pass  # each call returns between two steps

    async def resume(self) -> None:
        """Sample again."""
        await self._running().call(lambda loop: loop.resume())

    async def join_group(self, spec: TransferGroupSpec) -> str:
        """Join one epoch's transfer group, leaving any earlier one; return the plan's digest."""
        return await self._weights().join(spec)

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        """Receive one version into staging memory while generation continues."""
        return await self._weights().stage(epoch, version)

    async def commit(self, epoch: int, version: int, digest: str) -> CommitResult:
        """Swap the staged version in between two decode steps. Idempotent."""
        thread, inbox = self._running(), self._weights()
        serving = await thread.call(lambda loop: (loop.version, loop.digest))
        if serving == (version, digest):  # a repeated call
            return CommitResult(version, digest, 0.0)
        staged = inbox.staged(epoch, version, digest)
        result = await self._swap(staged, version, digest)
        inbox.release(staged)
        return result

    async def load_weights(
        self, tensors: Mapping[str, torch.Tensor], version: int, digest: str
    ) -> CommitResult:
        """Swap a copy of given weights in between two decode steps.

        Raises:
            WeightSyncError: they do not fit the model; the old weights stay.
        """
        device = self._model().model.device
        copies = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
        return await self._swap(NewWeights(copies), version, digest)

    async def _swap(self, new: NewWeights, version: int, digest: str) -> CommitResult:
        def swap(loop: GenerationLoop) -> CommitResult:
            started = time.perf_counter()
            loop.swap(new, version, digest)
            return CommitResult(version, digest, time.perf_counter() - started)

        return await self._running().call(swap)

    async def abort_update(self, epoch: int, reason: str) -> None:
        """Discard what is staged and leave the group. Idempotent."""
        self._weights().abort(epoch, reason)
