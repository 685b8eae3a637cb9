"""SGLang in the event loop of its client: samples, probes, and swaps of weights.

See `vendor.core` for what it waits for and how it fails. The end of one of SGLang's processes
fails everything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import torch
from transformers import AutoConfig

from services.rollout.engines.causal_lm import CheckpointLayout, build_causal_lm
from services.rollout.engines.protocol import GenerationRequest
from services.rollout.engines.sglang.client import SglangClient, engine_environment
from services.rollout.engines.sglang.sampler import stream_seed
from services.rollout.engines.sglang.settings import SglangSettings
from services.rollout.engines.vendor.checkpoint_names import check_files
from services.rollout.engines.vendor.core import VendorCore
from services.rollout.engines.vendor.owner_watch import own_processes
from services.rollout.engines.vendor.request import Delta, RequestRun, VendorSample
from services.rollout.engines.vendor.weight_workers import WeightWorkers, WorkerBegin
from sluice.device.select import select_device
from sluice.errors import ConfigError, EngineError
from sluice.vision.image_prompts import ImagePromptReader

_log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 20.0


class SglangCore(VendorCore):
    """SGLang with the weights that it serves; see `build`.

    Args:
        image_prompts: the model's; ``None`` if it takes no images.
    """

    name = "SGLang"
    first_goes_ahead = True

    def __init__(
        self,
        layout: CheckpointLayout,
        settings: SglangSettings,
        image_prompts: ImagePromptReader | None = None,
    ) -> None:
        super().__init__(layout, settings.max_model_len, WeightWorkers(self, self.name))
        self.client: SglangClient
        self.image_prompts = image_prompts
        self._settings = settings
        self._swaps = 0
        self._may_sample = asyncio.Event()
        self._may_sample.set()

    @classmethod
    async def build(cls, settings: SglangSettings) -> SglangCore:
        """Start SGLang.

        Raises:
            CheckpointError: a file of weights that it is to serve is missing or damaged.
            ConfigError: the path holds no model, or SGLang refuses its arguments.
        """
        device = select_device(settings.device)
        kind = device.torch_device.type
        if kind not in ("cpu", "cuda"):
            raise ConfigError(
                f"sluice.rollout.device: {device.name} with name=sglang; its sampler there is not "
                "sluice's and reports other logprobs: set actor_rollout_ref.rollout.name=vllm"
            )
        _check_context(settings)
        described = build_causal_lm(
            settings.model_path,
            torch.device("meta"),
            trust_remote_code=settings.trust_remote_code,
            dtype=settings.dtype,
        )
        if settings.serves_model_files:
            check_files(Path(settings.model_path), described)
        core = cls(described.layout, settings, described.image_prompts)
        os.environ |= engine_environment(
            os.environ,
            on_cpu=kind == "cpu",
            threads=settings.torch_threads,
            ranks=settings.workers,
        )
        own_processes(os.environ)
        core.client = SglangClient(
            settings.engine_arguments(kind),
            core._note_death,
            ranks=settings.workers,
            recomputes=settings.recompute_kv,
        )
        _log.info("SGLang %s runs on %s", core.client.version, device.name)
        try:
            await core.client.open()
            await core.workers.begin(core._begin(kind))
            if settings.serves_model_files:
                await core.serve_files()
        except BaseException:  # its processes end with this one only, and this one may live on
            await core.client.close()
            raise
        core.kv_tokens = core.client.kv_tokens
        return core

    def _begin(self, kind: str) -> WorkerBegin:
        return WorkerBegin(
            device=kind,
            backend=self._settings.weights_backend,
            tensors=self.layout.tensors,
            model_path=self._settings.model_path,
            trust_remote_code=self._settings.trust_remote_code,
        )

    async def call_workers(
        self, method: str, *arguments: object, timeout_s: float
    ) -> Sequence[object]:
        """Return the result of a method of each scheduler's `SchedulerWorker`, by rank."""
        return await self.client.call_workers(method, *arguments, timeout_s=timeout_s)

    def _note_death(self) -> None:
        self._break(EngineError("a process of SGLang has ended; restart the replica"))

    def seed(self, request: GenerationRequest, index: int, _num_continued: int) -> int:
        """Return a seed; a continued sample gets the random numbers that it would have had."""
        return stream_seed(request.sampling.seed, index, request.prompt_token_ids.size)

    def deltas(self, run: RequestRun, sample: VendorSample) -> AsyncIterator[Delta]:
        """Sample one sample; closing the iterator aborts it."""
        # SGLang aborts all requests whose names begin with a given one; hence the dot at the end.
        name = f"{run.number}-{sample.index}."
        # A cache that other weights computed has another salt.
        salt = str(self._swaps)
        return self.client.generate(
            name,
            sample.prompt,
            salt,
            sample.choice,
            run.request.priority,
            every_token=run.reads_tokens,
            images=None if run.images is None else run.images.of(len(sample.prompt)),
        )

    async def wait_to_begin(self) -> None:
        """Wait until SGLang samples: the serving weights compute the prompts that are sent then."""
        while not self._may_sample.is_set():  # it may be cleared before a waiter gets its turn
            await self._may_sample.wait()

    async def heartbeat(self, timeout_s: float) -> None:
        """Wait for an answer of SGLang's scheduler."""
        await self.client.heartbeat(timeout_s)

    async def swap(self, version: int, digest: str) -> float:
        """Make the model compute with the staged weights; return the seconds without a token.

        Raises:
            WeightSyncError: something else is staged, or nothing; the old weights stay.
            EngineError: the model could not take the weights, or SGLang does not resume; the engine
                is broken.
        """
        async with self._swapping:
            self._check_works()
            if (self.version, self.digest) == (version, digest):
                return 0.0
            # Before the pause: a refusal must not cost any sampling.
            await self.workers.check_staged(version, digest)
            started = time.perf_counter()
            self._may_sample.clear()
            try:
                await self.client.pause(retract=self._settings.recompute_kv)
                await self._take(version, digest)
            finally:
                if self._broken is None:
                    await self._resume_after_swap(self.client.resume(), version)
                    self._may_sample.set()
            return time.perf_counter() - started

    async def _note_weights(self, _version: int) -> None:
        self._swaps += 1  # a new salt: the cache of the old weights must not serve the new ones

    async def close(self) -> None:
        """End what runs, deliver it, and end SGLang's processes."""
        for run in self._runs:
            run.give_up()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self.workers.close()
        except (TimeoutError, EngineError) as error:
            _log.warning("SGLang did not end in order: %r", error)
        finally:
            await self.client.close()


def _check_context(settings: SglangSettings) -> None:
    """Refuse contexts beyond the model's positions.

    SGLang's own check is off, since its context is a little longer than ours.

    Raises:
        ConfigError: samples may be longer than the model's positions reach.
    """
    try:
        config = AutoConfig.from_pretrained(
            settings.model_path, trust_remote_code=settings.trust_remote_code
        ).get_text_config()
    except (OSError, ValueError):
        return  # `build_causal_lm` reports the folder's faults
    scaling = getattr(config, "rope_parameters", None) or {}
    reach = getattr(config, "max_position_embeddings", None)
    if reach is not None and settings.max_model_len > reach * float(scaling.get("factor") or 1):
        raise ConfigError(
            f"actor_rollout_ref.rollout.max_model_len: samples of {settings.max_model_len} tokens; "
            f"the model at {settings.model_path} has {reach} positions: lower it, or "
            "data.max_prompt_length and data.max_response_length"
        )
