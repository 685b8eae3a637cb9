"""Sample the choices of a request, and write them in the OpenAI dialect: whole answers, and chunks
of a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from sluice.client.async_client import AsyncClient
from sluice.client.generation_types import (
    GenerateOptions,
    GenerationStarted,
    Prompt,
    SampleDelta,
    SampleFinished,
)
from sluice.openai_front.requests import ParsedRequest
from sluice.types import Rollout

# What a run accepts unless it lowers `sluice.rollout.max_n`.
_MOST_PER_CALL = 256


@dataclass(frozen=True, slots=True)
class PromptAccepted:
    """A replica accepted a prompt of `num_tokens`; `version` starts to generate."""

    prompt_index: int
    num_tokens: int
    version: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token; `text` is what became certain with it.

    It is empty in the middle of a character, or while a stop string may have begun.
    """

    token_id: int
    logprob: float
    text: str


@dataclass(frozen=True, slots=True)
class ChoiceGrew:
    """New tokens of a choice, and its text in which no stop string can begin any more.

    `tokens` lists them only if the request asks for them.
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
    """Sample all choices. Give each piece to `sink`, those of one choice in order.

    A sample's index is its position in the answer, because its randomness depends on it: the same
    prompt twice gets what it would get with twice the `n`. Each call asks for as many samples as a
    run accepts.

    Raises:
        ExceptionGroup: the errors of `AsyncClient.stream`.
    """
    n, budget = asked.options.n, asked.options.token_budget
    async with asyncio.TaskGroup() as tasks:
        for index, prompt in enumerate(asked.prompts):
            for start in range(0, n, _MOST_PER_CALL):
                size = min(_MOST_PER_CALL, n - start)
                options = replace(
                    asked.options,
                    n=size,
                    first_sample=index * n + start,
                    token_budget=budget // n * size,
                )
                choices = _PromptChoices(index, asked, sink).run(client, prompt, options)
                tasks.create_task(choices, name=f"prompt {index}")


class _PromptChoices:
    """One call, for samples of one prompt."""

    def __init__(self, prompt_index: int, asked: ParsedRequest, sink: Sink) -> None:
        self._prompt_index = prompt_index
        self._sink = sink
        self._reports_tokens = asked.logprobs or asked.token_ids
        # The text of each token is known only in a stream of tokens.
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
    """Return tokens that came together. Their text belongs to the last one."""
    # Tokens inside a character have no text of their own.
    last = len(ids) - 1
    return tuple(
        SampledToken(token, logprob, text if index == last else "")
        for index, (token, logprob) in enumerate(zip(ids, logprobs, strict=True))
    )


JsonObject = dict[str, object]


@dataclass(slots=True)
class _ChoiceText:
    text: str = ""
    num_tokens: int = 0
    tokens: list[SampledToken] = field(default_factory=list)
    reason: str | None = None


class AnswerBuilder:
    """The answer to one request, built from its pieces.

    Args:
        asked: the request.
        answer_id: unique.
        created_s: seconds since 1970.
    """

    def __init__(self, asked: ParsedRequest, answer_id: str, created_s: int) -> None:
        self._asked = asked
        self._id = answer_id
        self._created_s = created_s
        self._choices = [_ChoiceText() for _ in range(asked.num_choices)]
        self._prompt_tokens: dict[int, int] = {}  # by prompt
        self._version: int | None = None

    def take(self, piece: Piece) -> None:
        """Add a piece."""
        match piece:
            case PromptAccepted():
                self._prompt_tokens[piece.prompt_index] = piece.num_tokens
                self._version = piece.version if self._version is None else self._version
            case ChoiceGrew():
                choice = self._choices[piece.index]
                choice.text += piece.text
                choice.num_tokens += piece.num_tokens
                choice.tokens += piece.tokens
            case ChoiceEnded():
                self._choices[piece.index].reason = piece.reason

    def whole(self) -> JsonObject:
        """Return the answer to a request without streaming."""
        kind = "chat.completion" if self._asked.kind == "chat" else "text_completion"
        choices = [self._whole_choice(index, each) for index, each in enumerate(self._choices)]
        return self._object(kind, choices) | {"usage": self._usage()}

    def first_chunk(self, index: int) -> JsonObject | None:
        """Return what a choice begins with in a stream: its role, in a chat."""
        if self._asked.kind != "chat":
            return None
        role: JsonObject = {"role": "assistant", "content": ""}
        return self._chunk(index, role, None, None)

    def chunk(self, piece: ChoiceGrew | ChoiceEnded) -> JsonObject:
        """Return the chunk of the piece added last."""
        if isinstance(piece, ChoiceEnded):
            return self._chunk(piece.index, self._text("", is_last=True), None, piece.reason)
        offset = len(self._choices[piece.index].text) - len(piece.text)
        logprobs = self._logprobs(list(piece.tokens), offset)
        chunk = self._text(piece.text, is_last=False)
        if self._asked.token_ids:
            ids = [token.token_id for token in piece.tokens]
            return self._chunk(piece.index, chunk, logprobs, None, ids)
        return self._chunk(piece.index, chunk, logprobs, None)

    def usage_chunk(self) -> JsonObject:
        """Return the chunk that ends a stream if the request asked for the usage."""
        return self._object(self._chunk_kind, []) | {"usage": self._usage()}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._asked.kind == "chat" else "text_completion"

    def _text(self, text: str, *, is_last: bool) -> JsonObject | str:
        if self._asked.kind != "chat":
            return text
        return {} if is_last else {"content": text}

    def _chunk(
        self,
        index: int,
        text: JsonObject | str,
        logprobs: JsonObject | None,
        reason: str | None,
        token_ids: list[int] | None = None,
    ) -> JsonObject:
        name = "delta" if self._asked.kind == "chat" else "text"
        choice: JsonObject = {
            "index": index,
            name: text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        if token_ids is not None:
            choice["token_ids"] = token_ids
        return self._object(self._chunk_kind, [choice])

    def _whole_choice(self, index: int, choice: _ChoiceText) -> JsonObject:
        answer: JsonObject = {
            "index": index,
            "logprobs": self._logprobs(choice.tokens, 0),
            "finish_reason": choice.reason,
        }
        if self._asked.kind == "chat":
            answer["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            answer["text"] = choice.text
        if self._asked.token_ids:
            answer["token_ids"] = [token.token_id for token in choice.tokens]
        return answer

    def _object(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created_s,
            "model": self._asked.model,
            "system_fingerprint": f"policy-version-{self._version}",
            "choices": choices,
        }

    def _usage(self) -> JsonObject:
        sampled = sum(choice.num_tokens for choice in self._choices)
        read = sum(self._prompt_tokens.values())
        return {
            "prompt_tokens": read,
            "completion_tokens": sampled,
            "total_tokens": read + sampled,
        }

    def _logprobs(self, tokens: list[SampledToken], offset: int) -> JsonObject | None:
        if not self._asked.logprobs:
            return None
        if self._asked.kind == "chat":
            return {"content": [_chat_logprob(token) for token in tokens], "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{token.text: token.logprob} for token in tokens],
            "text_offset": offsets,
        }


def _chat_logprob(token: SampledToken) -> JsonObject:
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode("utf-8", errors="replace")),
        "top_logprobs": [],
    }
