"""One generation: engine chunks in, whole samples (and tokens as they come) out.

Consumes chunks of one engine request; waits for the engine; unblocked by chunks, or by
cancellation of the call, which closes the engine's iterator and so frees the slots; produces
`GenerationEvent`s in order; a failing engine ends it with the engine's error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

from services.rollout.engines.protocol import Engine, GenerationRequest, SampleChunk
from services.rollout.engines.stop_strings import before_stop, tellable
from sluice.algorithm.growing_sample import GrowingSample
from sluice.errors import EngineError
from sluice.types import FinishReason, Rollout, TokenIds

# Tokens that come at intervals come a little after them.
SIGN_OF_LIFE_INTERVALS = 2


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
    """What is sent together; `engine_tokens` when nothing came and samples wait for slots."""

    deltas: tuple[TextDelta, ...]
    rollouts: tuple[Rollout, ...]
    engine_tokens: int | None = None


Send = Callable[[GenerationEvent], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Delivery:
    """How samples travel.

    Attributes:
        every_token: tokens are sent as they come, with their text.
        partial_interval_s: the tokens of unfinished samples are sent about so often, without text;
            and when nothing came for twice as long while samples wait for a slot in the engine,
            whether it works. ``None``: never.
        linger_s: finished samples wait this long for others to travel with.
    """

    every_token: bool = False
    partial_interval_s: float | None = None
    linger_s: float = 0.0

    @property
    def sends_tokens(self) -> bool:
        """Whether anything but whole samples is sent."""
        return self.every_token or self.partial_interval_s is not None


@dataclass(slots=True, eq=False)
class _Sample:
    """A sample under way, which one of `stops` may end."""

    stops: tuple[str, ...] = ()
    grown: GrowingSample = field(default_factory=GrowingSample)
    sent_text: str = ""


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
        delivery: Delivery,
        send: Send,
    ) -> None:
        """Generates until every requested sample has finished.

        Args:
            request: the samples to draw.
            partials: the whole earlier part of samples that are continued.
            delivery: what is sent when.
            send: takes each event; its pace slows the sending, never the engine.

        Raises:
            SluiceError: what the engine raised (inside an exception group).
        """
        stops = request.sampling.stop
        if stops:
            request = replace(request, decode=self._detokenizer.decode)
        growing = {index: _Sample(stops) for index in request.sample_indexes}
        for partial in partials:
            self._adopt(growing[partial.sample_index], partial)
        inbox: asyncio.Queue[tuple[SampleChunk, ...]] = asyncio.Queue()
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pump(request, inbox, ended, delivery), name="engine")
            while growing:
                arrived = [await self._next(inbox, delivery, send)]
                ends = any(chunk.finish_reason is not None for chunk in arrived[0])
                if ends and delivery.linger_s > 0 and len(growing) > 1:
                    await _linger(ended, delivery.linger_s)
                while not inbox.empty():
                    arrived.append(inbox.get_nowait())
                event = self._event(tuple(chain(*arrived)), growing, delivery)
                if event.deltas or event.rollouts:
                    await send(event)
                if growing and not all(arrived):
                    raise EngineError(f"the engine ended without {len(growing)} of the samples")

    async def _next(
        self, inbox: asyncio.Queue[tuple[SampleChunk, ...]], delivery: Delivery, send: Send
    ) -> tuple[SampleChunk, ...]:
        """The next chunks; while there are none, tells at intervals if the engine draws tokens.

        Only while samples wait for a slot: these may be among them. With no queue they all have
        one, and that none gets a token is no better for what the engine draws for others.
        """
        if delivery.partial_interval_s is None:
            return await inbox.get()
        seen: int | None = None
        while True:
            try:
                async with asyncio.timeout(SIGN_OF_LIFE_INTERVALS * delivery.partial_interval_s):
                    return await inbox.get()
            except TimeoutError:
                load = self._engine.load()
                if load.queued and load.generated_tokens != seen:
                    seen = load.generated_tokens
                    await send(GenerationEvent((), (), engine_tokens=seen))

    async def _pump(
        self,
        request: GenerationRequest,
        inbox: asyncio.Queue[tuple[SampleChunk, ...]],
        ended: asyncio.Event,
        delivery: Delivery,
    ) -> None:
        """Moves chunks into `inbox`, and nothing as a last item; then sets `ended`.

        The queue is bounded by the request: an engine yields at most one chunk a token.
        """
        chunks_of = self._engine.generate(
            request,
            every_token=delivery.every_token,
            partial_interval_s=delivery.partial_interval_s,
        )
        async with aclosing(chunks_of) as stream:  # type: ignore[type-var]
            async for chunks in stream:
                if chunks:
                    inbox.put_nowait(chunks)
        inbox.put_nowait(())
        ended.set()

    def _event(
        self, chunks: Sequence[SampleChunk], growing: dict[int, _Sample], delivery: Delivery
    ) -> GenerationEvent:
        deltas: list[TextDelta] = []
        rollouts: list[Rollout] = []
        finished = {chunk.sample_index for chunk in chunks if chunk.finish_reason is not None}
        for chunk in chunks:
            index, sample = chunk.sample_index, growing[chunk.sample_index]
            sample.grown.append(chunk.token_ids, chunk.behavior_logprobs, chunk.version)
            if delivery.every_token:
                # What an aborted sample held back is told where it goes on, if at all.
                is_last = chunk.finish_reason not in (None, FinishReason.ABORTED)
                text = self._new_text(sample, is_last=is_last)
                if text or chunk.token_ids.size:
                    deltas.append(TextDelta(chunk, text))
            elif delivery.sends_tokens and index not in finished and chunk.token_ids.size:
                deltas.append(TextDelta(chunk, ""))
            if chunk.finish_reason is not None:
                text = self._text(sample)
                rollouts.append(sample.grown.rollout(index, chunk.finish_reason, text))
                del growing[index]
        return GenerationEvent(tuple(deltas), tuple(rollouts))

    def _text(self, sample: _Sample) -> str:
        return before_stop(self._detokenizer.decode(sample.grown.token_ids()), sample.stops)

    def _new_text(self, sample: _Sample, *, is_last: bool) -> str:
        text = self._text(sample)
        if not is_last:
            if text.endswith("\ufffd"):  # in the middle of a multi-byte character
                return ""
            text = tellable(text, sample.stops)
        new = text[len(sample.sent_text) :]
        sample.sent_text = text
        return new

    def _adopt(self, sample: _Sample, partial: Rollout) -> None:
        """Starts from an earlier part, whose text the caller has already.

        Of a part that ends in the middle of a character that is the text before it.
        """
        sample.grown.adopt(partial)
        ids = sample.grown.token_ids()
        for end in range(ids.size, 0, -1):
            text = self._detokenizer.decode(ids[:end])
            if not text.endswith("\ufffd"):
                sample.sent_text = tellable(text, sample.stops)
                return


async def _linger(ended: asyncio.Event, seconds: float) -> None:
    """Waits for company, but not once there is none to come."""
    try:
        async with asyncio.timeout(seconds):
            await ended.wait()
    except TimeoutError:
        return
