"""The choices of one request, drawn by the replicas of a run and told of as they grow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from sluice.client.async_client import AsyncClient
from sluice.client.generation_types import (
    GenerateOptions,
    GenerationStarted,
    Prompt,
    SampleDelta,
    SampleFinished,
)
from sluice.openai_front.asked import Asked
from sluice.openai_front.stop_strings import StopStrings
from sluice.types import FinishReason


@dataclass(frozen=True, slots=True)
class PromptTaken:
    """A replica took a prompt of so many tokens; `version` starts to generate.

    With stop strings it comes once for each sample of the prompt.
    """

    prompt_index: int
    num_tokens: int
    version: int


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A token; `text` is what it completed, so nothing in the middle of a character."""

    token_id: int
    logprob: float
    text: str


@dataclass(frozen=True, slots=True)
class ChoiceGrew:
    """New tokens of a choice, and text of it that no stop string can begin in any more."""

    index: int
    text: str
    tokens: tuple[DrawnToken, ...]


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """A choice is complete; `reason` is ``stop`` or ``length``."""

    index: int
    reason: str


Piece = PromptTaken | ChoiceGrew | ChoiceEnded
Sink = Callable[[Piece], Awaitable[None]]


async def draw_choices(client: AsyncClient, asked: Asked, sink: Sink) -> None:
    """Draws all choices; each piece is given to `sink`, those of one choice in order.

    With stop strings each sample has a call of its own, which ends where the string is found and so
    frees its slot; the samples are the same either way.

    Raises:
        ExceptionGroup: of the errors of `AsyncClient.stream`.
    """
    n = asked.options.n
    async with asyncio.TaskGroup() as tasks:
        for place, prompt in enumerate(asked.prompts):
            calls = range(n) if asked.stops else (0,)
            for first in calls:
                options = replace(asked.options, n=1 if asked.stops else n, first_sample=first)
                draw = _Draw(place, place * n, asked.stops, sink)
                tasks.create_task(draw.run(client, prompt, options), name=f"prompt {place}")


class _Draw:
    """One call: the samples of one prompt, or one of them."""

    def __init__(
        self,
        prompt_index: int,
        first_choice: int,
        stops: tuple[str, ...],
        sink: Sink,
    ) -> None:
        self._prompt_index, self._first_choice, self._sink = prompt_index, first_choice, sink
        self._stops, self._has_started = stops, False
        self._filters: dict[int, StopStrings] = {}

    async def run(self, client: AsyncClient, prompt: Prompt, options: GenerateOptions) -> None:
        async with aclosing(client.stream(prompt, options)) as events:
            async for event in events:
                match event:
                    case GenerationStarted():
                        await self._started(event)
                    case SampleDelta():
                        if await self._grew(event):
                            return
                    case SampleFinished(rollout):
                        await self._ended(rollout.sample_index, rollout.finish_reason)

    async def _started(self, event: GenerationStarted) -> None:
        if not self._has_started:
            self._has_started = True
            size = int(event.prompt_token_ids.size)
            await self._sink(PromptTaken(self._prompt_index, size, event.version))

    async def _grew(self, delta: SampleDelta) -> bool:
        """Passes new tokens on; whether a stop string ended the sample."""
        index = delta.sample_index
        stops = self._filters.setdefault(index, StopStrings(self._stops))
        text, tokens = stops.push(delta.text), _tokens(delta)
        if text or tokens:
            await self._sink(ChoiceGrew(self._first_choice + index, text, tokens))
        if stops.is_stopped:
            await self._sink(ChoiceEnded(self._first_choice + index, FinishReason.STOP.value))
        return stops.is_stopped

    async def _ended(self, index: int, reason: FinishReason) -> None:
        rest = self._filters[index].flush() if index in self._filters else ""
        if rest:
            await self._sink(ChoiceGrew(self._first_choice + index, rest, ()))
        await self._sink(ChoiceEnded(self._first_choice + index, reason.value))


def _tokens(delta: SampleDelta) -> tuple[DrawnToken, ...]:
    """The text of several tokens that came together is the last one's."""
    ids, logprobs = delta.token_ids.tolist(), delta.behavior_logprobs.tolist()
    last = len(ids) - 1
    return tuple(
        DrawnToken(token, logprob, delta.text if place == last else "")
        for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True))
    )
