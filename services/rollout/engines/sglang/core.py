"""What happens in SGLang's event loop: samples, probes, pauses, and the swap of weights.

Consumes: coroutines begun by the service's event loop. Produces: chunks, posted as they come.
Waits for: SGLang's processes, each call with a deadline.
On failure: of a sample, its request fails; of a swap, the model may be a mixture of versions; of
going on after it, nothing would be drawn: what runs fails and the engine is broken for good; of a
process, everything fails.
On shutdown: what runs ends as aborted with what it has, then SGLang's processes end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

from transformers import AutoConfig

from services.rollout.engines.causal_lm import CheckpointLayout, checkpoint_layout
from services.rollout.engines.protocol import GenerationRequest, PauseMode, SampleChunk
from services.rollout.engines.sglang.client import SglangClient, engine_environment
from services.rollout.engines.sglang.request import SglangRequest
from services.rollout.engines.sglang.settings import SglangSettings
from services.rollout.engines.vendor.samples import ModelLimits, Pace
from services.rollout.engines.vendor.thread import ChunkStream
from sluice.device.select import select_device
from sluice.errors import ConfigError, EngineError

_log = logging.getLogger(__name__)


class SglangCore:
    """SGLang with the weights it serves; see `build`."""

    def __init__(self, layout: CheckpointLayout, settings: SglangSettings) -> None:
        self.layout = layout
        self.version: int | None = None
        self.digest = ""
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self._client: SglangClient
        self._settings = settings
        self._limits = ModelLimits(settings.max_model_len, layout.eos_token_ids)
        self._runs: dict[ChunkStream, SglangRequest] = {}
        self._swaps = 0
        self._swapping = asyncio.Lock()
        self._may_sample = asyncio.Event()
        self._may_sample.set()
        self._is_paused = False
        self.broken: EngineError | None = None

    @classmethod
    async def build(cls, settings: SglangSettings) -> SglangCore:
        """Starts SGLang without weights.

        Raises:
            ConfigError: the path holds no model, or SGLang refuses its arguments.
        """
        device = select_device(settings.device)
        kind = device.torch_device.type
        if kind not in ("cpu", "cuda"):
            raise ConfigError(
                f"sluice.rollout.device: {device.name} with name=sglang; its sampler there is not "
                "sluice's and tells other logprobs: set actor_rollout_ref.rollout.name=vllm"
            )
        _check_context(settings)
        layout = checkpoint_layout(
            settings.model_path,
            trust_remote_code=settings.trust_remote_code,
            dtype=settings.dtype,
        )
        core = cls(layout, settings)
        os.environ |= engine_environment(
            os.environ, on_cpu=kind == "cpu", threads=settings.torch_threads
        )
        core._client = SglangClient(settings.engine_arguments(kind), core._note_death)
        _log.info("SGLang %s runs on %s", core._client.version, device.name)
        return core

    def _note_death(self) -> None:
        self._break(EngineError("a process of SGLang has ended; restart the replica"))

    def note_broken(self, error: EngineError) -> None:
        """It is `broken` for good; called in any thread."""
        self.broken = error

    def _break(self, error: EngineError) -> None:
        self.broken = error
        for run in self._runs.values():
            run.cancel()

    def _check_works(self) -> None:
        if self.broken is not None:
            raise self.broken

    @property
    def salt(self) -> str:
        """Prompts whose cache was computed by other weights have another one."""
        return str(self._swaps)

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of SGLang's processes."""
        return self._client.processes

    def count(self, sampled: int, prefilled: int) -> None:
        """Takes note of response tokens drawn and of prompt tokens computed."""
        self.generated_tokens += sampled
        self.prefilled_tokens += prefilled

    def new_run(
        self,
        number: int,
        request: GenerationRequest,
        pace: Pace,
        post: Callable[[list[SampleChunk]], None],
    ) -> SglangRequest:
        """A run for `run`."""
        return SglangRequest(self._client, number, request, self._limits, pace, self, post)

    async def run(self, run: SglangRequest, stream: ChunkStream) -> None:
        """Draws a request's samples into its stream, and ends that in any case."""
        error: EngineError | None = None
        self._runs[stream] = run
        try:
            self._check_works()  # the engine may have broken meanwhile
            await run.run()
        except EngineError as failed:
            error = failed
        finally:
            del self._runs[stream]
            stream.end(self.broken or error)

    async def wait_to_begin(self) -> None:
        """See `sglang_request.Serving`."""
        while not self._may_sample.is_set():  # it may be cleared before a waiter gets its turn
            await self._may_sample.wait()

    async def cancel(self, stream: ChunkStream) -> None:
        """Aborts the samples of one stream."""
        if stream in self._runs:
            self._runs[stream].cancel()

    async def heartbeat(self, timeout_s: float) -> None:
        """Returns when SGLang's scheduler has answered."""
        await self._client.heartbeat(timeout_s)

    async def running_samples(self) -> int:
        """Samples that the scheduler held when it last published its load."""
        return await self._client.running_samples()

    async def swap(self, folder: str, version: int, digest: str) -> float:
        """Has the model compute with a checkpoint; returns seconds without a token.

        Raises:
            EngineError: the model could not take it, or SGLang does not draw on; the engine is
                broken.
        """
        async with self._swapping:
            self._check_works()
            if (self.version, self.digest) == (version, digest):
                return 0.0
            started = time.perf_counter()
            self._may_sample.clear()
            try:
                await self._client.pause(retract=self._settings.recompute_kv)
                await self._take(folder, version, digest)
            finally:
                if self.broken is None and not self._is_paused:
                    await self._resume_sampling(version)
            return time.perf_counter() - started

    async def swapped(self) -> None:
        """Returns when no swap is under way; a version is named before its swap has ended.

        Raises:
            EngineError: the engine is broken, as by a swap after which it does not draw on.
        """
        async with self._swapping:
            self._check_works()

    async def _resume_sampling(self, version: int) -> None:
        """An engine that stayed paused would hold its samples for ever and take new ones."""
        try:
            await self._client.resume()
        except EngineError as error:
            broken = EngineError(f"{error}, after version {version} came; restart the replica")
            self._break(broken)
            raise broken from error
        self._may_sample.set()

    async def _take(self, folder: str, version: int, digest: str) -> None:
        try:
            await self._client.load(folder, version, flush=self._settings.recompute_kv)
        except EngineError as error:
            broken = EngineError(f"{error}; restart the replica")
            self._break(broken)
            raise broken from error
        self.version, self.digest = version, digest
        self._swaps += 1

    async def pause(self, mode: PauseMode) -> None:
        """Draws nothing from its return until `resume`; samples that come then are not begun."""
        async with self._swapping:
            self._check_works()
            try:
                await self._stop_sampling(mode)
            finally:
                if not self._is_paused:
                    self._may_sample.set()

    async def _stop_sampling(self, mode: PauseMode) -> None:
        self._may_sample.clear()
        if mode is PauseMode.ABORT:
            for run in list(self._runs.values()):
                run.give_up()
        elif mode is PauseMode.DRAIN:
            await self._drain()
        await self._client.pause(retract=mode is PauseMode.RECOMPUTE)
        self._is_paused = True
        if mode is PauseMode.RECOMPUTE:
            await self._client.flush()

    async def _drain(self) -> None:
        """Has samples drawn to their end, but those that wait in SGLang for a slot."""
        runs = list(self._runs.values())
        for run in runs:
            run.put_back()
        if self._is_paused:
            await self._client.resume()
            self._is_paused = False
        for run in runs:
            await run.until_none_is_sent()

    async def resume(self) -> None:
        """Draws on."""
        async with self._swapping:
            self._check_works()
            await self._client.resume()
            self._is_paused = False
            self._may_sample.set()

    async def close(self) -> None:
        """Ends what runs, has it delivered, and ends SGLang's processes."""
        for run in list(self._runs.values()):
            run.give_up()
        await self._client.close()


def _check_context(settings: SglangSettings) -> None:
    """SGLang's own check is off, since its context is a little longer than ours.

    Raises:
        ConfigError: samples may be longer than the model's positions reach.
    """
    try:
        config = AutoConfig.from_pretrained(
            settings.model_path, trust_remote_code=settings.trust_remote_code
        ).get_text_config()
    except (OSError, ValueError):
        return  # whoever reads the layout says what is wrong with the folder
    scaling = getattr(config, "rope_parameters", None) or {}
    reach = getattr(config, "max_position_embeddings", None)
    if reach is not None and settings.max_model_len > reach * float(scaling.get("factor") or 1):
        raise ConfigError(
            f"actor_rollout_ref.rollout.max_model_len: samples of {settings.max_model_len} tokens; "
            f"the model at {settings.model_path} has {reach} positions: lower it, or "
            "data.max_prompt_length and data.max_response_length"
        )
