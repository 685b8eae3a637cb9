"""One request in SGLang's event loop: its samples are SGLang requests of their own.

The first one goes ahead until the prompt is in SGLang's prefix cache, where the others find it.
A sample of which no token has come can be put back: SGLang forgets it, and it is sent anew when
SGLang draws.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

from services.rollout.engines.protocol import GenerationRequest, SampleChunk
from services.rollout.engines.sglang.client import SglangClient
from services.rollout.engines.sglang.sampler import stream_seed
from services.rollout.engines.vendor import samples
from services.rollout.engines.vendor.samples import (
    ModelLimits,
    Pace,
    RequestSamples,
    VendorSample,
    VersionSpans,
)
from sluice.errors import EngineError
from sluice.types import FinishReason


class SglangServingState(samples.ServingState, Protocol):
    """What serves at the moment, and who counts."""

    @property
    def salt(self) -> str:
        """Prompts whose cache was computed by other weights have another one."""
        ...

    async def wait_to_begin(self) -> None:
        """Returns when SGLang draws: the weights of `salt` compute the prompts sent then."""
        ...


class SglangRequest:
    """Draws the samples of one request.

    Args:
        number: of the request, unique in this engine.
        post: takes chunks as they come; called in this event loop.
    """

    def __init__(
        self,
        client: SglangClient,
        number: int,
        request: GenerationRequest,
        limits: ModelLimits,
        pace: Pace,
        serving: SglangServingState,
        post: Callable[[list[SampleChunk]], None],
    ) -> None:
        self._client, self._number, self._serving = client, number, serving
        self._request = request
        self._samples = RequestSamples(
            "SGLang", request, limits, pace, serving, _check_versions, post
        )
        self._first: VendorSample | None = None
        self._prompt_is_cached = asyncio.Event()
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False
        self._sent: dict[VendorSample, asyncio.Task[object] | None] = {}
        self._put_back: set[VendorSample] = set()
        self._none_is_sent = asyncio.Event()
        self._none_is_sent.set()

    @property
    def sampled(self) -> int:
        """Tokens so far."""
        return self._samples.sampled

    def cancel(self) -> None:
        """Aborts what runs; called in this event loop."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def give_up(self) -> None:
        """Ends all samples as aborted with what has come of them; called in this event loop."""
        self._samples.end(FinishReason.ABORTED)
        self.cancel()

    def put_back(self) -> None:
        """Takes samples of which no token has come out of SGLang; called in this event loop.

        They are sent anew when SGLang draws. Their seeds have them draw the same tokens then.
        """
        for sample in self._samples.open:
            task = self._sent.get(sample)
            if task is not None and not sample.versions and sample not in self._put_back:
                self._put_back.add(sample)
                task.cancel()

    async def until_none_is_sent(self) -> None:
        """Returns when SGLang has none of the samples."""
        await self._none_is_sent.wait()

    async def run(self) -> None:
        """Draws until every sample has finished.

        Raises:
            EngineError: SGLang failed.
        """
        if self._is_cancelled:
            return
        self._task = asyncio.current_task()
        seed, start = self._request.sampling.seed, self._request.prompt_token_ids.size
        self._samples.enter(lambda index, _: stream_seed(seed, index, start))
        self._first = next(iter(self._samples.open), None)
        await self._samples.run(self._sample_in_turn)

    async def _sample_in_turn(self, sample: VendorSample) -> None:
        if sample is not self._first:
            await self._prompt_is_cached.wait()
        await self._sample(sample)

    async def _sample(self, sample: VendorSample) -> None:
        attempt = 0
        try:
            await self._serving.wait_to_begin()
            while not await self._stays(sample, attempt):
                attempt += 1
                await self._serving.wait_to_begin()
        finally:
            self._prompt_is_cached.set()

    async def _stays(self, sample: VendorSample, attempt: int) -> bool:
        """Sends a sample and takes what comes of it; false where it was put back meanwhile."""
        task = asyncio.current_task()
        self._sent[sample] = task
        self._none_is_sent.clear()
        try:
            await self._take_all(sample, attempt)
        except asyncio.CancelledError:
            # The run may have been cancelled as well.
            if sample not in self._put_back or task is None or task.uncancel():
                raise
            return False
        finally:
            self._put_back.discard(sample)
            del self._sent[sample]
            if not self._sent:
                self._none_is_sent.set()
        return True

    async def _take_all(self, sample: VendorSample, attempt: int) -> None:
        # SGLang aborts by how names begin: none may be the beginning of another.
        name = f"{self._number}-{sample.index}-{attempt}."
        stream = self._client.generate(
            name, sample.prompt, self._serving.salt, sample.choice, self._request.priority
        )
        async with aclosing(stream) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                self._prompt_is_cached.set()
                if self._samples.take(sample, delta):
                    return  # which aborts it, unless it has ended


def _check_versions(sample: VendorSample, spans: VersionSpans) -> None:
    """Holds SGLang's account of which weights drew which token against ours.

    Raises:
        EngineError: they differ.
    """
    reported = [version for version, start, end in spans for _ in range(start, end)]
    if reported and reported != [str(version) for version in sample.versions]:
        raise EngineError(
            f"SGLang: tokens that came while {sorted(set(sample.versions))} served were drawn by "
            f"{sorted(set(reported))}: {list(spans)}"
        )
