"""Tools, their calls, and what a response says: encode, decode, and check what a caller sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sluice.algorithm.episode_rules import CONTINUING_ROLES
from sluice.api.common.v1 import common_pb2 as common
from sluice.codec.fields import MAX_NAME_BYTES, check_count, check_text, shorten
from sluice.errors import InvalidRequestError
from sluice.json_objects import (
    MAX_ARGUMENTS_BYTES,
    MAX_CALLS,
    MAX_TOOL_NAME_BYTES,
    TOOL_NAME,
    problem_of_object,
)
from sluice.types import TOOL_FORMATS, Answer, ChatMessage, Tool, ToolCall

MAX_TOOLS = 128
_MAX_DESCRIPTION_BYTES, _MAX_PARAMETERS_BYTES = 1 << 14, 1 << 16
_ROLES = frozenset(("system", "assistant")) | CONTINUING_ROLES


def _check_object(field: str, text: str, max_bytes: int) -> None:
    if problem := problem_of_object(text, max_bytes):
        raise InvalidRequestError(f"{field}: {problem}")


def check_tools(field: str, tools: Sequence[common.Tool]) -> None:
    """Check tools that a caller offers. Raise InvalidRequestError, which names the field."""
    check_count(field, tools, MAX_TOOLS)
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = f"{field}[{index}].name"
        if not TOOL_NAME.fullmatch(tool.name):
            raise InvalidRequestError(
                f"{name}: {shorten(tool.name)}; send 1 to {MAX_TOOL_NAME_BYTES} of A-Z, a-z, "
                "0-9, _, -, . and :"
            )
        if tool.name in names:
            raise InvalidRequestError(f"{name}: {tool.name} is given twice; rename one")
        names.add(tool.name)
        check_text(f"{field}[{index}].description", tool.description, _MAX_DESCRIPTION_BYTES)
        if tool.parameters_json:
            parameters = f"{field}[{index}].parameters_json"
            _check_object(parameters, tool.parameters_json, _MAX_PARAMETERS_BYTES)


def check_calls(field: str, turn: common.ChatMessage) -> None:
    """Check the calls of a turn. Raise InvalidRequestError, which names the field."""
    if turn.tool_calls and turn.role != "assistant":
        raise InvalidRequestError(
            f"{field}.tool_calls: {len(turn.tool_calls)} of a turn with the role "
            f"{shorten(turn.role)}; only the assistant calls tools"
        )
    if turn.tool_call_id and turn.role != "tool":
        raise InvalidRequestError(
            f"{field}.tool_call_id: {shorten(turn.tool_call_id)} of a turn with the role "
            f"{shorten(turn.role)}; only tools answer calls"
        )
    check_text(f"{field}.tool_call_id", turn.tool_call_id, MAX_NAME_BYTES)
    check_count(f"{field}.tool_calls", turn.tool_calls, MAX_CALLS)
    for index, call in enumerate(turn.tool_calls):
        place = f"{field}.tool_calls[{index}]"
        check_text(f"{place}.id", call.id, MAX_NAME_BYTES)
        check_text(f"{place}.name", call.name, MAX_TOOL_NAME_BYTES)
        if not call.name:
            raise InvalidRequestError(f"{place}.name: empty; name the tool")
        _check_object(f"{place}.arguments_json", call.arguments_json, MAX_ARGUMENTS_BYTES)


def check_role(field: str, turn: common.ChatMessage, *, is_whole: bool) -> None:
    """Check role and calls of a turn. Raise InvalidRequestError, which names the field."""
    allowed = _ROLES if is_whole else CONTINUING_ROLES
    if turn.role not in allowed:
        raise InvalidRequestError(
            f"{field}.role: {shorten(turn.role)}; send {', '.join(sorted(allowed))}"
            + ("" if is_whole else ", or the whole conversation with is_whole")
        )
    check_calls(field, turn)


def check_no_calls(turns: Sequence[common.ChatMessage]) -> None:
    """Refuse what prompts to train on do not have yet. Raise InvalidRequestError."""
    for index, turn in enumerate(turns):
        for name in ("tool_calls", "tool_call_id", "reasoning"):
            if getattr(turn, name):
                raise InvalidRequestError(
                    f"messages[{index}].{name}: set, and prompts to train on have only role and "
                    "content; leave it out"
                )


def check_tool_format(name: str) -> None:
    """Raise InvalidRequestError unless a format is known, or empty."""
    if name and name not in TOOL_FORMATS:
        raise InvalidRequestError(
            f"tool_format: {shorten(name)} is unknown; send {', '.join(TOOL_FORMATS)}, or none"
        )


def tools_to_proto(tools: Iterable[Tool]) -> list[common.Tool]:
    """Encode tools."""
    return [
        common.Tool(name=t.name, description=t.description, parameters_json=t.parameters)
        for t in tools
    ]


def tools_from_proto(tools: Iterable[common.Tool]) -> tuple[Tool, ...]:
    """Decode tools that were checked."""
    return tuple(Tool(t.name, t.description, t.parameters_json) for t in tools)


def message_to_proto(message: ChatMessage) -> common.ChatMessage:
    """Encode a turn."""
    return common.ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=_calls_to_proto(message.tool_calls),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
        is_error=message.is_error,
    )


def message_from_proto(message: common.ChatMessage) -> ChatMessage:
    """Decode a turn that was checked."""
    return ChatMessage(
        message.role,
        message.content,
        _calls_from_proto(message.tool_calls),
        message.tool_call_id,
        message.reasoning,
        message.is_error,
    )


def answer_to_proto(answer: Answer) -> common.Answer:
    """Encode what a response says."""
    return common.Answer(
        content=answer.content,
        reasoning=answer.reasoning,
        tool_calls=_calls_to_proto(answer.tool_calls),
        tool_error=answer.tool_error,
    )


def answer_from_proto(message: common.Answer) -> Answer:
    """Decode what a response says."""
    calls = _calls_from_proto(message.tool_calls)
    return Answer(message.content, message.reasoning, calls, message.tool_error)


def _calls_to_proto(calls: Iterable[ToolCall]) -> list[common.ToolCall]:
    return [common.ToolCall(id=c.call_id, name=c.name, arguments_json=c.arguments) for c in calls]


def _calls_from_proto(calls: Iterable[common.ToolCall]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call.name, call.arguments_json, call.id) for call in calls)
