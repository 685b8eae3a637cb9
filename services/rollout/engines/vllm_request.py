"""One request in vLLM's event loop: its samples are vLLM requests of their own.

They share the prompt's prefill through vLLM's prefix cache, and each can end by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from services.rollout.engines.protocol import GenerationRequest, SampleChunk
from services.rollout.engines.stop_strings import StopStringWatch
from services.rollout.engines.vllm_features import Delta, PromptInputs, SamplingChoice, VllmClient
from services.rollout.engines.vllm_images import PromptImages
from sluice.errors import EngineError
from sluice.types import FinishReason

__all__ = ["ModelLimits", "Pace", "RequestRun", "Serving"]

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}
_SEED_BYTES = 8


class Serving(Protocol):
    """What serves at the moment, and who counts."""

    @property
    def version(self) -> int | None:
        """Draws the tokens."""
        ...

    def count(self, drawn: int, prefilled: int) -> None:
        """Takes note of response tokens drawn and of prompt tokens computed."""
        ...

    async def wait_to_begin(self) -> None:
        """Returns when no swap of weights is under way: `version` draws what is begun then."""
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
    token_ids: list[int]
    logprobs: list[float]


@dataclass(slots=True, eq=False)
class _Sample:
    index: int
    request_id: str
    prompt: list[int]  # a partial's tokens included
    choice: SamplingChoice
    watch: StopStringWatch | None = None
    drawn: int = 0
    handed_on: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens)
    parts: list[_Part] = field(default_factory=list)
    prefill_known: bool = False


class RequestRun:
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
        serving: Serving,
        post: Callable[[list[SampleChunk]], None],
    ) -> None:
        self._client, self._number = client, number
        self._request, self._images = request, images
        self._limits, self._pace, self._serving, self._post = limits, pace, serving, post
        self._samples: dict[int, _Sample] = {}
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False
        self.drawn = 0

    @property
    def request_ids(self) -> list[str]:
        """Of the samples, as vLLM knows them."""
        return [sample.request_id for sample in self._samples.values()]

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
        for index in self._request.sample_indexes:
            self._enter(index)
        try:
            async with asyncio.TaskGroup() as tasks:
                drawing = [tasks.create_task(self._draw(one)) for one in self._samples.values()]
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
        prompt = [*request.prompt_token_ids.tolist(), *partial]
        eos = () if sampling.ignore_eos else self._limits.eos_token_ids
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *eos)))
        room = min(sampling.max_tokens - len(partial), self._limits.max_model_len - len(prompt))
        watch = request.watch()
        is_ended = watch is not None and watch.push(partial) is not None
        if is_ended or (partial and partial[-1] in stops):
            self._post([self._empty(index, FinishReason.STOP)])
        elif room < 1:
            self._post([self._empty(index, FinishReason.LENGTH)])
        else:
            choice = SamplingChoice(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=room,
                seed=_sample_seed(sampling.seed, index, len(partial)),
                stop_token_ids=stops,
            )
            name = f"{self._number}-{index}"
            self._samples[index] = _Sample(index, name, prompt, choice, watch)

    def _empty(self, index: int, reason: FinishReason) -> SampleChunk:
        return _chunk(index, _Part(self._version(), [], []), reason)

    def _version(self) -> int:
        version = self._serving.version
        if version is None:
            raise EngineError("vLLM: a sample runs before the first weights")
        return version

    async def _draw(self, sample: _Sample) -> None:
        # Samples of one version share a prompt's cache; another version's is of no use to them.
        await self._serving.wait_to_begin()
        inputs = PromptInputs(sample.prompt, str(self._version()), self._images)
        stream = self._client.generate(
            sample.request_id, inputs, sample.choice, self._request.priority
        )
        async with aclosing(stream) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                end = None if sample.watch is None else sample.watch.push(delta.token_ids)
                self._take(sample, delta, end)
                if end is not None:
                    return  # which aborts it, unless it has ended

    def _take(self, sample: _Sample, delta: Delta, end: int | None) -> None:
        """Takes what came; only `end` tokens of it belong to a sample that a string ends."""
        prefilled = 0
        if not sample.prefill_known and delta.cached_tokens is not None:
            sample.prefill_known = True
            prefilled = len(sample.prompt) - delta.cached_tokens
        self._serving.count(len(delta.token_ids), prefilled)
        self.drawn += len(delta.token_ids)
        sample.drawn += len(delta.token_ids)
        if delta.token_ids:
            tokens, logprobs = list(delta.token_ids)[:end], list(delta.logprobs)[:end]
            sample.parts.append(_Part(self._version(), tokens, logprobs))
        if end is not None:
            self._hand_on([sample], FinishReason.STOP)
        elif delta.finish_reason is not None:
            _settle_versions(sample, delta.version_spans)
            self._hand_on([sample], _REASONS.get(delta.finish_reason, FinishReason.ABORTED))
        elif self._pace.every_token:
            self._hand_on([sample], None)

    async def _tick(self) -> None:
        if self._pace.interval_s is None or self._pace.every_token:
            return
        while True:
            await asyncio.sleep(self._pace.interval_s)
            self._hand_on(list(self._samples.values()), None)

    def _hand_on(self, samples: Sequence[_Sample], reason: FinishReason | None) -> None:
        chunks: list[SampleChunk] = []
        for sample in samples:
            parts = _merged(sample.parts)
            sample.parts = []
            sample.handed_on += [(part.version, len(part.token_ids)) for part in parts]
            chunks += [_chunk(sample.index, part, None) for part in parts]
            if reason is not None:
                last = chunks.pop() if parts else self._empty(sample.index, reason)
                chunks.append(
                    SampleChunk(
                        sample.index,
                        last.token_ids,
                        last.behavior_logprobs,
                        last.version,
                        reason,
                    )
                )
                del self._samples[sample.index]
        if chunks:
            self._post(chunks)


def _settle_versions(sample: _Sample, spans: Sequence[tuple[str, int, int]]) -> None:
    """Takes vLLM's own account of which weights drew which token, where it gives one.

    Raises:
        EngineError: tokens that were handed on already belong to other weights.
    """
    if not spans:
        return
    versions = [int(version) for version, start, end in spans for _ in range(start, end)]
    if len(versions) != sample.drawn:
        raise EngineError(
            f"vLLM: version spans of {len(versions)} tokens for a sample of {sample.drawn}"
        )
    cursor = 0
    for version, tokens in sample.handed_on:
        if any(other != version for other in versions[cursor : cursor + tokens]):
            raise EngineError(
                f"vLLM: tokens handed on as version {version} were drawn by {set(versions)}"
            )
        cursor += tokens
    whole = _merged([_Part(0, part.token_ids, part.logprobs) for part in sample.parts])
    if whole:
        (rest,) = whole
        sample.parts = [
            _Part(version, [token], [logprob])
            for version, token, logprob in zip(
                versions[cursor:], rest.token_ids, rest.logprobs, strict=True
            )
        ]


def _merged(parts: Sequence[_Part]) -> list[_Part]:
    """Neighbours of one version as one."""
    merged: list[_Part] = []
    for part in parts:
        if merged and merged[-1].version == part.version:
            merged[-1].token_ids.extend(part.token_ids)
            merged[-1].logprobs.extend(part.logprobs)
        else:
            merged.append(_Part(part.version, list(part.token_ids), list(part.logprobs)))
    return merged


def _chunk(index: int, part: _Part, reason: FinishReason | None) -> SampleChunk:
    return SampleChunk(
        index,
        np.array(part.token_ids, np.uint32),
        np.array(part.logprobs, np.float32),
        part.version,
        reason,
    )


def _sample_seed(seed: int, index: int, start: int) -> int:
    """63 bits of (seed, sample, first token): vLLM seeds a generator a request, not a token."""
    text = f"{seed} {index} {start}".encode()
    digest = hashlib.blake2b(text, digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest, "little") >> 1


def _first(errors: BaseExceptionGroup[EngineError]) -> EngineError:
    one: BaseException = errors
    while isinstance(one, BaseExceptionGroup):
        one = one.exceptions[0]
    return one if isinstance(one, EngineError) else EngineError(str(one))
