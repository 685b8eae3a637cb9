"""Read what a response says: thoughts, text and calls of tools, in the formats of model families.

All functions are pure, and take time in proportion to the text, whatever a policy wrote. A call
that cannot be read is an error text for the policy, never an exception.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from sluice.json_objects import (
    MAX_ARGUMENTS_BYTES,
    MAX_CALLS,
    MAX_TOOL_NAME_BYTES,
    problem_of_object,
    shown,
)
from sluice.types import Answer, Tool, ToolCall

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
PYTHON_TAG = "<|python_tag|>"
MARKS = (THINK, END_THINK, CALL, END_CALL, PYTHON_TAG)
"""Texts that a tokenizer may have as special tokens, and that are read here."""


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


def read_answer(text: str, tool_format: str, tools: Sequence[Tool] = ()) -> Answer:
    """Return what a finished response says.

    Args:
        text: of the response, with the marks of calls and thoughts, and without its end token.
        tool_format: one of `sluice.types.TOOL_FORMATS`.
        tools: the offered tools. ``qwen3_coder`` writes no types, and takes them from here.
    """
    reasoning, rest = _split_thoughts(text)
    try:
        content, calls = _READERS[tool_format](rest, tools)
    except _UnreadableError as error:
        return Answer(rest, reasoning, tool_error=str(error))
    if len(calls) > MAX_CALLS:
        error_text = f"{len(calls)} tool calls; make at most {MAX_CALLS}"
        return Answer(rest, reasoning, tool_error=error_text)
    numbered = (
        ToolCall(call.name, call.arguments, f"call_{index}") for index, call in enumerate(calls)
    )
    return Answer(content, reasoning, tuple(numbered))


def _split_thoughts(text: str) -> tuple[str, str]:
    """Return thoughts and the rest. The generation prompt may have opened the thoughts."""
    before, end, after = text.partition(END_THINK)
    opened = before.lstrip().startswith(THINK)
    if not end and not opened:
        return "", text
    thoughts = before.partition(THINK)[2] if opened else before
    return thoughts.strip("\n"), after.lstrip("\n")


def _plain(text: str, _tools: Sequence[Tool]) -> _Read:
    return text, []


def _hermes(text: str, _tools: Sequence[Tool]) -> _Read:
    content, bodies = _tagged(text)
    return content, [_json_call(body, number) for number, body in enumerate(bodies, 1)]


def _tagged(text: str) -> tuple[str, list[str]]:
    """Return the text outside of ``<tool_call>`` tags, and what each holds."""
    before, *parts = text.split(CALL)
    outside, bodies = [before], []
    for number, part in enumerate(parts, 1):
        body, end, after = part.partition(END_CALL)
        if not end:
            raise _UnreadableError(f"tool call {number}: {END_CALL} is missing")
        bodies.append(body.strip())
        outside.append(after)
    if not bodies:
        return text, bodies
    return "\n".join(each for each in map(str.strip, outside) if each), bodies


def _json_call(body: str, number: int) -> ToolCall:
    try:
        call = msgspec.json.decode(body, type=_JsonCall)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise _UnreadableError(
            f"tool call {number}: {shown(body)} is not read ({str(error)[:100]}); write "
            '{"name": ..., "arguments": {...}}'
        ) from error
    text = (bytes(call.arguments) or bytes(call.parameters)).decode() or "{}"
    if text.startswith('"'):  # some models write the object as a text
        text = msgspec.json.decode(text, type=str)
    return _checked(call.name, text, number)


def _checked(name: str, arguments: str, number: int) -> ToolCall:
    if not name or len(name.encode(errors="replace")) > MAX_TOOL_NAME_BYTES:
        raise _UnreadableError(
            f"tool call {number}: {shown(name)} is no name of a tool; write one of those given"
        )
    if problem := problem_of_object(arguments, MAX_ARGUMENTS_BYTES):
        raise _UnreadableError(f"tool call {number}: arguments: {problem}")
    return ToolCall(name, arguments)


def _qwen3_coder(text: str, tools: Sequence[Tool]) -> _Read:
    content, bodies = _tagged(text)
    types = {tool.name: _parameter_types(tool) for tool in tools} if bodies else {}
    return content, [_xml_call(body, types, number) for number, body in enumerate(bodies, 1)]


def _xml_call(body: str, types: Mapping[str, _Types], number: int) -> ToolCall:
    name, closed, rest = body.removeprefix(FUNCTION).partition(">")
    inside, ended, after = rest.partition(END_FUNCTION)
    if not body.startswith(FUNCTION) or not closed or not ended:
        raise _UnreadableError(
            f"tool call {number}: {shown(body)} is not read; write {FUNCTION}NAME>, "
            f"parameters, and {END_FUNCTION}"
        )
    before, *parts = inside.split(PARAMETER)
    beside, pairs = [before, after], list[str]()
    for part in parts:
        key, closed, rest = part.partition(">")
        value, ended, after = rest.partition(END_PARAMETER)
        if not closed or not ended:
            raise _UnreadableError(
                f"tool call {number}: {shown(part)} is not read; write {PARAMETER}KEY>, the "
                f"value, and {END_PARAMETER}"
            )
        beside.append(after)
        declared = types.get(name, {}).get(key)
        value = value.removeprefix("\n").removesuffix("\n")
        pairs.append(f"{json.dumps(key, ensure_ascii=False)}: {_json_value(value, declared)}")
    if words := "".join(beside).strip():
        raise _UnreadableError(
            f"tool call {number}: {shown(words)} stands beside the parameters; write text before "
            f"{CALL}"
        )
    return _checked(name, f"{{{', '.join(pairs)}}}", number)


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
        name: _allowed(each) if isinstance(each, dict) else None
        for name, each in properties.items()
    }


def _allowed(schema: Mapping[str, object]) -> set[str]:
    """Return the types that a schema names; none: it allows all."""
    found = set[str]()
    for key in ("type", "anyOf", "oneOf"):
        named = schema.get(key, ())
        for each in named if isinstance(named, list) else [named]:
            if isinstance(each, dict):
                found |= _allowed(each)
            elif isinstance(each, str):
                found.add(each)
    return found


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
    found: list[str] = []
    while start < len(body):
        try:
            _, end = decoder.raw_decode(body, start)
        except (ValueError, RecursionError) as error:
            number = len(found) + 1
            raise _UnreadableError(
                f"tool call {number}: {shown(body[start : start + 100])} is not read "
                f'({str(error)[:100]}); write {{"name": ..., "parameters": {{...}}}}'
            ) from error
        found.append(body[start:end])
        start = end
        while start < len(body) and (body[start] == ";" or body[start].isspace()):
            start += 1
    return found


_READERS: Mapping[str, Callable[[str, Sequence[Tool]], _Read]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3_json": _llama3_json,
    "plain": _plain,
}
