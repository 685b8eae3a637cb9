"""Run a request in the event loop of a vendor's client until all its samples have finished.

Each sample is a separate request to the vendor's engine. The samples share the prompt's prefill
through the vendor's prefix cache, and each ends separately: at a stop token, a stop string or a
length limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from services.rollout.engines.protocol import GenerationRequest, SampleChunk
from services.rollout.engines.text import StopStringWatch
from services.rollout.engines.thread import ChunkStream
from services.rollout.engines.threaded_engine import EngineRun, FlushPolicy
from sluice.errors import EngineError, leaves
from sluice.types import FinishReason, PromptLogprobs, RoutedExperts

if TYPE_CHECKING:
    from PIL.Image import Image

    from services.rollout.engines.causal_lm import CheckpointLayout
    from services.rollout.engines.settings import VendorSettings

VersionSpans = Sequence[tuple[str, int, int]]
"""A vendor's own account of a sample: (version, first token, token after the last)."""
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_COUNT_INTERVAL_S = 0.25
"""Longest interval between counts of a request's new tokens."""


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """How to generate one sample; `top_k` -1 is off, `temperature` 0 is greedy.

    Attributes:
        prompt_logprobs: report the prompt's logprobs, too.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class EngineDelta:
    """New tokens of one sample, from a vendor's engine.

    Attributes:
        token_ids: the new tokens, in order.
        logprobs: of each token, under the distribution that sampled it.
        finish_reason: ``stop``, ``length`` or ``abort`` in the last delta.
        cached_tokens: prompt tokens that came from the prefix cache; ``None`` if not reported.
        version_spans: the vendor's account of versions, in the last delta.
        routing: experts of the prompt and all tokens but the last, in the last delta, if the vendor
            notes them.
        prompt_logprobs: logprobs of the sent prompt, in one delta of a sample that wants them.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    cached_tokens: int | None
    version_spans: tuple[tuple[str, int, int], ...] = ()
    routing: RoutedExperts | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """Images of one prompt, in order.

    Attributes:
        prompt: token ids with one placeholder an image.
        expanded_length: length of the same prompt with one placeholder for each merged patch.
        images: decoded, in sizes that the model's processor does not change.
        names: equal for equal files.
    """

    prompt: list[int]
    expanded_length: int
    images: tuple[Image, ...]
    names: tuple[str, ...]

    def continued(self, expanded: Sequence[int]) -> list[int]:
        """Return the prompt and what follows it in `expanded`; image tokens there are text."""
        return [*self.prompt, *expanded[self.expanded_length :]]


@dataclass(slots=True, eq=False)
class VendorSample:
    """One running sample.

    Attributes:
        index: its number in the group.
        prompt: the request's prompt, and the tokens that are continued.
        choice: how it is sampled.
        watch: looks for strings that end it.
        versions: the version that sampled each token.
        num_posted: tokens that went to the consumer.
        token_ids: tokens not posted yet.
        logprobs: logprobs of `token_ids`.
        prefill_known: whether its prompt was counted.
    """

    index: int
    prompt: list[int]
    choice: SamplingChoice
    watch: StopStringWatch | None = None
    versions: list[int] = field(default_factory=list)
    num_posted: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prefill_known: bool = False

    def num_taken(self) -> int:
        """Return the number of its tokens so far, without those that it continues."""
        return len(self.versions)


class _Core(Protocol):
    """The methods of `vendor_engines.engine.VendorCore` that a run uses."""

    first_goes_ahead: bool
    settings: VendorSettings
    layout: CheckpointLayout

    def seed(self, request: GenerationRequest, index: int, num_continued: int) -> int: ...
    def deltas(self, run: RequestRun, sample: VendorSample) -> AsyncIterator[EngineDelta]: ...
    def so_far(self, run: RequestRun, sample: VendorSample, /) -> EngineDelta | None: ...
    def serving_version(self) -> int: ...
    def count(self, sampled: int, prompt: int = 0, cached: int = 0) -> None: ...
    def check_versions(self, sample: VendorSample, spans: VersionSpans) -> None: ...
    async def wait_to_begin(self) -> None: ...


class RequestRun(EngineRun):
    """Samples one request. All methods are called in the event loop of the vendor's client.

    Args:
        number: the request's number, unique in this engine.
        vendor: the core of the vendor's engine.
        stream: takes the chunks.
        images: of the request's prompt.
    """

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        pace: FlushPolicy,
        vendor: _Core,
        stream: ChunkStream,
        images: Any = None,  # noqa: ANN401 - each vendor's own
    ) -> None:
        super().__init__(request, pace, stream, images)
        self.number = number
        self._vendor = vendor
        self._open: dict[int, VendorSample] = {}
        self._first_open: VendorSample | None = None
        self._prompt_is_cached = asyncio.Event()
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False
        self._sent: set[VendorSample] = set()

    @property
    def open(self) -> list[VendorSample]:
        """Samples that have not finished, in the order of the request."""
        return list(self._open.values())

    @property
    def reads_tokens(self) -> bool:
        """Whether every token is needed as soon as it is sampled, to stream it or to find stop
        strings.

        The tokens of all other requests are read together: when a sample ends, at intervals, and
        before weights change.
        """
        return self.pace.every_token or bool(self.request.sampling.stop)

    def catch_up(self) -> None:
        """Take the tokens sampled so far, all by the serving weights."""
        if self.reads_tokens:
            return
        for sample in self.open:
            if sample in self._sent and (delta := self._vendor.so_far(self, sample)) is not None:
                self._take(sample, delta)

    def cancel(self) -> None:
        """Abort running samples."""
        # An aborted sample's tokens are counted too, except those that SGLang's scheduler holds:
        # they are in no account.
        self.catch_up()
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def give_up(self) -> None:
        """End all samples as aborted with the tokens that they have."""
        self.catch_up()
        self._post_tokens(self.open, FinishReason.ABORTED)
        self.cancel()

    async def run(self) -> None:
        """Sample until every sample has finished; hand tokens on at the request's pace.

        Raises:
            EngineError: a sample failed; the others are cancelled.
        """
        if self._is_cancelled:
            return
        self._task = asyncio.current_task()
        for index in self.request.sample_indexes:
            self._enter(index)
        if self._vendor.first_goes_ahead:
            self._first_open = next(iter(self.open), None)
        if self._first_open is None:
            self._prompt_is_cached.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                generating = [tasks.create_task(self._run_sample(sample)) for sample in self.open]
                ticking = tasks.create_task(self._post_regularly())
                # Not the group's own wait: the ticking task would never end.
                if generating:
                    await asyncio.wait(generating)
                ticking.cancel()
        except* EngineError as errors:
            raise leaves(errors)[0] from errors

    def _enter(self, index: int) -> None:
        """Open one sample, or end it at once if its partial is complete already."""
        request, sampling = self.request, self.request.sampling
        partial: list[int] = next(
            (p.token_ids.tolist() for p in request.partials if p.sample_index == index), []
        )
        prompt = [*request.prompt_token_ids.tolist(), *partial]
        eos = () if sampling.ignore_eos else self._vendor.layout.eos_token_ids
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *eos)))
        # A partial counts for `max_tokens`, and is part of the prompt that is sent.
        longest = self._vendor.settings.max_model_len
        capacity = min(sampling.max_tokens - len(partial), longest - len(prompt))
        watch = request.watch()
        is_ended = watch is not None and watch.push(partial) is not None
        if is_ended or (partial and partial[-1] in stops):
            self.stream.post([self._end_chunk(index, FinishReason.STOP)])
        elif capacity < 1:
            self.stream.post([self._end_chunk(index, FinishReason.LENGTH)])
        else:
            choice = SamplingChoice(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=capacity,
                seed=self._vendor.seed(request, index, len(partial)),
                stop_token_ids=stops,
                prompt_logprobs=request.with_prompt_logprobs and not self._open,
            )
            self._open[index] = VendorSample(index, prompt, choice, watch)

    async def _post_regularly(self) -> None:
        if self.pace.every_token:
            return
        interval_s = self.pace.interval_s
        counts = 1 if interval_s is None else ceil(interval_s / _COUNT_INTERVAL_S)
        for number in count(1):
            await asyncio.sleep(_COUNT_INTERVAL_S if interval_s is None else interval_s / counts)
            self.catch_up()
            if interval_s is not None and number % counts == 0:
                self._post_tokens(self.open, None)

    async def _run_sample(self, sample: VendorSample) -> None:
        if sample is not self._first_open:
            await self._prompt_is_cached.wait()
        try:
            await self._vendor.wait_to_begin()
            self._sent.add(sample)
            await self._take_all(sample)
        finally:
            self._sent.discard(sample)
            # A first sample that failed must not keep the others waiting.
            self._prompt_is_cached.set()

    async def _take_all(self, sample: VendorSample) -> None:
        stream = self._vendor.deltas(self, sample)
        async with aclosing(stream) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                self._prompt_is_cached.set()
                if self._take(sample, delta):
                    return  # closing the stream aborts the sample, unless it has ended

    def _take(self, sample: VendorSample, delta: EngineDelta) -> bool:
        """Take new tokens of a sample; return whether no more are wanted.

        That is so if a string ends it, or if it ended while the tokens were on their way.
        """
        self._count(sample, delta)
        if sample.index not in self._open:  # given up while these tokens were on their way
            return True
        if delta.prompt_logprobs is not None:
            self.stream.post([self._prompt_chunk(sample.index, delta.prompt_logprobs)])
        end = None if sample.watch is None else sample.watch.push(delta.token_ids)
        tokens = delta.token_ids[:end]
        if tokens:
            sample.token_ids += tokens
            sample.logprobs += delta.logprobs[:end]
            sample.versions += [self._vendor.serving_version()] * len(tokens)
        if end is not None:
            self._post_tokens([sample], FinishReason.STOP)
        elif delta.finish_reason is not None:
            # Before the last tokens go out: this may still correct their versions.
            self._vendor.check_versions(sample, delta.version_spans)
            reason = _REASONS.get(delta.finish_reason, FinishReason.ABORTED)
            self._post_tokens([sample], reason, self._routing(sample, delta, reason))
        elif self.pace.every_token:
            self._post_tokens([sample], None)
        return end is not None

    def _count(self, sample: VendorSample, delta: EngineDelta) -> None:
        prompt = cached = 0
        if not sample.prefill_known and delta.cached_tokens is not None:
            sample.prefill_known = True
            prompt, cached = len(sample.prompt), delta.cached_tokens
        self._vendor.count(len(delta.token_ids), prompt, cached)
        self.sampled += len(delta.token_ids)

    def _routing(
        self, sample: VendorSample, delta: EngineDelta, reason: FinishReason
    ) -> RoutedExperts | None:
        """Return the experts of a finished sample, if wanted and complete.

        A vendor may lose some, such as those of a prompt that has left its caches. Where weights
        changed within the sample and the cache was computed again, vLLM reports the first passes'
        experts, so samples of several versions have none.
        """
        routing = delta.routing
        if routing is None or not self.request.with_routing or reason is FinishReason.ABORTED:
            return None
        if len(set(sample.versions)) > 1:
            return None
        tokens = len(sample.versions)
        return routing if tokens and len(routing) == len(sample.prompt) + tokens - 1 else None

    def _post_tokens(
        self,
        samples: Sequence[VendorSample],
        reason: FinishReason | None,
        routing: RoutedExperts | None = None,
    ) -> None:
        """Post the samples' new tokens; with a `reason` the samples end."""
        chunks: list[SampleChunk] = []
        for sample in samples:
            new_chunks = _new_chunks(sample, singly=self.pace.every_token)
            if reason is not None:
                last_chunk = (
                    new_chunks.pop() if new_chunks else self._end_chunk(sample.index, reason)
                )
                new_chunks.append(replace(last_chunk, finish_reason=reason, routing=routing))
                del self._open[sample.index]
            chunks += new_chunks
        if chunks:
            self.stream.post(chunks)

    def _prompt_chunk(self, index: int, all_logprobs: PromptLogprobs) -> SampleChunk:
        """Return a chunk with the prompt's logprobs, without those of continued tokens after it."""
        own_part = slice(self.request.prompt_token_ids.size - 1)
        prompt_logprobs = PromptLogprobs(
            all_logprobs.logprobs[own_part],
            all_logprobs.top_token_ids[own_part],
            all_logprobs.top_logprobs[own_part],
        )
        version = self._vendor.serving_version()
        no_logprobs = np.zeros(0, np.float32)
        return SampleChunk(
            index,
            np.zeros(0, np.uint32),
            no_logprobs,
            version,
            None,
            prompt_logprobs=prompt_logprobs,
        )

    def _end_chunk(self, index: int, reason: FinishReason) -> SampleChunk:
        version = self._vendor.serving_version()
        return SampleChunk(index, np.zeros(0, np.uint32), np.zeros(0, np.float32), version, reason)


def _new_chunks(sample: VendorSample, *, singly: bool) -> list[SampleChunk]:
    """Return a sample's unposted tokens and mark them as posted.

    A chunk holds one token, or neighbours of one version: a busy client posts several at once.
    """
    chunks: list[SampleChunk] = []
    start = 0
    versions = sample.versions[sample.num_posted :]
    runs = (
        [(version, 1) for version in versions]
        if singly
        else [(version, len(list(run))) for version, run in groupby(versions)]
    )
    for version, tokens in runs:
        end = start + tokens
        token_ids = np.array(sample.token_ids[start:end], np.uint32)
        logprobs = np.array(sample.logprobs[start:end], np.float32)
        chunks.append(SampleChunk(sample.index, token_ids, logprobs, version, None))
        start = end
    sample.num_posted += start
    sample.token_ids, sample.logprobs = [], []
    return chunks
