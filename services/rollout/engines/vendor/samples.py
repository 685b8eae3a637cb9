"""The samples of one request while a vendor's engine generates them: where they end, and their
tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from services.rollout.engines.protocol import GenerationRequest, SampleChunk
from services.rollout.engines.text import StopStringWatch
from sluice.errors import EngineError
from sluice.types import FinishReason


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """How one sample is drawn; `top_k` -1 is off, `temperature` 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What has come of one sample since the last one.

    Attributes:
        token_ids: drawn, in order.
        logprobs: of each under the distribution it was drawn from.
        finish_reason: ``stop``, ``length`` or ``abort`` on the last one.
        cached_tokens: of the prompt, taken from the prefix cache; ``None`` if not told.
        version_spans: (version, first token, token after the last), on the last one.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    cached_tokens: int | None
    version_spans: tuple[tuple[str, int, int], ...] = ()


# One request's samples while a vendor's engine draws them: where they end, and what came of
# them.
#
# Each is a request of the vendor's own. Used in the event loop of the vendor's client.


VersionSpans = Sequence[tuple[str, int, int]]
"""An engine's own account of a sample: (version, first token, token after the last)."""
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class ServingState(Protocol):
    """Which weights draw, and who counts."""

    @property
    def version(self) -> int | None:
        """Draws the tokens."""
        ...

    def count(self, sampled: int, prefilled: int) -> None:
        """Takes note of response tokens drawn and of prompt tokens computed."""
        ...


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Where samples end; `eos_token_ids` unless they are to be ignored."""

    max_model_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pace:
    """When tokens of unfinished samples are handed on; see `Engine.generate`."""

    every_token: bool
    interval_s: float | None


@dataclass(slots=True, eq=False)
class VendorSample:
    """One sample under way.

    Attributes:
        index: in its group.
        prompt: the request's, and the tokens that are continued.
        choice: how it is drawn.
        watch: for strings that end it.
        versions: that drew its tokens, one for each.
        handed_on: how many of its tokens were.
        token_ids: those that were not.
        logprobs: of `token_ids`.
        prefill_known: whether its prompt was counted.
    """

    index: int
    prompt: list[int]
    choice: SamplingChoice
    watch: StopStringWatch | None = None
    versions: list[int] = field(default_factory=list)
    handed_on: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prefill_known: bool = False


class RequestSamples:
    """See the module.

    Args:
        engine: names the engine in errors.
        settle: holds a finished sample's `versions` against the engine's own account of them.
        post: takes chunks as they come; called in this event loop.
    """

    def __init__(
        self,
        engine: str,
        request: GenerationRequest,
        limits: ModelLimits,
        pace: Pace,
        serving: ServingState,
        settle: Callable[[VendorSample, VersionSpans], None],
        post: Callable[[list[SampleChunk]], None],
    ) -> None:
        self._engine, self._request, self._limits, self._pace = engine, request, limits, pace
        self._serving, self._settle, self._post = serving, settle, post
        self._open: dict[int, VendorSample] = {}
        self.sampled = 0

    @property
    def open(self) -> list[VendorSample]:
        """Those that have not finished, in the order of the request."""
        return list(self._open.values())

    def enter(self, seed: Callable[[int, int], int]) -> None:
        """Opens the request's samples; those that are complete already end at once.

        Args:
            seed: of a sample, by its index and the number of tokens that it continues.
        """
        for index in self._request.sample_indexes:
            self._enter(index, seed)

    def _enter(self, index: int, seed: Callable[[int, int], int]) -> None:
        request, sampling = self._request, self._request.sampling
        partial: list[int] = next(
            (p.token_ids.tolist() for p in request.partials if p.sample_index == index), []
        )
        prompt = [*request.prompt_token_ids.tolist(), *partial]
        eos = () if sampling.ignore_eos else self._limits.eos_token_ids
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *eos)))
        capacity = min(sampling.max_tokens - len(partial), self._limits.max_model_len - len(prompt))
        watch = request.watch()
        is_ended = watch is not None and watch.push(partial) is not None
        if is_ended or (partial and partial[-1] in stops):
            self._post([self._end_of(index, FinishReason.STOP)])
        elif capacity < 1:
            self._post([self._end_of(index, FinishReason.LENGTH)])
        else:
            choice = SamplingChoice(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=capacity,
                seed=seed(index, len(partial)),
                stop_token_ids=stops,
            )
            self._open[index] = VendorSample(index, prompt, choice, watch)

    async def run(self, generate: Callable[[VendorSample], Coroutine[Any, Any, None]]) -> None:
        """Has every open sample drawn, and hands tokens on at the request's pace meanwhile.

        Raises:
            EngineError: of a sample that failed; the others are cancelled.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                generating = [tasks.create_task(generate(sample)) for sample in self.open]
                ticking = tasks.create_task(self._tick())
                if generating:
                    await asyncio.wait(generating)
                ticking.cancel()
        except* EngineError as errors:
            raise _first(errors) from errors

    async def _tick(self) -> None:
        if self._pace.interval_s is None or self._pace.every_token:
            return
        while True:
            await asyncio.sleep(self._pace.interval_s)
            self._hand_on(self.open, None)

    def take(self, sample: VendorSample, delta: Delta) -> bool:
        """Takes what came of a sample; returns whether no more of it is wanted.

        That is where a string ends it, or where it has ended while this was on its way.
        """
        self._count(sample, delta)
        if sample.index not in self._open:
            return True
        end = None if sample.watch is None else sample.watch.push(delta.token_ids)
        tokens = delta.token_ids[:end]
        if tokens:
            sample.token_ids += tokens
            sample.logprobs += delta.logprobs[:end]
            sample.versions += [self.version()] * len(tokens)
        if end is not None:
            self._hand_on([sample], FinishReason.STOP)
        elif delta.finish_reason is not None:
            self._settle(sample, delta.version_spans)
            self._hand_on([sample], _REASONS.get(delta.finish_reason, FinishReason.ABORTED))
        elif self._pace.every_token:
            self._hand_on([sample], None)
        return end is not None

    def end(self, reason: FinishReason) -> None:
        """Ends all samples with what has come of them."""
        self._hand_on(self.open, reason)

    def version(self) -> int:
        """That draws tokens.

        Raises:
            EngineError: there is none yet.
        """
        version = self._serving.version
        if version is None:
            raise EngineError(f"{self._engine}: a sample runs before the first weights")
        return version

    def _count(self, sample: VendorSample, delta: Delta) -> None:
        prefilled = 0
        if not sample.prefill_known and delta.cached_tokens is not None:
            sample.prefill_known = True
            prefilled = len(sample.prompt) - delta.cached_tokens
        self._serving.count(len(delta.token_ids), prefilled)
        self.sampled += len(delta.token_ids)

    def _hand_on(self, samples: Sequence[VendorSample], reason: FinishReason | None) -> None:
        chunks: list[SampleChunk] = []
        for sample in samples:
            taken = _taken(sample, singly=self._pace.every_token)
            if reason is not None:
                last = taken.pop() if taken else self._end_of(sample.index, reason)
                taken.append(replace(last, finish_reason=reason))
                del self._open[sample.index]
            chunks += taken
        if chunks:
            self._post(chunks)

    def _end_of(self, index: int, reason: FinishReason) -> SampleChunk:
        return SampleChunk(
            index, np.zeros(0, np.uint32), np.zeros(0, np.float32), self.version(), reason
        )


def _taken(sample: VendorSample, *, singly: bool) -> list[SampleChunk]:
    """Its tokens that were not handed on, which they are by that.

    A chunk holds one token, or the neighbours of one version: a busy client hands several on.
    """
    chunks: list[SampleChunk] = []
    start = 0
    versions = sample.versions[sample.handed_on :]
    runs = [(one, 1) for one in versions] if singly else _runs(versions)
    for version, tokens in runs:
        end = start + tokens
        token_ids = np.array(sample.token_ids[start:end], np.uint32)
        logprobs = np.array(sample.logprobs[start:end], np.float32)
        chunks.append(SampleChunk(sample.index, token_ids, logprobs, version, None))
        start = end
    sample.handed_on += start
    sample.token_ids, sample.logprobs = [], []
    return chunks


def _runs(versions: Sequence[int]) -> list[tuple[int, int]]:
    return [(version, len(list(run))) for version, run in groupby(versions)]


def _first(errors: BaseExceptionGroup[EngineError]) -> EngineError:
    one: BaseException = errors
    while isinstance(one, BaseExceptionGroup):
        one = one.exceptions[0]
    return one if isinstance(one, EngineError) else EngineError(str(one))
