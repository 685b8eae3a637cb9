"""Answers in the OpenAI dialect: whole ones, and the chunks of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.openai_front.asked import ParsedRequest
from sluice.openai_front.choices import ChoiceEnded, ChoiceGrew, Piece, PromptAccepted, SampledToken

JsonObject = dict[str, object]


@dataclass(slots=True)
class _Choice:
    text: str = ""
    num_tokens: int = 0
    tokens: list[SampledToken] = field(default_factory=list)
    reason: str | None = None


class Answer:
    """Collects the pieces of one request.

    Args:
        asked: the request.
        answer_id: unique.
        created_s: seconds since 1970.
    """

    def __init__(self, asked: ParsedRequest, answer_id: str, created_s: int) -> None:
        self._asked, self._id, self._created_s = asked, answer_id, created_s
        self._choices = [_Choice() for _ in range(asked.num_choices)]
        self._prompt_tokens: dict[int, int] = {}  # by prompt
        self._version: int | None = None

    def take(self, piece: Piece) -> None:
        """Takes a piece on."""
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
        """The answer of a request that is not streamed."""
        kind = "chat.completion" if self._asked.kind == "chat" else "text_completion"
        choices = [self._whole_choice(index, each) for index, each in enumerate(self._choices)]
        return self._object(kind, choices) | {"usage": self._usage()}

    def first_chunk(self, index: int) -> JsonObject | None:
        """What a choice begins with in a stream: its role, in a chat."""
        if self._asked.kind != "chat":
            return None
        role: JsonObject = {"role": "assistant", "content": ""}
        return self._chunk(index, role, None, None)

    def chunk(self, piece: ChoiceGrew | ChoiceEnded) -> JsonObject:
        """The chunk of a piece that was taken on."""
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
        """What a stream ends with, where the request asked for it."""
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

    def _whole_choice(self, index: int, choice: _Choice) -> JsonObject:
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
