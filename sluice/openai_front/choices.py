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


@dataclass(frozen=True, slots=True)
class PromptTaken:
    """A replica took a prompt of so many tokens; `version` starts to generate."""

    prompt_index: int
    num_tokens: int
    version: int


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A token; `text` is what became certain with it.

    So nothing in the middle of a character, or while a stop string may have begun.
    """

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

    One call draws all samples of a prompt, under their places in the answer: the randomness of a
    sample depends on its index, so the same prompt twice gets what it would get with twice the `n`.

    Raises:
        ExceptionGroup: of the errors of `AsyncClient.stream`.
    """
    async with asyncio.TaskGroup() as tasks:
        for place, prompt in enumerate(asked.prompts):
            options = replace(asked.options, first_sample=place * asked.options.n)
            draw = _Draw(place, sink).run(client, prompt, options)
            tasks.create_task(draw, name=f"prompt {place}")


class _Draw:
    """One call: the samples of one prompt."""

    def __init__(self, prompt_index: int, sink: Sink) -> None:
        self._prompt_index, self._sink = prompt_index, sink
        self._has_started = False

    async def run(self, client: AsyncClient, prompt: Prompt, options: GenerateOptions) -> None:
        async with aclosing(client.stream(prompt, options)) as events:
            async for event in events:
                match event:
                    case GenerationStarted():
                        await self._started(event)
                    case SampleDelta(index):
                        await self._sink(ChoiceGrew(index, event.text, _tokens(event)))
                    case SampleFinished(rollout):
                        reason = rollout.finish_reason.value
                        await self._sink(ChoiceEnded(rollout.sample_index, reason))

    async def _started(self, event: GenerationStarted) -> None:
        if not self._has_started:
            self._has_started = True
            size = int(event.prompt_token_ids.size)
            await self._sink(PromptTaken(self._prompt_index, size, event.version))


def _tokens(delta: SampleDelta) -> tuple[DrawnToken, ...]:
    """The text of several tokens that came together is the last one's."""
    ids, logprobs = delta.token_ids.tolist(), delta.behavior_logprobs.tolist()
    last = len(ids) - 1
    return tuple(
        DrawnToken(token, logprob, delta.text if place == last else "")
        for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True))
    )
