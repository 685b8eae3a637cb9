"""Continue a conversation from its exact tokens: render only the new turns.

A chat template renders whole conversations. The bridge finds out once what the template writes
after an answer and after calls: the end token, and the text after it, such as a newline that no
policy samples. It proves on generated dialogues that this equals a full rendering. A template that
writes earlier answers differently, for example without thoughts, fails the proof, and its
conversations are not continued. If a template repeats a part of a call beside the result, such as
its name, the call is read from the tokens so far.
"""

from __future__ import annotations

import itertools
import json
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from services.rollout.tool_calls import PLAIN, THINK, read_answer, thought_marks
from sluice.errors import HistoryRewrittenError, InvalidRequestError
from sluice.json_objects import shown
from sluice.types import TOOL_FORMATS, ChatMessage, TokenIds, Tool, ToolCall

USER, TOOL = "user", "tool"
_ASSISTANT = "assistant"
_DIALOGUES, _MAX_ROUNDS = 5, 3
_QUESTION = ChatMessage(USER, "What is 2 + 2?")
_PROBE = Tool(
    "sluice_probe",
    "Echo a text.",
    '{"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}',
)
_OTHER = "sluice_other", 7
"""A tool name and a call number that occur in no dialogue of the proof."""
_IDS = ("call{number:05}", "functions.{name}:{number}")
"""Call ids: some templates require nine letters, and Kimi's requires the name."""
_WORDS = (
    "jar",
    "7",
    "sum = 12",
    "été",
    "日本",
    "x < y",
    "a\nb",
    "{}",
    '"q"',
    "…",
    "ok.",
    "print(1)",
)


@dataclass(frozen=True, slots=True)
class TemplateAccess:
    """The functions of a tokenizer that the bridge uses.

    Args:
        render: renders turns and tools with a generation prompt. Raises InvalidRequestError if the
            template refuses them.
        encode: returns the tokens of a text without adding special ones.
        decode: returns the text of tokens, with special tokens.
        control_tokens: texts of special tokens, by id.
        end_tokens: tokens that end a response.
    """

    render: Callable[[Sequence[ChatMessage], Sequence[Tool]], str]
    encode: Callable[[str], list[int]]
    decode: Callable[[TokenIds], str]
    control_tokens: Mapping[int, str]
    end_tokens: frozenset[int]


class History(NamedTuple):
    """A kind of conversation: the role of the new turns, and whether earlier answers have
    thoughts."""

    role: str
    thinks: bool


_KINDS = tuple(History(role, thinks) for role in (USER, TOOL) for thinks in (False, True))


class _Calls(NamedTuple):
    """How a template writes calls.

    Args:
        max_calls: most calls in one answer; 0 if the template writes none.
        tool_format: the format that reads them back; ``plain`` if none does.
        ids: call ids that the template accepts.
        close: the text of the token that ends an answer with calls.
    """

    max_calls: int = 0
    tool_format: str = PLAIN
    ids: str = ""
    close: str = ""


class Bridge:
    """Knows what a template writes after an answer.

    Args:
        access: renders and tokenizes.

    The first use needs a few renderings; `refusals` needs about a hundred, half for each role.
    """

    def __init__(self, access: TemplateAccess) -> None:
        self._access = access
        self._mark = f"mark{secrets.token_hex(8)}"
        self._refusals: dict[History, str] = {}

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template writes the offered tools into a prompt."""
        try:
            return _PROBE.name in self._access.render([_QUESTION], [_PROBE])
        except InvalidRequestError:
            return False

    @cached_property
    def shows_lone_results(self) -> bool:
        """Whether the template writes a tool's turn that follows no call."""
        turns = [_QUESTION, ChatMessage(_ASSISTANT, "7"), ChatMessage(TOOL, self._mark)]
        try:
            return self._mark in self._access.render(turns, [_PROBE])
        except InvalidRequestError:
            return False

    @property
    def tool_format(self) -> str:
        """The format in which the template writes calls; ``plain`` if it cannot be read."""
        return self._calls.tool_format

    @property
    def refusals(self) -> Mapping[History, str]:
        """Why conversations of a kind are not continued; empty if they are."""
        return {kind: self._why_refused(kind) for kind in _KINDS}

    def extend_tokens(
        self, earlier: TokenIds, messages: Sequence[ChatMessage], tools: Sequence[Tool]
    ) -> TokenIds:
        """Return the earlier tokens, then those of new turns and of the generation prompt.

        Args:
            earlier: [tokens] of the conversation so far, at least one.
            messages: new turns of users and tools, at least one.
            tools: the offered tools.

        Raises:
            HistoryRewrittenError: the template writes earlier turns differently in history.
            InvalidRequestError: the template refuses the new turns.
        """
        for role in dict.fromkeys(message.role for message in messages):
            if reason := self._reason(role, earlier):
                raise HistoryRewrittenError(
                    f"prompt.continuation: the template rewrites history before turns of {role} "
                    f"({reason}); begin a new root: send the whole conversation as a chat"
                )
        calls: Sequence[ToolCall] = ()
        if messages[0].role == TOOL and self._repeats_calls:
            calls = self._last_calls(earlier, messages, tools)
        added = self._access.encode(self._after_answer(messages, tools, calls))
        end_tokens = {added[0]}
        if self._calls.close in ("", self._close):  # otherwise it may be the role of the next turn
            end_tokens |= self._access.end_tokens
        has_ended = int(earlier[-1]) in end_tokens
        return np.concatenate([earlier, np.asarray(added[has_ended:], np.uint32)])

    def _reason(self, role: str, earlier: TokenIds) -> str:
        without, with_thoughts = (
            self._why_refused(History(role, thinks)) for thinks in (False, True)
        )
        # Do not decode long texts if it makes no difference.
        _, end_think = thought_marks(self.tool_format)
        if without == with_thoughts or end_think not in self._access.decode(earlier):
            return without
        return with_thoughts

    @cached_property
    def _close(self) -> str:
        """The text of the token that the template writes after an answer."""
        past = [_QUESTION, ChatMessage(_ASSISTANT, self._mark), _QUESTION]
        text_after = self._access.render(past, ()).partition(self._mark)[2]
        first_ids = self._access.encode(text_after)[:1]
        end = self._access.control_tokens.get(first_ids[0], "") if first_ids else ""
        if not end or not text_after.startswith(end):
            raise HistoryRewrittenError(
                f"no end token follows an answer, but {shown(text_after[:20])}"
            )
        return end

    @cached_property
    def _calls(self) -> _Calls:
        try:
            close = self._close
        except (InvalidRequestError, HistoryRewrittenError):
            return _Calls()
        unread = _Calls()
        for number, ids in itertools.product((2, 1), _IDS):
            answer = self._calling_message("", [self._mark] * number, ids)
            try:
                head = self._access.render([_QUESTION], [_PROBE])
                text = self._access.render([_QUESTION, answer, *_results(answer)], [_PROBE])
            except InvalidRequestError:
                continue
            if self._mark not in text:
                break
            tool_format, end = self._answer_format(text[_num_shared(head, text) :], answer)
            if end:
                return _Calls(number, tool_format, ids, end)
            unread = unread if unread.max_calls else _Calls(number, PLAIN, ids, close)
        return unread

    def _answer_format(self, text: str, answer: ChatMessage) -> tuple[str, str]:
        """Return the format that reads an answer's calls, and the end token after them."""
        places = ((text.find(end), end) for end in self._access.control_tokens.values())
        for place, end in sorted(match for match in places if match[0] >= 0):
            for tool_format in TOOL_FORMATS:
                calls = read_answer(text[:place], tool_format, [_PROBE]).tool_calls
                if _same_calls(calls, answer):
                    return tool_format, end
        return PLAIN, ""

    def _calling_message(
        self, content: str, texts: Sequence[str], ids: str, tool: tuple[str, int] = (_PROBE.name, 0)
    ) -> ChatMessage:
        name, first_number = tool
        calls = tuple(
            ToolCall(
                name,
                json.dumps({"text": text}, ensure_ascii=False),
                ids.format(name=name, number=number),
            )
            for number, text in enumerate(texts, first_number)
        )
        return ChatMessage(_ASSISTANT, content, calls)

    @cached_property
    def _repeats_calls(self) -> bool:
        """Whether the template repeats a part of a call beside its result, such as its name."""
        if not self._calls.max_calls:
            return False
        try:
            return _OTHER[0] in self._after_answer([ChatMessage(TOOL, "7")], [_PROBE])
        except (InvalidRequestError, HistoryRewrittenError):
            return True

    @cached_property
    def _prompt(self) -> str:
        """What the template writes after a question."""
        question = ChatMessage(USER, self._mark)
        return self._access.render([question], ()).rpartition(self._mark)[2]

    @cached_property
    def _after_result(self) -> str:
        """What the template writes after a result."""
        called = self._calling_message("", ["7"], self._calls.ids)
        result = replace(_results(called)[0], content=self._mark)
        return self._access.render([_QUESTION, called, result], [_PROBE]).rpartition(self._mark)[2]

    def _last_calls(
        self, earlier: TokenIds, messages: Sequence[ChatMessage], tools: Sequence[Tool]
    ) -> Sequence[ToolCall]:
        """Return the calls whose results the new turns begin with."""
        results = list(itertools.takewhile(lambda message: message.role == TOOL, messages))
        answer_text = self._access.decode(earlier).removesuffix(self._calls.close)
        for prompt_text in (self._prompt, self._after_result):  # some write no prompt after results
            answer_text = answer_text.rpartition(prompt_text)[2] if prompt_text else answer_text
        calls = read_answer(answer_text, self.tool_format, tools).tool_calls[: len(results)]
        if len(calls) < len(results):
            raise HistoryRewrittenError(
                "prompt.continuation: a result follows no call that is read, and the template "
                "repeats calls beside results; begin a new root: send the conversation as a chat"
            )
        pairs = zip(calls, results, strict=False)
        return [replace(call, call_id=result.tool_call_id) for call, result in pairs]

    def _after_answer(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        calls: Sequence[ToolCall] = (),
    ) -> str:
        """Return the end token of an answer, and the text that the template writes after it.

        Args:
            messages: what follows the answer.
            tools: the offered tools.
            calls: the answer's calls, if the template repeats them; empty for a dummy call.
        """
        past, close = ChatMessage(_ASSISTANT, self._mark), self._close
        if messages[0].role == TOOL and self._calls.max_calls:
            past, close = (
                self._calling_message("", [self._mark], self._calls.ids, _OTHER),
                self._calls.close,
            )
            marked = json.dumps({"text": self._mark})
            marked_calls = tuple(replace(call, arguments=marked) for call in calls)
            past = replace(past, tool_calls=marked_calls or past.tool_calls)
        text = self._access.render([_QUESTION, past, *messages], tools)
        _, closing, added = text.rpartition(self._mark)[2].partition(close)
        if not closing:
            raise HistoryRewrittenError(
                "prompt.continuation: the template leaves out answers; begin a new root: send the "
                "conversation as a chat"
            )
        return close + added

    def _why_refused(self, kind: History) -> str:
        if kind not in self._refusals:
            self._refusals[kind] = self._refusal(kind)
        return self._refusals[kind]

    def _refusal(self, kind: History) -> str:
        """Return how the bridge differs from a full rendering; empty if it does not."""
        try:
            for number in range(_DIALOGUES):
                self._prove_dialogue(kind, number, random.Random(number))
        except (InvalidRequestError, HistoryRewrittenError) as error:
            return str(error)
        return ""

    def _prove_dialogue(self, kind: History, number: int, rng: random.Random) -> None:
        tools = [_PROBE] if kind.role == TOOL and self._calls.max_calls else []
        messages = [ChatMessage(USER, _words(rng))]
        for _ in range(1 + number % _MAX_ROUNDS):
            think, end_think = thought_marks(self.tool_format)
            thoughts = f"{think}\n{_words(rng)}\n{end_think}\n\n" if kind.thinks else ""
            if tools:
                texts = [_words(rng) for _ in range(rng.randint(1, self._calls.max_calls))]
                answer = self._calling_message(thoughts, texts, self._calls.ids)
                if think != THINK:  # only the template knows where to write them
                    reasoning = read_answer(thoughts, self.tool_format).reasoning
                    answer = replace(answer, content="", reasoning=reasoning)
            else:
                answer = ChatMessage(_ASSISTANT, thoughts + _words(rng))
            new_messages = _results(answer) or [ChatMessage(kind.role, _words(rng))]
            self._prove_turn(messages, answer, new_messages, tools)
            messages += [answer, *new_messages]

    def _prove_turn(
        self,
        history: Sequence[ChatMessage],
        answer: ChatMessage,
        new_messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
    ) -> None:
        head = self._access.render(history, tools)
        full = self._access.render([*history, answer, *new_messages], tools)
        added = self._after_answer(
            new_messages, tools, answer.tool_calls if self._repeats_calls else ()
        )
        answer_text = full[len(head) :].removesuffix(added)
        if not full.startswith(head):
            raise HistoryRewrittenError("what comes before an answer changes once it is history")
        if len(head) + len(answer_text) + len(added) != len(full):
            raise HistoryRewrittenError("new turns are not always written alike")
        if not self._is_verbatim(answer_text, answer, tools):
            part = answer.content or answer.tool_calls[0].arguments
            raise HistoryRewrittenError(f"{shown(part)} becomes {shown(answer_text)}")
        if any(message.content not in added for message in new_messages):
            raise HistoryRewrittenError(f"turns of {new_messages[0].role} are left out or changed")
        encode = self._access.encode
        if encode(full) != encode(head + answer_text) + encode(added):
            raise HistoryRewrittenError("new turns share tokens with what is before")

    def _is_verbatim(self, answer_text: str, answer: ChatMessage, tools: Sequence[Tool]) -> bool:
        if not answer.tool_calls:
            return answer_text == answer.content
        if self.tool_format == PLAIN:  # nothing here reads its calls
            text = json.loads(answer.tool_calls[-1].arguments)["text"]
            text_after = answer_text.rpartition(text)[2]
            return answer_text.startswith(answer.content) and not any(
                token in text_after for token in self._access.control_tokens.values()
            )
        parsed = read_answer(answer_text, self.tool_format, tools)
        thoughts = answer.reasoning or read_answer(answer.content, self.tool_format).reasoning
        is_alone = not parsed.content and parsed.reasoning == thoughts
        return is_alone and _same_calls(parsed.tool_calls, answer)


def _num_shared(head: str, text: str) -> int:
    """Return where a text departs from a generation prompt: at a line, such as one of empty
    thoughts."""
    start = 0
    for line in head.splitlines(keepends=True):
        if not text.startswith(line, start):
            break
        start += len(line)
    return start


def _same_calls(calls: Sequence[ToolCall], answer: ChatMessage) -> bool:
    return [(call.name, json.loads(call.arguments)) for call in calls] == [
        (call.name, json.loads(call.arguments)) for call in answer.tool_calls
    ]


def _results(answer: ChatMessage) -> list[ChatMessage]:
    return [
        ChatMessage(TOOL, f"result {number}", tool_call_id=call.call_id)
        for number, call in enumerate(answer.tool_calls)
    ]


def _words(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(1, 6))).strip()
