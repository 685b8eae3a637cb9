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


async def generate_choices(client: AsyncClient, asked: ParsedRequest, sink: Sink) -> None:
    """Sample all choices. Give each event to `sink`, the events of one choice in order.

    A sample's index is its position in the answer, because its randomness depends on it: the same
    prompt twice gets what it would get with twice the `n`. Each call requests as many samples as a
    run accepts.

    Raises:
        ExceptionGroup: the errors of `AsyncClient.stream`.
    """
    n, budget = asked.options.n, asked.options.token_budget

    async def call(index: int, prompt: Prompt, options: GenerateOptions) -> None:
        events = client.stream(prompt, options, every_token=asked.every_token)
        async with aclosing(events):
            async for event in events:
                await sink(index, event)

    async with asyncio.TaskGroup() as tasks:
        for index, prompt in enumerate(asked.prompts):
            for start in range(0, n, _MAX_SAMPLES_PER_CALL):
                size = min(_MAX_SAMPLES_PER_CALL, n - start)
                options = replace(
                    asked.options,
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

    def __init__(self, asked: ParsedRequest, answer_id: str, created_s: int) -> None:
        self._asked = asked
        self._is_chat = asked.kind == "chat"
        self._id = answer_id
        self._created_s = created_s
        self._choices = [_Choice() for _ in range(asked.num_choices)]
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
                if not self._asked.every_token:
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
        if not self._asked.logprobs and not self._asked.token_ids:
            return []
        ids, logprobs = grown.token_ids.tolist(), grown.behavior_logprobs.tolist()
        # Tokens inside a character have no text of their own: all of it belongs to the last one.
        last = len(ids) - 1
        return [
            _AnswerToken(token, logprob, grown.text if index == last else "")
            for index, (token, logprob) in enumerate(zip(ids, logprobs, strict=True))
        ]

    def whole(self) -> JsonObject:
        """Return the answer to a request without streaming."""
        if self._asked.prompt_only:
            self._choices = [_Choice(reason="length") for _ in self._choices]
        choices = [
            self._choice(index, self._message(index), each.tokens, 0, each.reason)
            for index, each in enumerate(self._choices)
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._object(kind, choices) | {"usage": self._usage()}

    def _message(self, index: int) -> JsonObject:
        if not self._is_chat:
            return {"text": self._prompt_text(index) + self._choices[index].text}
        said = self._said(index)
        return {"message": {"role": "assistant", "content": None, "refusal": None, **said}}

    def _prompt_text(self, index: int) -> str:
        """Return what a choice begins with."""
        if not self._asked.echo:
            return ""
        number = index // self._asked.options.n
        given = self._asked.prompts[number]
        return given if isinstance(given, str) else "".join(self._scored[number].texts)

    def _said(self, index: int) -> JsonObject:
        """Return the text of a finished choice; where they were read, thoughts and calls apart."""
        answer = self._choices[index].answer
        if answer is None:
            return {"content": self._choices[index].text}
        # Clients look up calls by their ids.
        prefix = f"call_{self._id.rpartition('-')[2][:16]}_{index}"
        given = self._asked.prompts[index // self._asked.options.n]
        turns = given.messages if isinstance(given, ChatWithImages) else given
        earlier = turns if isinstance(turns, tuple) else ()
        taken = {call.call_id for turn in earlier for call in turn.tool_calls}
        return said_of(with_new_ids(answer, prefix, taken))

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
            last = self._choice(index, end, reason=self._choices[index].reason)
            whole = [self._whole_chunk(index)] if self._asked.reads_answer else []
            return [*whole, self._chunk(last)]
        if self._asked.reads_answer:
            return []
        content: JsonObject = {"text": event.text}
        if self._is_chat:
            content = {"delta": {"content": event.text}}
        index = event.sample_index
        offset = len(self._choices[index].text) - len(event.text)
        return [self._chunk(self._choice(index, content, self._tokens(event), offset))]

    def _whole_chunk(self, index: int) -> JsonObject:
        said = as_delta(self._said(index))
        return self._chunk(self._choice(index, {"delta": said}, self._choices[index].tokens))

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
        if tokens is not None and self._asked.logprobs:
            choice["logprobs"] = self._logprobs(tokens, offset, index)
        if tokens is not None and self._asked.token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
        return choice

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
        return usage_of(read, sampled)

    def _logprobs(self, tokens: Sequence[_AnswerToken], offset: int, index: int) -> JsonObject:
        if self._is_chat:
            return {"content": [_chat_logprob(token) for token in tokens], "refusal": None}
        scored = [_ScoredToken(one.text, one.logprob, {one.text: one.logprob}) for one in tokens]
        if self._asked.echo:
            scored = [*_scored_tokens(self._scored[index // self._asked.options.n]), *scored]
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


def said_of(answer: Answer) -> JsonObject:
    """Return what an assistant's message says: text, thoughts and calls apart."""
    said: JsonObject = {}
    if answer.content or not answer.tool_calls:
        said["content"] = answer.content
    if answer.reasoning:
        said["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        said["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.tool_calls
        ]
    return said


def as_delta(said: JsonObject) -> JsonObject:
    """Return a message, or what it says, as a stream sends it: each call with its number."""
    calls = said.get("tool_calls")
    if not isinstance(calls, list):
        return said
    return {**said, "tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]}


def usage_of(read: int, sampled: int) -> JsonObject:
    """Return the numbers of tokens of an answer."""
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}
