"""One request in vLLM's event loop: its samples are vLLM requests of their own.

They share the prompt's prefill through vLLM's prefix cache, and each can end by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

from services.rollout.engines.protocol import GenerationRequest, SampleChunk
from services.rollout.engines.vendor import samples
from services.rollout.engines.vendor.samples import (
    ModelLimits,
    Pace,
    RequestSamples,
    VendorSample,
    VersionSpans,
)
from services.rollout.engines.vllm.client import PromptImages, PromptInputs, VllmClient
from sluice.errors import EngineError

_SEED_BYTES = 8


class VllmServingState(samples.ServingState, Protocol):
    """What serves at the moment, and who counts."""

    async def wait_to_begin(self) -> None:
        """Returns when no swap of weights is under way: `version` draws what is begun then."""
        ...


class VllmRequest:
    """Draws the samples of one request.

    Args:
        number: of the request, unique in this engine.
        images: of the request.
        post: takes chunks as they come; called in this event loop.
    """

    def __init__(
        self,
        client: VllmClient,
        number: int,
        request: GenerationRequest,
        images: PromptImages | None,
        limits: ModelLimits,
        pace: Pace,
        serving: VllmServingState,
        post: Callable[[list[SampleChunk]], None],
    ) -> None:
        self._client, self._number, self._serving = client, number, serving
        self._request, self._images = request, images
        self._samples = RequestSamples(
            "vLLM", request, limits, pace, serving, _settle_versions, post
        )
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False

    @property
    def sampled(self) -> int:
        """Tokens so far."""
        return self._samples.sampled

    @property
    def request_ids(self) -> list[str]:
        """Of the samples, as vLLM knows them."""
        return [self._request_id(sample) for sample in self._samples.open]

    def _request_id(self, sample: VendorSample) -> str:
        return f"{self._number}-{sample.index}"

    def cancel(self) -> None:
        """Aborts what runs; called in this event loop."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Draws until every sample has finished.

        Raises:
            EngineError: vLLM failed.
        """
        if self._is_cancelled:
            return
        self._task = asyncio.current_task()
        seed = self._request.sampling.seed
        self._samples.enter(lambda index, start: _sample_seed(seed, index, start))
        await self._samples.run(self._sample)

    async def _sample(self, sample: VendorSample) -> None:
        # Samples of one version share a prompt's cache; another version's is of no use to them.
        await self._serving.wait_to_begin()
        inputs = PromptInputs(sample.prompt, str(self._samples.version()), self._images)
        stream = self._client.generate(
            self._request_id(sample), inputs, sample.choice, self._request.priority
        )
        async with aclosing(stream) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if self._samples.take(sample, delta):
                    return  # which aborts it, unless it has ended


def _settle_versions(sample: VendorSample, spans: VersionSpans) -> None:
    """Takes vLLM's own account of which weights drew which token, where it gives one.

    Raises:
        EngineError: tokens that were handed on already belong to other weights.
    """
    if not spans:
        return
    reported = [int(version) for version, start, end in spans for _ in range(start, end)]
    if len(reported) != len(sample.versions):
        raise EngineError(
            f"vLLM: version spans of {len(reported)} tokens for a sample of {len(sample.versions)}"
        )
    for known, version in zip(sample.versions[: sample.handed_on], reported, strict=False):
        if known != version:
            raise EngineError(
                f"vLLM: a token handed on as version {known} was drawn by version {version}"
            )
    sample.versions = reported


def _sample_seed(seed: int, index: int, start: int) -> int:
    """63 bits of (seed, sample, first token): vLLM seeds a generator a request, not a token."""
    text = f"{seed} {index} {start}".encode()
    digest = hashlib.blake2b(text, digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest, "little") >> 1
