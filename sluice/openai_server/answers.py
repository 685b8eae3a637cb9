"""Sample the choices of a request, and write them in the OpenAI dialect: whole answers, and chunks
of a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sluice.algorithm.episode_rules import with_new_ids
from sluice.client.async_client import AsyncClient
from sluice.client.generation_types import (
    ChatWithImages,
    GenerateOptions,
    GenerationEvent,
    GenerationStarted,
    Prompt,
    SampleDelta,
    SampleFinished,
)
from sluice.openai_server.requests import ParsedRequest
from sluice.types import Answer, Rollout, ScoredPrompt

# What a run accepts unless it lowers `sluice.rollout.max_n`.
_MAX_SAMPLES_PER_CALL = 256

Sink = Callable[[int, GenerationEvent], Awaitable[None]]
"""Takes the index of a prompt, and an event of one of its samples."""
JsonObject = dict[str, object]


async def generate_choices(client: AsyncClient, parsed: ParsedRequest, sink: Sink) -> None:
    """Sample all choices. Give each event to `sink`, the events of one choice in order.

    A sample's index is its position in the answer, because its randomness depends on it: the same
    prompt twice gets what it would get with twice the `n`. Each call requests as many samples as a
    run accepts.

    Raises:
        ExceptionGroup: the errors of `AsyncClient.stream`.
    """
    n, budget = parsed.options.n, parsed.options.token_budget

    async def call(index: int, prompt: Prompt, options: GenerateOptions) -> None:
        events = client.stream(prompt, options, every_token=parsed.every_token)
        async with aclosing(events):
            async for event in events:
                await sink(index, event)

    async with asyncio.TaskGroup() as tasks:
        for index, prompt in enumerate(parsed.prompts):
            for start in range(0, n, _MAX_SAMPLES_PER_CALL):
                size = min(_MAX_SAMPLES_PER_CALL, n - start)
                options = replace(
                    parsed.options,
                    n=size,
                    first_sample=index * n + start,
                    token_budget=budget // n * size,
                )
                tasks.create_task(call(index, prompt, options), name=f"prompt {index}")


class _AnswerToken(NamedTuple):
    """A token; `text` is what became certain with it.

    It is empty in the middle of a character, or while a stop string may have begun.
    """

    token_id: int
    logprob: float
    text: str


class _ScoredToken(NamedTuple):
    """A token in the logprobs of a completion; the first of an echoed prompt has none."""

    text: str
    logprob: float | None = None
    top: dict[str, float] | None = None


@dataclass(slots=True)
class _Choice:
    text: str = ""
    num_tokens: int = 0
    tokens: list[_AnswerToken] = field(default_factory=list)  # only if the request wants them
    reason: str | None = None
    answer: Answer | None = None


class AnswerBuilder:
    """The answer to one request, built from the events of its samples."""

    def __init__(self, parsed: ParsedRequest, answer_id: str, created_s: int) -> None:
        self._parsed = parsed
        self._is_chat = parsed.kind == "chat"
        self._id = answer_id
        self._created_s = created_s
        self._choices = [_Choice() for _ in range(parsed.num_choices)]
        self._prompt_tokens: dict[int, int] = {}  # by prompt
        self._scored: dict[int, ScoredPrompt] = {}  # by prompt
        self._version: int | None = None

    def take(self, prompt_index: int, event: GenerationEvent) -> None:
        """Add an event."""
        match event:
            case GenerationStarted():
                self._prompt_tokens[prompt_index] = int(event.prompt_token_ids.size)
                self._version = event.version if self._version is None else self._version
            case ScoredPrompt():
                self._scored[prompt_index] = event
            case SampleDelta():
                self._grow(event.sample_index, event)
            case SampleFinished(rollout):
                if not self._parsed.every_token:
                    self._grow(rollout.sample_index, rollout)
                choice = self._choices[rollout.sample_index]
                choice.reason, choice.answer = rollout.finish_reason.value, rollout.answer
                if rollout.answer is not None and rollout.answer.tool_calls:
                    choice.reason = "tool_calls"

    def _grow(self, index: int, grown: SampleDelta | Rollout) -> None:
        choice = self._choices[index]
        choice.text += grown.text
        choice.num_tokens += int(grown.token_ids.size)
        choice.tokens += self._tokens(grown)

    def _tokens(self, grown: SampleDelta | Rollout) -> list[_AnswerToken]:
        """Return tokens that came together, if the request asks for them."""
        if not self._parsed.logprobs and not self._parsed.token_ids:
            return []
        ids, logprobs = grown.token_ids.tolist(), grown.behavior_logprobs.tolist()
        # Tokens inside a character have no text of their own: all of it belongs to the last one.
        last_index = len(ids) - 1
        return [
            _AnswerToken(token, logprob, grown.text if index == last_index else "")
            for index, (token, logprob) in enumerate(zip(ids, logprobs, strict=True))
        ]

    def full_answer(self) -> JsonObject:
        """Return the answer to a request without streaming."""
        if self._parsed.prompt_only:
            self._choices = [_Choice(reason="length") for _ in self._choices]
        choices = [
            self._choice(index, self._message(index), choice.tokens, 0, choice.reason)
            for index, choice in enumerate(self._choices)
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._object(kind, choices) | {"usage": self._usage()}

    def _message(self, index: int) -> JsonObject:
        if not self._is_chat:
            return {"text": self._prompt_text(index) + self._choices[index].text}
        content_fields = self._message_fields(index)
        return {
            "message": {"role": "assistant", "content": None, "refusal": None, **content_fields}
        }

    def _prompt_text(self, index: int) -> str:
        """Return what a choice begins with."""
        if not self._parsed.echo:
            return ""
        number = index // self._parsed.options.n
        prompt = self._parsed.prompts[number]
        return prompt if isinstance(prompt, str) else "".join(self._scored[number].texts)

    def _message_fields(self, index: int) -> JsonObject:
        """Return the text of a finished choice; where they were read, thoughts and calls apart."""
        answer = self._choices[index].answer
        if answer is None:
            return {"content": self._choices[index].text}
        # Clients look up calls by their ids.
        prefix = f"call_{self._id.rpartition('-')[2][:16]}_{index}"
        prompt = self._parsed.prompts[index // self._parsed.options.n]
        turns = prompt.messages if isinstance(prompt, ChatWithImages) else prompt
        earlier = turns if isinstance(turns, tuple) else ()
        used_ids = {call.call_id for turn in earlier for call in turn.tool_calls}
        return message_fields(with_new_ids(answer, prefix, used_ids))

    def first_chunk(self, index: int) -> JsonObject | None:
        """Return the first chunk of a choice: in a chat its role, otherwise ``None``."""
        if not self._is_chat:
            return None
        return self._chunk(self._choice(index, {"delta": {"role": "assistant", "content": ""}}))

    def chunks(self, event: SampleDelta | SampleFinished) -> list[JsonObject]:
        """Return the chunks of the event added last.

        Where thoughts and calls are read, all of a choice comes once its sample has ended.
        """
        if isinstance(event, SampleFinished):
            index = event.rollout.sample_index
            end: JsonObject = {"delta": {}} if self._is_chat else {"text": ""}
            last_choice = self._choice(index, end, reason=self._choices[index].reason)
            answer_chunk = [self._answer_chunk(index)] if self._parsed.reads_answer else []
            return [*answer_chunk, self._chunk(last_choice)]
        if self._parsed.reads_answer:
            return []
        content: JsonObject = {"text": event.text}
        if self._is_chat:
            content = {"delta": {"content": event.text}}
        index = event.sample_index
        offset = len(self._choices[index].text) - len(event.text)
        return [self._chunk(self._choice(index, content, self._tokens(event), offset))]

    def _answer_chunk(self, index: int) -> JsonObject:
        delta = as_delta(self._message_fields(index))
        return self._chunk(self._choice(index, {"delta": delta}, self._choices[index].tokens))

    def usage_chunk(self) -> JsonObject:
        """Return the chunk that ends a stream if the request asked for the usage."""
        return self._chunk() | {"usage": self._usage()}

    def _chunk(self, *choices: JsonObject) -> JsonObject:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return self._object(kind, list(choices))

    def _choice(
        self,
        index: int,
        content: JsonObject,
        tokens: Sequence[_AnswerToken] | None = None,
        offset: int = 0,
        reason: str | None = None,
    ) -> JsonObject:
        """Return a choice, or a part of one; its first token begins at `offset` of its text."""
        choice: JsonObject = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        if tokens is not None and self._parsed.logprobs:
            choice["logprobs"] = self._logprobs(tokens, offset, index)
        if tokens is not None and self._parsed.token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
        return choice

    def _object(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created_s,
            "model": self._parsed.model,
            "system_fingerprint": f"policy-version-{self._version}",
            "choices": choices,
        }

    def _usage(self) -> JsonObject:
        sampled = sum(choice.num_tokens for choice in self._choices)
        num_prompt_tokens = sum(self._prompt_tokens.values())
        return usage_of(num_prompt_tokens, sampled)

    def _logprobs(self, tokens: Sequence[_AnswerToken], offset: int, index: int) -> JsonObject:
        if self._is_chat:
            return {"content": [_chat_logprob(token) for token in tokens], "refusal": None}
        scored = [
            _ScoredToken(token.text, token.logprob, {token.text: token.logprob}) for token in tokens
        ]
        if self._parsed.echo:
            scored = [*_scored_tokens(self._scored[index // self._parsed.options.n]), *scored]
        offsets = []
        for token in scored:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [token.text for token in scored],
            "token_logprobs": [token.logprob for token in scored],
            "top_logprobs": [token.top for token in scored],
            "text_offset": offsets,
        }


def _scored_tokens(prompt: ScoredPrompt) -> Iterator[_ScoredToken]:
    """Yield a prompt's tokens, each with its logprob and that of the most probable token."""
    yield _ScoredToken(prompt.texts[0])
    logprobs = prompt.logprobs
    for text, logprob, top_text, top_logprob in zip(
        prompt.texts[1:],
        logprobs.logprobs.tolist(),
        prompt.top_texts,
        logprobs.top_logprobs.tolist(),
        strict=True,
    ):
        # Where both have one text, the larger logprob stays: clients compare the maximum.
        yield _ScoredToken(text, logprob, {text: logprob, top_text: top_logprob})


def _chat_logprob(token: _AnswerToken) -> JsonObject:
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode("utf-8", errors="replace")),
        "top_logprobs": [],
    }


def message_fields(answer: Answer) -> JsonObject:
    """Return what an assistant's message says: text, thoughts and calls apart."""
    fields: JsonObject = {}
    if answer.content or not answer.tool_calls:
        fields["content"] = answer.content
    if answer.reasoning:
        fields["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.tool_calls
        ]
    return fields


def as_delta(message: JsonObject) -> JsonObject:
    """Return a message, or what it says, as a stream sends it: each call with its number."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]}


def usage_of(num_prompt_tokens: int, num_sampled: int) -> JsonObject:
    """Return the numbers of tokens of an answer."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt_tokens + num_sampled,
    }
