"""One generation: engine chunks in, whole samples (and tokens as they come) out.

Consumes chunks of one engine request; waits for the engine; unblocked by chunks, or by
cancellation of the call, which closes the engine's iterator and so frees the slots; produces
`GenerationEvent`s in order; a failing engine ends it with the engine's error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np

from services.rollout.engines.protocol import Engine, GenerationRequest, SampleChunk
from sluice.errors import EngineError
from sluice.types import FinishReason, Rollout, TokenIds, VersionSpan


class Detokenizer(Protocol):
    """Turns token ids into text."""

    def decode(self, token_ids: TokenIds) -> str:
        """The text of response tokens."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TextDelta:
    """New tokens of one sample with the text they complete."""

    chunk: SampleChunk
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class GenerationEvent:
    """What is sent together."""

    deltas: tuple[TextDelta, ...]
    rollouts: tuple[Rollout, ...]


Send = Callable[[GenerationEvent], Awaitable[None]]


@dataclass(slots=True)
class _Growing:
    """A sample under way."""

    token_ids: list[TokenIds] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    num_tokens: int = 0
    sent_text: str = ""

    def append(self, chunk: SampleChunk) -> None:
        size = int(chunk.token_ids.size)
        if size == 0:
            return
        self.token_ids.append(chunk.token_ids)
        self.logprobs.append(chunk.behavior_logprobs)
        start, self.num_tokens = self.num_tokens, self.num_tokens + size
        if self.spans and self.spans[-1].version == chunk.version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(chunk.version, start, self.num_tokens))

    def ids(self) -> TokenIds:
        empty = np.empty(0, dtype=np.uint32)
        return np.concatenate(self.token_ids) if self.token_ids else empty

    def finish(self, sample_index: int, reason: FinishReason, text: str) -> Rollout:
        logprobs = np.concatenate(self.logprobs) if self.logprobs else np.empty(0, np.float32)
        return Rollout(sample_index, self.ids(), logprobs, tuple(self.spans), reason, text)


class Generation:
    """Runs requests on one engine.

    Args:
        engine: where tokens come from.
        detokenizer: text of tokens.
    """

    def __init__(self, engine: Engine, detokenizer: Detokenizer) -> None:
        self._engine = engine
        self._detokenizer = detokenizer

    async def run(
        self,
        request: GenerationRequest,
        partials: Iterable[Rollout],
        *,
        every_token: bool,
        linger_s: float,
        send: Send,
    ) -> None:
        """Generates until every requested sample has finished.

        Args:
            request: the samples to draw.
            partials: the whole earlier part of samples that are continued.
            every_token: send tokens as they come as well.
            linger_s: finished samples wait this long for others to travel with.
            send: takes each event; its pace slows the sending, never the engine.

        Raises:
            SluiceError: what the engine raised (inside an exception group).
        """
        growing = {index: _Growing() for index in request.sample_indexes}
        for partial in partials:
            self._adopt(growing[partial.sample_index], partial)
        inbox: asyncio.Queue[tuple[SampleChunk, ...]] = asyncio.Queue()
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            pump = self._pump(request, inbox, ended, every_token=every_token)
            tasks.create_task(pump, name="engine")
            while growing:
                arrived = [await inbox.get()]
                ends = any(chunk.finish_reason is not None for chunk in arrived[0])
                if ends and linger_s > 0 and len(growing) > 1:
                    await _linger(ended, linger_s)
                while not inbox.empty():
                    arrived.append(inbox.get_nowait())
                event = self._event(chain(*arrived), growing, every_token=every_token)
                if event.deltas or event.rollouts:
                    await send(event)
                if growing and not all(arrived):
                    raise EngineError(f"the engine ended without {len(growing)} of the samples")

    async def _pump(
        self,
        request: GenerationRequest,
        inbox: asyncio.Queue[tuple[SampleChunk, ...]],
        ended: asyncio.Event,
        *,
        every_token: bool,
    ) -> None:
        """Moves chunks into `inbox`, and nothing as a last item; then sets `ended`.

        The queue is bounded by the request: an engine yields at most one chunk a token.
        """
        async with aclosing(self._engine.generate(request, every_token=every_token)) as stream:  # type: ignore[type-var]
            async for chunks in stream:
                if chunks:
                    inbox.put_nowait(chunks)
        inbox.put_nowait(())
        ended.set()

    def _event(
        self, chunks: Iterable[SampleChunk], growing: dict[int, _Growing], *, every_token: bool
    ) -> GenerationEvent:
        deltas: list[TextDelta] = []
        rollouts: list[Rollout] = []
        for chunk in chunks:
            sample = growing[chunk.sample_index]
            sample.append(chunk)
            is_last = chunk.finish_reason is not None
            if every_token:
                text = self._new_text(sample, is_last=is_last)
                if text or chunk.token_ids.size:
                    deltas.append(TextDelta(chunk, text))
            if chunk.finish_reason is not None:
                text = self._detokenizer.decode(sample.ids())
                rollouts.append(sample.finish(chunk.sample_index, chunk.finish_reason, text))
                del growing[chunk.sample_index]
        return GenerationEvent(tuple(deltas), tuple(rollouts))

    def _new_text(self, sample: _Growing, *, is_last: bool) -> str:
        text = self._detokenizer.decode(sample.ids())
        if text.endswith("\ufffd") and not is_last:  # in the middle of a multi-byte character
            return ""
        new = text[len(sample.sent_text) :]
        sample.sent_text = text
        return new

    def _adopt(self, sample: _Growing, partial: Rollout) -> None:
        """Starts from an earlier part, whose text the caller has already."""
        for span in partial.version_spans:
            part = slice(span.start, span.end)
            sample.append(
                SampleChunk(
                    partial.sample_index,
                    partial.token_ids[part],
                    partial.behavior_logprobs[part],
                    span.version,
                    None,
                )
            )
        self._new_text(sample, is_last=False)


async def _linger(ended: asyncio.Event, seconds: float) -> None:
    """Waits for company, but not once there is none to come."""
    try:
        async with asyncio.timeout(seconds):
            await ended.wait()
    except TimeoutError:
        return
