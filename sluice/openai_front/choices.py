"""The choices of one request, drawn by the replicas of a run and told of as they grow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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
from sluice.openai_front.asked import ParsedRequest
from sluice.types import Rollout

# What a run takes unless it lowers `sluice.rollout.max_n`.
_MOST_A_CALL = 256


@dataclass(frozen=True, slots=True)
class PromptAccepted:
    """A replica took a prompt of so many tokens; `version` starts to generate."""

    prompt_index: int
    num_tokens: int
    version: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token; `text` is what became certain with it.

    So nothing in the middle of a character, or while a stop string may have begun.
    """

    token_id: int
    logprob: float
    text: str


@dataclass(frozen=True, slots=True)
class ChoiceGrew:
    """New tokens of a choice, and text of it that no stop string can begin in any more.

    `tokens` are told one by one only where the request asks for them.
    """

    index: int
    text: str
    num_tokens: int
    tokens: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """A choice is complete; `reason` is ``stop`` or ``length``."""

    index: int
    reason: str


Piece = PromptAccepted | ChoiceGrew | ChoiceEnded
Sink = Callable[[Piece], Awaitable[None]]


async def generate_choices(client: AsyncClient, asked: ParsedRequest, sink: Sink) -> None:
    """Draws all choices; each piece is given to `sink`, those of one choice in order.

    Samples of a prompt are drawn under their places in the answer, as many in one call as a run
    takes: the randomness of a sample depends on its index, so the same prompt twice gets what it
    would get with twice the `n`.

    Raises:
        ExceptionGroup: of the errors of `AsyncClient.stream`.
    """
    n, budget = asked.options.n, asked.options.token_budget
    async with asyncio.TaskGroup() as tasks:
        for place, prompt in enumerate(asked.prompts):
            for start in range(0, n, _MOST_A_CALL):
                size = min(_MOST_A_CALL, n - start)
                options = replace(
                    asked.options,
                    n=size,
                    first_sample=place * n + start,
                    token_budget=budget // n * size,
                )
                draw = _PromptChoices(place, asked, sink).run(client, prompt, options)
                tasks.create_task(draw, name=f"prompt {place}")


class _PromptChoices:
    """One call: samples of one prompt."""

    def __init__(self, prompt_index: int, asked: ParsedRequest, sink: Sink) -> None:
        self._prompt_index, self._sink = prompt_index, sink
        self._reports_tokens = asked.logprobs or asked.token_ids
        # The text of each token is known only as they come.
        self._every_token = asked.stream or asked.logprobs
        self._has_started = False

    async def run(self, client: AsyncClient, prompt: Prompt, options: GenerateOptions) -> None:
        events = client.stream(prompt, options, every_token=self._every_token)
        async with aclosing(events):
            async for event in events:
                match event:
                    case GenerationStarted():
                        await self._started(event)
                    case SampleDelta(index):
                        await self._sink(self._grown(index, event, event.text))
                    case SampleFinished(rollout):
                        if not self._every_token:
                            await self._sink(
                                self._grown(rollout.sample_index, rollout, rollout.text)
                            )
                        reason = rollout.finish_reason.value
                        await self._sink(ChoiceEnded(rollout.sample_index, reason))

    async def _started(self, event: GenerationStarted) -> None:
        if not self._has_started:
            self._has_started = True
            size = int(event.prompt_token_ids.size)
            await self._sink(PromptAccepted(self._prompt_index, size, event.version))

    def _grown(self, index: int, tokens: SampleDelta | Rollout, text: str) -> ChoiceGrew:
        size = int(tokens.token_ids.size)
        if not self._reports_tokens:
            return ChoiceGrew(index, text, size)
        ids, logprobs = tokens.token_ids.tolist(), tokens.behavior_logprobs.tolist()
        return ChoiceGrew(index, text, size, _sampled_tokens(ids, logprobs, text))


def _sampled_tokens(
    ids: Sequence[int], logprobs: Sequence[float], text: str
) -> tuple[SampledToken, ...]:
    """The text of several tokens that came together is the last one's."""
    last = len(ids) - 1
    return tuple(
        SampledToken(token, logprob, text if place == last else "")
        for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True))
    )
