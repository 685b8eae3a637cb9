"""Run a Generate call: engine chunks in, whole samples (and tokens as they come) out.

Consumes: chunks of one engine request. Waits for: the engine.
Unblocked by: chunks, or cancellation of the call, which closes the engine's iterator and so frees
    the slots.
Produces: `GenerationEvent`s in order. Counts the tokens that were sent and those that were not.
On failure: a failing engine ends the call with the engine's error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from services.rollout.engines.protocol import Engine, GenerationRequest, SampleChunk
from services.rollout.engines.text import Decode, IncrementalDetokenizer, cut_at_stop, stable_prefix
from sluice.algorithm.growing_sample import GrowingSample
from sluice.errors import EngineError
from sluice.types import (
    Answer,
    FinishReason,
    PromptLogprobs,
    Rollout,
    ScoredPrompt,
    TokenIds,
)

# An engine's chunks at intervals may come a little late, so one interval is no sign of a problem.
SIGN_OF_LIFE_INTERVALS = 2


class StreamedText:
    """The part of a growing response's text that can be sent, since no further token changes it.

    It ends before an unfinished character and before the possible beginning of a stop string.

    Args:
        stops: strings that end the response.
        decode: the tokenizer's `decode`.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = stops
        self._settled = IncrementalDetokenizer(decode)
        self._held = ""  # settled, but perhaps the beginning of a stop string
        self._num_sent = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; return the text that can be sent now."""
        self._held += self._settled.push(token_ids)
        stable = stable_prefix(self._held, self._stops)
        self._held = self._held[len(stable) :]
        self._num_sent += len(stable)
        return stable

    def unsent_text(self, text: str) -> str:
        """Return the unsent rest of the whole text of a finished response."""
        return text[self._num_sent :]


@dataclass(frozen=True, slots=True, eq=False)
class TextDelta:
    """New tokens of one sample with the text they complete."""

    chunk: SampleChunk
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class GenerationEvent:
    """The parts of a response that are sent together.

    Attributes:
        new_tokens: tokens that the caller has not seen yet. A sample that is sent whole repeats its
            earlier deltas, and the tokens that the caller gave to continue.
        engine_tokens: the engine's sampled tokens, if samples wait and nothing came.
        scored_prompt: the prompt's logprobs, in one event of a call that wants them.
    """

    deltas: tuple[TextDelta, ...]
    rollouts: tuple[Rollout, ...]
    new_tokens: int = 0
    engine_tokens: int | None = None
    scored_prompt: ScoredPrompt | None = None


Send = Callable[[GenerationEvent], Awaitable[None]]
ReadAnswer = Callable[[TokenIds], Answer]
"""Parses a finished response into an answer."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How samples are sent.

    Attributes:
        every_token: tokens are sent as they come, with their text.
        partial_interval_s: tokens of unfinished samples are sent about that often, without text,
            unless every token is. If nothing came for twice as long while samples wait for a slot,
            a sign is sent that the engine works. ``None``: never.
        linger_s: finished samples wait this long to share a message with others.
        read_answer: parses finished samples; ``None`` sends them without an answer.
    """

    every_token: bool = False
    partial_interval_s: float | None = None
    linger_s: float = 0.0
    read_answer: ReadAnswer | None = None

    @property
    def sends_tokens(self) -> bool:
        """Whether anything but whole samples is sent."""
        return self.every_token or self.partial_interval_s is not None


@dataclass(slots=True, eq=False)
class _StreamedSample:
    """A running sample.

    Attributes:
        text: set if its text is sent as it grows.
        num_held: tokens that were not sent yet.
    """

    text: StreamedText | None
    num_held: int = 0
    grown: GrowingSample = field(default_factory=GrowingSample)

    def adopt(self, partial: Rollout) -> None:
        """Continue an earlier part; the caller has all of its text that could be sent."""
        self.grown.adopt(partial)
        if self.text is not None:
            self.text.push(self.grown.token_ids().tolist())


class GenerationRunner:
    """Runs Generate calls on an engine, and counts their sent and unsent tokens.

    Args:
        engine: generates the tokens.
        decode: the tokenizer's `decode`.
    """

    def __init__(self, engine: Engine, decode: Decode) -> None:
        self._engine = engine
        self._decode = decode

    async def run(
        self,
        request: GenerationRequest,
        options: StreamSettings,
        send: Send,
    ) -> None:
        """Generate until every requested sample has finished.

        Args:
            request: the samples to generate.
            options: which parts are sent, and when.
            send: takes each event; a slow consumer never slows the engine.

        Raises:
            SluiceError: what the engine raised (inside an exception group).
        """
        counted = self._engine.accounting.of(request)

        async def send_counted(event: GenerationEvent) -> None:
            await send(event)
            # Only now: an event that the caller did not take was not sent.
            request.tokens.sent += event.new_tokens
            counted.sent += event.new_tokens

        try:
            await self._run(request, options, send_counted)
        finally:
            counted.unsent += request.tokens.sampled - request.tokens.sent

    async def _run(
        self,
        request: GenerationRequest,
        options: StreamSettings,
        send: Send,
    ) -> None:
        stops = request.sampling.stop
        if stops:
            request = replace(request, decode=self._decode)
        growing = {
            index: _StreamedSample(
                StreamedText(stops, self._decode) if options.every_token else None
            )
            for index in request.sample_indexes
        }
        for partial in request.partials:
            growing[partial.sample_index].adopt(partial)
        inbox: asyncio.Queue[tuple[SampleChunk, ...]] = asyncio.Queue()
        has_ended = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pump(request, inbox, has_ended, options), name="engine")
            while growing:
                arrived = [await self._next_chunks(inbox, options, send)]
                # A finished sample waits a little for others: one message costs less than several.
                has_end = any(chunk.finish_reason is not None for chunk in arrived[0])
                if has_end and options.linger_s > 0 and len(growing) > 1:
                    await _wait_for_others(has_ended, options.linger_s)
                while not inbox.empty():
                    arrived.append(inbox.get_nowait())
                chunks = tuple(chain(*arrived))
                event = self._event(chunks, growing, options, stops)
                for prompt_logprobs in (
                    chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs
                ):
                    # In a thread: a long prompt has a text for each of its many tokens.
                    scored = await asyncio.to_thread(
                        _add_texts, prompt_logprobs, request.prompt_token_ids, self._decode
                    )
                    event = replace(event, scored_prompt=scored)
                if event.deltas or event.rollouts or event.scored_prompt:
                    await send(event)
                if growing and not all(arrived):  # the pump's end came too early
                    raise EngineError(f"the engine ended without {len(growing)} of the samples")

    async def _next_chunks(
        self, inbox: asyncio.Queue[tuple[SampleChunk, ...]], options: StreamSettings, send: Send
    ) -> tuple[SampleChunk, ...]:
        """Return the next chunks; report at intervals that the engine samples while none come.

        Only while samples wait for a slot or for space: if all of them run, tokens that the engine
        samples for others do not help the one that gets none.
        """
        if options.partial_interval_s is None:
            return await inbox.get()
        num_reported: int | None = None
        while True:
            try:
                async with asyncio.timeout(SIGN_OF_LIFE_INTERVALS * options.partial_interval_s):
                    return await inbox.get()
            except TimeoutError:
                load = self._engine.load()
                may_wait = load.queued or load.slots_may_wait
                if may_wait and load.generated_tokens != num_reported:
                    num_reported = load.generated_tokens
                    await send(GenerationEvent((), (), engine_tokens=num_reported))

    async def _pump(
        self,
        request: GenerationRequest,
        inbox: asyncio.Queue[tuple[SampleChunk, ...]],
        has_ended: asyncio.Event,
        options: StreamSettings,
    ) -> None:
        """Move chunks into `inbox`, and an empty tuple at the end; then set `has_ended`.

        The queue is bounded by the request: an engine yields at most one chunk a token.
        """
        chunks_of = self._engine.generate(
            request,
            every_token=options.every_token,
            partial_interval_s=None if options.every_token else options.partial_interval_s,
        )
        async with aclosing(chunks_of) as stream:  # type: ignore[type-var]
            async for chunks in stream:
                if chunks:
                    inbox.put_nowait(chunks)
        inbox.put_nowait(())
        has_ended.set()

    def _event(
        self,
        chunks: Sequence[SampleChunk],
        growing: dict[int, _StreamedSample],
        options: StreamSettings,
        stops: Sequence[str],
    ) -> GenerationEvent:
        deltas: list[TextDelta] = []
        rollouts: list[Rollout] = []
        new_tokens = 0
        # Tokens of a sample that is sent whole in this event need no deltas of their own.
        finished = {chunk.sample_index for chunk in chunks if chunk.finish_reason is not None}
        for chunk in (
            chain.from_iterable(map(_split_by_token, chunks)) if options.every_token else chunks
        ):
            index, sample = chunk.sample_index, growing[chunk.sample_index]
            sample.grown.append(chunk.token_ids, chunk.behavior_logprobs, chunk.version)
            new_text = "" if sample.text is None else sample.text.push(chunk.token_ids.tolist())
            sample.num_held += int(chunk.token_ids.size)
            if chunk.finish_reason is not None:
                rollout = self._finished_rollout(chunk, sample, options, stops)
                rollouts.append(rollout)
                # What an aborted sample held back is sent where it is continued, if at all.
                if sample.text is not None and chunk.finish_reason is not FinishReason.ABORTED:
                    new_text += sample.text.unsent_text(rollout.text)
                del growing[index]
            is_sent = sample.text is not None or (options.sends_tokens and index not in finished)
            if is_sent and (new_text or chunk.token_ids.size):
                deltas.append(TextDelta(chunk, new_text))
            if is_sent or chunk.finish_reason is not None:
                new_tokens += sample.num_held
                sample.num_held = 0
        return GenerationEvent(tuple(deltas), tuple(rollouts), new_tokens)

    def _finished_rollout(
        self,
        chunk: SampleChunk,
        sample: _StreamedSample,
        options: StreamSettings,
        stops: Sequence[str],
    ) -> Rollout:
        ids, reason = sample.grown.token_ids(), chunk.finish_reason
        assert reason is not None
        answer = None
        if options.read_answer is not None and reason is not FinishReason.ABORTED:
            answer = options.read_answer(ids)
        text = cut_at_stop(self._decode(ids), stops)
        return sample.grown.rollout(chunk.sample_index, reason, text, chunk.routing, answer)


def _split_by_token(chunk: SampleChunk) -> Iterator[SampleChunk]:
    """Split a chunk, since an engine may join tokens, and each has a text of its own."""
    last_index = max(chunk.token_ids.size - 1, 0)
    ids, logprobs = chunk.token_ids, chunk.behavior_logprobs
    for index in range(last_index):
        token = slice(index, index + 1)
        yield SampleChunk(chunk.sample_index, ids[token], logprobs[token], chunk.version, None)
    yield replace(chunk, token_ids=ids[last_index:], behavior_logprobs=logprobs[last_index:])


def _add_texts(prompt_logprobs: PromptLogprobs, prompt: TokenIds, decode: Decode) -> ScoredPrompt:
    growing = IncrementalDetokenizer(decode)
    texts = [growing.push((token,)) for token in prompt.tolist()]
    # Bytes at the end that are no text belong to the last token.
    texts[-1] += decode(prompt)[sum(map(len, texts)) :]
    tops = prompt_logprobs.top_token_ids.tolist()
    text_of = {token: decode(np.array([token], np.uint32)) for token in set(tops)}
    return ScoredPrompt(prompt_logprobs, tuple(texts), tuple(text_of[token] for token in tops))


async def _wait_for_others(has_ended: asyncio.Event, seconds: float) -> None:
    """Wait for other samples, until no more can come."""
    try:
        async with asyncio.timeout(seconds):
            await has_ended.wait()
    except TimeoutError:
        return
