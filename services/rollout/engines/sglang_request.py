"""One request in SGLang's event loop: its samples are SGLang requests of their own.

The first one goes ahead until the prompt is in SGLang's prefix cache, where the others find it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from services.rollout.engines.protocol import GenerationRequest, SampleChunk
from services.rollout.engines.sglang_features import SglangClient
from services.rollout.engines.sglang_sampler import stream_seed
from services.rollout.engines.sglang_stream import Delta, SamplingChoice
from services.rollout.engines.stop_strings import StopStringWatch
from sluice.errors import EngineError
from sluice.types import FinishReason

__all__ = ["ModelLimits", "Pace", "RequestRun", "Serving"]

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Serving(Protocol):
    """What serves at the moment, and who counts."""

    @property
    def version(self) -> int | None:
        """Draws the tokens."""
        ...

    @property
    def salt(self) -> str:
        """Prompts whose cache was computed by other weights have another one."""
        ...

    def count(self, drawn: int, prefilled: int) -> None:
        """Takes note of response tokens drawn and of prompt tokens computed."""
        ...

    async def wait_to_begin(self) -> None:
        """Returns when SGLang draws: the weights of `salt` compute the prompts sent then."""
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
class _Part:
    """Tokens of one version that were not handed on yet."""

    version: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Sample:
    index: int
    prompt: list[int]  # a partial's tokens included
    choice: SamplingChoice
    watch: StopStringWatch | None = None
    parts: list[_Part] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of every token that came
    prefill_known: bool = False


class RequestRun:
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
        serving: Serving,
        post: Callable[[list[SampleChunk]], None],
    ) -> None:
        self._client, self._number, self._request = client, number, request
        self._limits, self._pace, self._serving, self._post = limits, pace, serving, post
        self._samples: dict[int, _Sample] = {}
        self._prompt_is_cached = asyncio.Event()
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False
        self.has_begun = False
        self.drawn = 0

    def cancel(self) -> None:
        """Aborts what runs; called in this event loop."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def give_up(self) -> None:
        """Ends all samples as aborted with what has come of them; called in this event loop."""
        self._hand_on(list(self._samples.values()), FinishReason.ABORTED)
        self.cancel()

    async def run(self, gate: asyncio.Event) -> None:
        """Draws until every sample has finished.

        Args:
            gate: nothing is begun before it is set.

        Raises:
            EngineError: SGLang failed.
        """
        if self._is_cancelled:
            return
        self._task = asyncio.current_task()
        for index in self._request.sample_indexes:
            self._enter(index)
        await gate.wait()
        self.has_begun = True
        samples = list(self._samples.values())
        try:
            async with asyncio.TaskGroup() as tasks:
                drawing = [tasks.create_task(self._draw(one)) for one in samples[:1]]
                drawing += [tasks.create_task(self._follow(one)) for one in samples[1:]]
                ticking = tasks.create_task(self._tick())
                if drawing:
                    await asyncio.wait(drawing)
                ticking.cancel()
        except* EngineError as errors:
            raise _first(errors) from errors

    def _enter(self, index: int) -> None:
        request, sampling = self._request, self._request.sampling
        partial: list[int] = next(
            (p.token_ids.tolist() for p in request.partials if p.sample_index == index), []
        )
        begun: list[int] = request.prompt_token_ids.tolist()
        eos = () if sampling.ignore_eos else self._limits.eos_token_ids
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *eos)))
        length = len(begun) + len(partial)
        room = min(sampling.max_tokens - len(partial), self._limits.max_model_len - length)
        watch = request.watch()
        is_ended = watch is not None and watch.push(partial) is not None
        if is_ended or (partial and partial[-1] in stops):
            self._post([_chunk(index, _Part(self._version()), FinishReason.STOP)])
        elif room < 1:
            self._post([_chunk(index, _Part(self._version()), FinishReason.LENGTH)])
        else:
            choice = SamplingChoice(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=room,
                seed=stream_seed(sampling.seed, index, len(begun)),
                stop_token_ids=stops,
            )
            self._samples[index] = _Sample(index, [*begun, *partial], choice, watch)

    def _version(self) -> int:
        version = self._serving.version
        if version is None:
            raise EngineError("SGLang: a sample runs before the first weights")
        return version

    async def _follow(self, sample: _Sample) -> None:
        await self._prompt_is_cached.wait()
        await self._draw(sample)

    async def _draw(self, sample: _Sample) -> None:
        await self._serving.wait_to_begin()
        # SGLang aborts by how names begin: none may be the beginning of another.
        name = f"{self._number}-{sample.index}."
        stream = self._client.generate(
            name, sample.prompt, self._serving.salt, sample.choice, self._request.priority
        )
        try:
            async with aclosing(stream) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    self._prompt_is_cached.set()
                    if self._take(sample, delta):
                        return  # which aborts it, unless it has ended
        finally:
            self._prompt_is_cached.set()

    def _take(self, sample: _Sample, delta: Delta) -> bool:
        """Takes what came; returns whether a string ends the sample."""
        prefilled = 0
        if not sample.prefill_known and delta.cached_tokens is not None:
            sample.prefill_known = True
            prefilled = len(sample.prompt) - delta.cached_tokens
        self._serving.count(len(delta.token_ids), prefilled)
        self.drawn += len(delta.token_ids)
        end = None if sample.watch is None else sample.watch.push(delta.token_ids)
        if delta.token_ids:
            version = self._version()
            sample.versions += [version] * len(delta.token_ids)
            if not sample.parts or sample.parts[-1].version != version:
                sample.parts.append(_Part(version))
            sample.parts[-1].token_ids += delta.token_ids[:end]
            sample.parts[-1].logprobs += delta.logprobs[:end]
        if end is not None:
            self._hand_on([sample], FinishReason.STOP)
        elif delta.finish_reason is not None:
            _check_versions(sample, delta.version_spans)
            self._hand_on([sample], _REASONS.get(delta.finish_reason, FinishReason.ABORTED))
        elif self._pace.every_token:
            self._hand_on([sample], None)
        return end is not None

    async def _tick(self) -> None:
        if self._pace.interval_s is None or self._pace.every_token:
            return
        while True:
            await asyncio.sleep(self._pace.interval_s)
            self._hand_on(list(self._samples.values()), None)

    def _hand_on(self, samples: Sequence[_Sample], reason: FinishReason | None) -> None:
        chunks: list[SampleChunk] = []
        for sample in samples:
            parts, sample.parts = sample.parts, []
            if reason is not None:
                last = parts.pop() if parts else _Part(self._version())
                del self._samples[sample.index]
            chunks += [_chunk(sample.index, part, None) for part in parts]
            if reason is not None:
                chunks.append(_chunk(sample.index, last, reason))
        if chunks:
            self._post(chunks)


def _check_versions(sample: _Sample, spans: Sequence[tuple[str, int, int]]) -> None:
    """Holds SGLang's account of which weights drew which token against ours.

    Raises:
        EngineError: they differ.
    """
    told = [version for version, start, end in spans for _ in range(start, end)]
    if told and told != [str(version) for version in sample.versions]:
        raise EngineError(
            f"SGLang: tokens that came while {sorted(set(sample.versions))} served were drawn by "
            f"{sorted(set(told))}: {list(spans)}"
        )


def _chunk(index: int, part: _Part, reason: FinishReason | None) -> SampleChunk:
    return SampleChunk(
        index,
        np.array(part.token_ids, np.uint32),
        np.array(part.logprobs, np.float32),
        part.version,
        reason,
    )


def _first(errors: BaseExceptionGroup[EngineError]) -> EngineError:
    one: BaseException = errors
    while isinstance(one, BaseExceptionGroup):
        one = one.exceptions[0]
    return one if isinstance(one, EngineError) else EngineError(str(one))
