"""SGLang behind the engine Protocol.

SGLang's client runs in the thread of the engine, where `SglangCore` calls it; see
`vendor_engines.engine` for what that waits for and how it fails. The end of one of SGLang's
processes fails everything. Its schedulers are processes, and `sglang.scheduler` brings the sampler
and the weights into them.
`SglangEngine` is what the service's event loop sees of them.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import AsyncIterator
from functools import partial

from transformers import AutoConfig

from services.rollout.engines.protocol import GenerationRequest
from services.rollout.engines.sglang.client import (
    SglangClient,
    engine_environment,
)
from services.rollout.engines.sglang.sampler import stream_seed
from services.rollout.engines.sglang.settings import SglangSettings, sglang_settings
from services.rollout.engines.threaded_engine import ThreadedEngine
from services.rollout.engines.vendor_engines.engine import VendorCore, described_model
from services.rollout.engines.vendor_engines.owner_watch import end_children_with_owner
from services.rollout.engines.vendor_engines.request import EngineDelta, RequestRun, VendorSample
from sluice.config.run import RunConfig
from sluice.device.select import select_device
from sluice.errors import ConfigError, EngineError

_log = logging.getLogger(__name__)


def create(config: RunConfig) -> SglangEngine:
    """Return the engine for a run configuration; see `create_engine` for errors."""
    return SglangEngine(sglang_settings(config))


class SglangCore(VendorCore):
    """SGLang with the weights that it serves; see `build`."""

    name = "SGLang"
    first_goes_ahead = True
    client: SglangClient
    _swaps = 0

    @classmethod
    async def build(cls, settings: SglangSettings) -> SglangCore:
        """Start SGLang; see `Engine.start` for errors."""
        device = select_device(settings.device)
        kind = device.torch_device.type
        if kind not in ("cpu", "cuda"):
            raise ConfigError(
                f"sluice.rollout.device: {device.name} with name=sglang; its sampler there is not "
                "sluice's and reports other logprobs: set actor_rollout_ref.rollout.name=vllm"
            )
        _check_context(settings)
        described = described_model(settings)
        os.environ |= engine_environment(
            os.environ,
            on_cpu=kind == "cpu",
            threads=settings.torch_threads,
            ranks=settings.workers,
        )
        end_children_with_owner(os.environ)
        client = SglangClient(
            settings.engine_arguments(kind),
            ranks=settings.workers,
            recomputes=settings.recompute_kv,
        )
        core = cls(client, described.layout, settings, described.image_prompts)
        client.on_death = core._note_death
        _log.info("SGLang %s runs on %s", client.version, device.name)
        await core.open(kind)
        return core

    def _note_death(self) -> None:
        self._break(EngineError("a process of SGLang has ended; restart the replica"))

    def seed(self, request: GenerationRequest, index: int, _num_continued: int) -> int:
        """Return a seed; a continued sample gets the random numbers that it would have had."""
        return stream_seed(request.sampling.seed, index, request.prompt_token_ids.size)

    def deltas(self, run: RequestRun, sample: VendorSample) -> AsyncIterator[EngineDelta]:
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
            images=run.images,
        )

    async def check_alive(self, timeout_s: float) -> None:
        """Wait for an answer of SGLang's scheduler."""
        await self.wait_until_swapped()  # it has a longer deadline of its own
        await self.client.check_alive(timeout_s)

    async def _note_weights(self, _version: int) -> None:
        self._swaps += 1  # a new salt: the cache of the old weights must not serve the new ones


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


class SglangEngine(ThreadedEngine[SglangCore]):
    """See `services.rollout.engines.protocol.Engine`."""

    def __init__(self, settings: SglangSettings) -> None:
        super().__init__(SglangCore.name, settings, partial(SglangCore.build, settings))

    async def start(self) -> None:
        _survive_quit_signals()
        await super().start()


def _survive_quit_signals() -> None:
    """Ignore SIGQUIT, which a failing process of SGLang sends; its end is noticed anyway."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
        signal.signal(signal.SIGQUIT, lambda *_: None)
