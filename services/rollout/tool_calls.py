"""Parse a response into thoughts, text and tool calls, in the formats of model families.

All functions are pure, and take time in proportion to the text, whatever a policy wrote. A call
that cannot be read is an error text for the policy, never an exception.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from sluice.json_objects import (
    MAX_ARGUMENTS_BYTES,
    MAX_CALLS,
    MAX_TOOL_NAME_BYTES,
    TOOL_NAME,
    problem_of_object,
    shown,
)
from sluice.types import Answer, Tool, ToolCall

PLAIN = "plain"
THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_THOUGHTS = (THINK, END_THINK)
_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_ANALYSIS = f"{_CHANNEL}analysis{_MESSAGE}"
_SECTION, _END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _END_KIMI_CALL = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_GEMMA_CALL, _END_GEMMA_CALL, _GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_DSML = "｜DSML｜"
_ASSISTANT = "assistant"
_IS_TEXT = '" string="'
_TYPES_WRITTEN: Mapping[str, Collection[str] | None] = {"true": None, "false": ()}
"""By what deepseek_v4 writes beside a parameter's name."""
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


class _XmlMarks(NamedTuple):
    """How a format in the manner of XML writes calls.

    Args:
        block: begins one or more calls.
        call: stands before a function's name, `named` after it.
        key: stands before a parameter's name, `keyed` after it, then `value` in some formats.
        undeclared: types of a parameter that the schema lacks, as `_json_value` takes them.
        typed: whether a parameter's name is followed by what says if it is a text.
    """

    block: str
    end_block: str
    call: str
    named: str
    end_call: str
    key: str
    keyed: str
    end_value: str
    value: str = ""
    undeclared: Collection[str] | None = ()
    typed: bool = False

    @property
    def tokens(self) -> list[str]:
        """Texts that a tokenizer may have as special tokens."""
        return [mark for mark in self if isinstance(mark, str) and mark]


_QWEN3_CODER = _XmlMarks(
    *(CALL, END_CALL, "<function=", ">", "</function>", "<parameter=", ">", "</parameter>"),
    undeclared=None,
)
_SEED = _QWEN3_CODER._replace(
    block="<seed:tool_call>", end_block="</seed:tool_call>", undeclared=()
)
_MINIMAX = _XmlMarks(
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', "</invoke>"),
    *('<parameter name="', '">', "</parameter>"),
)
_DEEPSEEK_V4 = _XmlMarks(
    *(f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>"),
    *(f'<{_DSML}invoke name="', '">', f"</{_DSML}invoke>"),
    *(f'<{_DSML}parameter name="', '">', f"</{_DSML}parameter>"),
    typed=True,
)
_GLM = _XmlMarks(
    *(CALL, END_CALL, "", "", "", "<arg_key>", "</arg_key>", "</arg_value>", "<arg_value>"),
)


class _UnreadableError(Exception):
    """A call cannot be read; the text is for the policy."""


class _JsonCall(msgspec.Struct):
    """A call as JSON; its arguments stay the text that was sampled."""

    name: str
    arguments: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    parameters: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


_Read = tuple[str, list[ToolCall]]
_Types = Mapping[str, Collection[str] | None]
"""By parameter, as `_json_value` takes them."""
_BEGINS_CALL = re.compile(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:arguments|parameters)"')


def read_answer(
    text: str, tool_format: str, tools: Sequence[Tool] = (), *, family: str = PLAIN
) -> Answer:
    """Parse a finished response into an answer.

    Args:
        text: of the response, with the marks of calls and thoughts, and without its end token.
        tool_format: one of `sluice.types.TOOL_FORMATS`.
        tools: the offered tools. Formats that write no types take them from here.
        family: the format in which ``plain``, which reads no calls, finds thoughts and text.
    """
    form = _FORMATS[family if tool_format == PLAIN else tool_format]
    reasoning, remainder = form.split(text)
    if tool_format == PLAIN:
        return Answer(form.text(remainder), reasoning)
    try:
        content, calls = form.read(remainder, tools)
    except _UnreadableError as error:
        return Answer(remainder, reasoning, tool_error=str(error))
    if len(calls) > MAX_CALLS:
        error_text = f"{len(calls)} tool calls; make at most {MAX_CALLS}"
        return Answer(remainder, reasoning, tool_error=error_text)
    numbered = (
        replace(call, call_id=call.call_id or f"call_{index}") for index, call in enumerate(calls)
    )
    return Answer(content, reasoning, tuple(numbered))


def marks_of(tool_format: str) -> Collection[str]:
    """Return texts that a tokenizer may have as special tokens, and that the format reads."""
    form = _FORMATS[tool_format]
    return {*form.marks, *form.thoughts}


def thought_marks(tool_format: str) -> tuple[str, str]:
    """Return what stands before a format's thoughts, and what after them."""
    return _FORMATS[tool_format].thoughts


class _Format(NamedTuple):
    """How a model family writes answers.

    Args:
        read: returns the content and the calls of what follows the thoughts.
        marks: texts that a tokenizer may have as special tokens, beside those of thoughts.
        thoughts: what stands before them, and what after.
        text: returns what an answer without calls says, of what follows the thoughts.
    """

    read: Callable[[str, Sequence[Tool]], _Read]
    marks: Collection[str]
    thoughts: tuple[str, str] = _THOUGHTS
    text: Callable[[str], str] = str

    def split(self, text: str) -> tuple[str, str]:
        """Return thoughts and the rest."""
        if self.thoughts[0] == _ANALYSIS:
            return _split_channels(text)
        return _split_thoughts(text, *self.thoughts)


def _split_thoughts(text: str, think: str, end_think: str) -> tuple[str, str]:
    """Return thoughts and the rest. The generation prompt may have opened the thoughts."""
    text_before, end, text_after = text.partition(end_think)
    opened = text_before.lstrip().startswith(think)
    if not end and not opened:
        return "", text
    thoughts = text_before.partition(think)[2] if opened else text_before
    return thoughts.strip("\n"), text_after.lstrip("\n")


def _split_channels(text: str) -> tuple[str, str]:
    """Return the analysis of an answer in channels, and its other messages."""
    thoughts, other_messages = list[str](), list[str]()
    for number, message in enumerate(text.split(_START)):
        header, _, body = message.partition(_MESSAGE)
        if f"{header}{_MESSAGE}".removeprefix(_ASSISTANT) == _ANALYSIS:
            thoughts.append(body.partition(_END)[0])
        else:
            other_messages.append(f"{_START if number else ''}{message}")
    return "\n".join(thoughts), "".join(other_messages)


def _plain(text: str, _tools: Sequence[Tool]) -> _Read:
    return text, []


def _hermes(text: str, _tools: Sequence[Tool]) -> _Read:
    content, bodies = _split_tagged(text, CALL, END_CALL)
    return content, [_json_call(body, number) for number, body in enumerate(bodies, 1)]


def _split_tagged(text: str, begin: str, end_tag: str) -> tuple[str, list[str]]:
    """Return the text outside of tags, and what each pair of them holds."""
    text_before, *parts = text.split(begin)
    outside_texts, bodies = [text_before], []
    for number, part in enumerate(parts, 1):
        body, end, text_after = part.partition(end_tag)
        if not end:
            raise _UnreadableError(f"tool call {number}: {end_tag} is missing")
        bodies.append(body.strip())
        outside_texts.append(text_after)
    if not bodies:
        return text, bodies
    return "\n".join(piece for piece in map(str.strip, outside_texts) if piece), bodies


def _json_call(body: str, number: int) -> ToolCall:
    try:
        call = msgspec.json.decode(body, type=_JsonCall)
        text = (bytes(call.arguments) or bytes(call.parameters)).decode()
        num_keys = 2 if text else len(msgspec.json.decode(body))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise _UnreadableError(
            f"tool call {number}: {shown(body)} is not read ({str(error)[:100]}); write "
            '{"name": ..., "arguments": {...}}'
        ) from error
    if not text and num_keys > 1:
        raise _UnreadableError(
            f"tool call {number}: {shown(body)} has no arguments, and has other keys; write "
            '{"name": ..., "arguments": {...}}'
        )
    text = text or "{}"
    if text.startswith('"'):  # some models write the object as a text
        text = msgspec.json.decode(text, type=str)
    return _checked_call(call.name, text, number)


def _checked_call(name: str, arguments: str, number: int) -> ToolCall:
    if not name or len(name.encode(errors="replace")) > MAX_TOOL_NAME_BYTES:
        raise _UnreadableError(
            f"tool call {number}: {shown(name)} is no name of a tool; write one of those given"
        )
    if problem := problem_of_object(arguments, MAX_ARGUMENTS_BYTES):
        raise _UnreadableError(f"tool call {number}: arguments: {problem}")
    return ToolCall(name, arguments)


def _xml(marks: _XmlMarks) -> Callable[[str, Sequence[Tool]], _Read]:
    def read(text: str, tools: Sequence[Tool]) -> _Read:
        content, bodies = _split_tagged(text, marks.block, marks.end_block)
        types = {tool.name: _parameter_types(tool) for tool in tools} if bodies else {}
        calls: list[ToolCall] = []
        for body in bodies:
            for name, parameters_text in _split_xml_calls(body, marks, len(calls) + 1):
                number = len(calls) + 1
                arguments = _xml_arguments(parameters_text, marks, types.get(name, {}), number)
                calls.append(_checked_call(name, arguments, number))
        return content, calls

    return read


def _split_xml_calls(body: str, marks: _XmlMarks, number: int) -> Iterator[tuple[str, str]]:
    """Yield a block's calls: the name, and the text of its parameters."""
    if not marks.call:
        name, key, remainder = body.partition(marks.key)
        if not TOOL_NAME.fullmatch(name.strip()):
            raise _UnreadableError(
                f"tool call {number}: {shown(name)} is not read; write NAME{marks.key}KEY"
                f"{marks.keyed}{marks.value}, the value, and {marks.end_value}"
            )
        yield name.strip(), key + remainder
        return
    *calls, text_after = body.split(marks.end_call)
    if calls and text_after.strip():
        raise _outside_error(text_after, marks, number + len(calls) - 1)
    for index, call in enumerate(calls or [body]):
        name, named, parameters_text = call.lstrip().removeprefix(marks.call).partition(marks.named)
        if not calls or not named or not call.lstrip().startswith(marks.call):
            raise _UnreadableError(
                f"tool call {number + index}: {shown(call.strip())} is not read; write "
                f"{marks.call}NAME{marks.named}, parameters, and {marks.end_call}"
            )
        yield name, parameters_text


def _outside_error(words: str, marks: _XmlMarks, number: int) -> _UnreadableError:
    return _UnreadableError(
        f"tool call {number}: {shown(words.strip())} stands beside the parameters; write text "
        f"before {marks.block}"
    )


def _xml_arguments(parameters_text: str, marks: _XmlMarks, types: _Types, number: int) -> str:
    """Return the JSON object that a call's parameters make."""
    text_before, *parts = parameters_text.split(marks.key)
    outside_texts, pairs = [text_before], list[str]()
    for part in parts:
        key, keyed, remainder = part.partition(marks.keyed)
        if marks.value:
            remainder = remainder.lstrip()
        value, closed, text_after = remainder.removeprefix(marks.value).partition(marks.end_value)
        key, _, is_text = key.partition(_IS_TEXT) if marks.typed else (key, "", "")
        is_typed = is_text in _TYPES_WRITTEN
        if (
            not keyed
            or not closed
            or not remainder.startswith(marks.value)
            or is_typed != marks.typed
        ):
            raise _UnreadableError(
                f"tool call {number}: {shown(part)} is not read; write {marks.key}KEY"
                f"{_IS_TEXT + 'true' if marks.typed else ''}{marks.keyed}{marks.value}, the value, "
                f"and {marks.end_value}"
            )
        outside_texts.append(text_after)
        if marks.typed:
            declared = _TYPES_WRITTEN[is_text]
        else:
            declared = types.get(key, marks.undeclared)
            value = value.removeprefix("\n").removesuffix("\n")
        pairs.append(f"{json.dumps(key, ensure_ascii=False)}: {_json_value(value, declared)}")
    if words := "".join(outside_texts).strip():
        raise _outside_error(words, marks, number)
    return f"{{{', '.join(pairs)}}}"


def _json_value(text: str, types: Collection[str] | None) -> str:
    """Return a parameter's value as JSON.

    Args:
        text: as it was sampled.
        types: what the schema allows; none: all; None: it has no such parameter, so it is a text.
    """
    if types is not None:
        if "boolean" in types and "string" not in types:
            text = {"True": "true", "False": "false"}.get(text, text)  # as Python writes them
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError, ValueError):
            pass
        else:
            # A number or a boolean may be a text that looks like one.
            kind = {type(None): "null", dict: "object", list: "array"}.get(type(value), "")
            if "string" not in types or kind in types:
                return text
    return json.dumps(text, ensure_ascii=False)


def _parameter_types(tool: Tool) -> _Types:
    schema = msgspec.json.decode(tool.parameters) if tool.parameters else {}
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {
        name: _allowed_types(value) if isinstance(value, dict) else None
        for name, value in properties.items()
    }


def _allowed_types(schema: Mapping[str, object]) -> set[str]:
    """Return the types that a schema names; none: it allows all."""
    names = set[str]()
    for key in ("type", "anyOf", "oneOf"):
        named = schema.get(key, ())
        for type_name in named if isinstance(named, list) else [named]:
            if isinstance(type_name, dict):
                names |= _allowed_types(type_name)
            elif isinstance(type_name, str):
                names.add(type_name)
    return names


def _llama3_json(text: str, _tools: Sequence[Tool]) -> _Read:
    content, tag, tagged = text.partition(PYTHON_TAG)
    body = (tagged if tag else text).strip()
    # Without the mark, a call is the whole response.
    if not tag and not _BEGINS_CALL.match(body):
        return text, []
    calls: list[ToolCall] = []
    for number, part in enumerate(_objects(body), 1):
        calls.append(_json_call(part, number))
    return content.strip() if tag else "", calls


def _objects(body: str) -> list[str]:
    """Return the JSON objects of a text in which ``;`` separates them."""
    decoder, start = json.JSONDecoder(), 0
    objects: list[str] = []
    while start < len(body):
        try:
            _, end = decoder.raw_decode(body, start)
        except (ValueError, RecursionError) as error:
            number = len(objects) + 1
            raise _UnreadableError(
                f"tool call {number}: {shown(body[start : start + 100])} is not read "
                f'({str(error)[:100]}); write {{"name": ..., "parameters": {{...}}}}'
            ) from error
        objects.append(body[start:end])
        start = end
        while start < len(body) and (body[start] == ";" or body[start].isspace()):
            start += 1
    return objects


def _kimi(text: str, _tools: Sequence[Tool]) -> _Read:
    content, sections = _split_tagged(text, _SECTION, _END_SECTION)
    calls: list[ToolCall] = []
    for section in sections:
        words, bodies = _split_tagged(section, _KIMI_CALL, _END_KIMI_CALL)
        for body in bodies or [""]:
            identity, mark, arguments = body.partition(_KIMI_ARGUMENTS)
            if not mark or words:
                raise _UnreadableError(
                    f"tool call {len(calls) + 1}: {shown(section)} is not read; write "
                    f"{_KIMI_CALL}functions.NAME:0{_KIMI_ARGUMENTS}{{...}}{_END_KIMI_CALL}"
                )
            identity = identity.strip()
            name = _KIMI_NUMBER.sub("", identity).removeprefix("functions.")
            call = _checked_call(name, arguments.strip(), len(calls) + 1)
            # Templates write it beside the result.
            calls.append(replace(call, call_id=identity))
    return content, calls


_KIMI_NUMBER = re.compile(r":[0-9]{1,9}\Z")


def _gemma4(text: str, _tools: Sequence[Tool]) -> _Read:
    content, bodies = _split_tagged(text, _GEMMA_CALL, _END_GEMMA_CALL)
    calls: list[ToolCall] = []
    for number, body in enumerate(bodies, 1):
        name, brace, remainder = body.removeprefix("call:").partition("{")
        texts = remainder.split(_GEMMA_QUOTE)
        if not brace or not body.startswith("call:") or len(texts) % 2 == 0:
            raise _UnreadableError(
                f"tool call {number}: {shown(body)} is not read; write call:NAME{{key:value}}, "
                f"with {_GEMMA_QUOTE} around texts"
            )
        arguments = "".join(
            json.dumps(part, ensure_ascii=False)
            if index % 2
            else _GEMMA_WORD.sub(_gemma_word, part)
            for index, part in enumerate(texts)
        )
        calls.append(_checked_call(name, f"{{{arguments}", number))
    return content, calls


_GEMMA_WORD = re.compile(r"(?<![\w.$-])([\w$][\w.$-]*+)(\s*+:)?")


def _gemma_word(match: re.Match[str]) -> str:
    """Return a bare key or value as JSON; templates write constants as Python does."""
    word, colon = match.groups()
    return f'"{word}": ' if colon else _CONSTANTS.get(word, word)


_ENDS = re.compile(r"<\|(?:end|call|return)\|>")


def _messages(text: str) -> Iterator[tuple[str | None, str]]:
    """Yield the recipient, if any, and the text of each message of an answer in channels."""
    for message in text.split(_START) if _has_channels(text) else ():
        header, _, body = message.partition(_MESSAGE)
        _, to, remainder = header.partition(" to=")
        recipient = re.split(r"[\s<]", remainder, maxsplit=1)[0] if to else None
        yield recipient, _ENDS.split(body, maxsplit=1)[0]


def _has_channels(text: str) -> bool:
    return any(mark in text for mark in (_START, _CHANNEL, _MESSAGE))


def _channel_text(text: str) -> str:
    if not _has_channels(text):
        return text
    return "\n".join(body for recipient, body in _messages(text) if body and recipient is None)


def _gpt_oss(text: str, _tools: Sequence[Tool]) -> _Read:
    calls: list[ToolCall] = []
    for recipient, body in _messages(text):
        if recipient is not None:
            name = recipient.removeprefix("functions.")
            calls.append(_checked_call(name, body, len(calls) + 1))
    return _channel_text(text), calls


_MARKS = (CALL, END_CALL, PYTHON_TAG)
_FORMATS: Mapping[str, _Format] = {
    "hermes": _Format(_hermes, _MARKS),
    "qwen3_coder": _Format(_xml(_QWEN3_CODER), _MARKS),
    "llama3_json": _Format(_llama3_json, _MARKS),
    "glm": _Format(_xml(_GLM), _GLM.tokens),
    "kimi": _Format(_kimi, (_SECTION, _END_SECTION, _KIMI_CALL, _KIMI_ARGUMENTS, _END_KIMI_CALL)),
    "minimax": _Format(_xml(_MINIMAX), _MINIMAX.tokens),
    "seed": _Format(_xml(_SEED), _SEED.tokens, ("<seed:think>", "</seed:think>")),
    "deepseek_v4": _Format(_xml(_DEEPSEEK_V4), (_DSML, *_DEEPSEEK_V4.tokens)),
    "gemma4": _Format(
        _gemma4,
        (_GEMMA_CALL, _END_GEMMA_CALL, _GEMMA_QUOTE, "<|channel>"),
        ("<|channel>thought\n", "<channel|>"),
    ),
    "gpt-oss": _Format(
        _gpt_oss,
        (_START, _CHANNEL, _MESSAGE, _END, "<|constrain|>"),
        (_ANALYSIS, _END),
        _channel_text,
    ),
    PLAIN: _Format(_plain, _MARKS),
}
