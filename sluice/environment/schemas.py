"""A tool's schema from its type hints and docstring, and its arguments from the policy's JSON."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from sluice.errors import ConfigError
from sluice.json_objects import TOOL_NAME
from sluice.types import Tool, ToolCall

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_REFERENCE, _TITLE = "$ref", "title"


class ArgumentsError(Exception):
    """The policy's arguments do not fit. Its text is for the policy."""


@dataclass(frozen=True, slots=True)
class MethodTool:
    """A tool that is a Python function.

    Args:
        function: its hints and default values.
        hints: the type of each argument.
        required: arguments without a default.
    """

    tool: Tool
    function: Callable[..., object]
    hints: Mapping[str, object]
    required: tuple[str, ...]

    def arguments(self, text: str) -> dict[str, object]:
        """Return the arguments of a call.

        Raises:
            ArgumentsError: they are no JSON object, or one is missing, unknown or of another type.
        """
        values = json_object(text)
        if unknown := [name for name in values if name not in self.hints]:
            argument_names = ", ".join(self.hints) or "none"
            raise ArgumentsError(
                f"{self.tool.name} has no argument {unknown[0]!r}; it has: {argument_names}"
            )
        if missing_names := [name for name in self.required if name not in values]:
            raise ArgumentsError(f"{self.tool.name} needs the argument {missing_names[0]!r}")
        return {name: self._convert(name, value) for name, value in values.items()}

    def _convert(self, name: str, value: object) -> object:
        try:
            return msgspec.convert(value, self.hints[name], strict=False)
        except (
            msgspec.ValidationError,
            ValueError,
        ) as error:  # half a surrogate pair is the latter
            raise ArgumentsError(f"argument {name!r} of {self.tool.name}: {error}") from error


def json_object(text: str) -> dict[str, Any]:
    """Return the arguments that a policy wrote.

    Raises:
        ArgumentsError: they are no JSON object.
    """
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ArgumentsError(f"the arguments are no JSON: {error}; write an object") from error
    if not isinstance(values, dict):
        raise ArgumentsError(f"the arguments are {type(values).__name__}; write a JSON object")
    return values


def openai_tool(function: Mapping[str, Any]) -> Tool:
    """Return the tool of a ``function`` in OpenAI's form."""
    parameters = function.get("parameters")
    return Tool(
        function["name"],
        function.get("description") or "",
        json.dumps(parameters, ensure_ascii=False) if parameters else "",
    )


def openai_call(call: ToolCall) -> dict[str, Any]:
    """Return a call in OpenAI's form."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def method_tool(
    function: Callable[..., object], place: str, *, name: str = "", is_method: bool = True
) -> MethodTool:
    """Return the tool that a function or an unbound method is.

    Args:
        place: file and method, for errors.
        name: the tool's; by default the function's.
        is_method: whether the first parameter is the instance.

    Raises:
        ConfigError: a hint or the docstring is missing, or a type has no JSON schema.
    """
    name = name or function.__name__
    if not TOOL_NAME.fullmatch(name):
        raise ConfigError(f"{place}: {name!r} is no name for a tool; use A-Z, a-z, 0-9 and _")
    parameters = _parameters(function, place, is_method=is_method)
    hints = _hints(function, place)
    summary, described = _docstring(function, place)
    properties: dict[str, object] = {}
    for parameter in parameters:
        if parameter.name not in hints:
            raise ConfigError(
                f"{place}: the argument {parameter.name!r} has no type hint, from which the policy "
                f"learns what to pass; write {parameter.name}: str, or another type, or begin the "
                "method's name with _ if it is no tool"
            )
        argument = _schema(hints[parameter.name], f"{place}: the argument {parameter.name!r}")
        if text := described.get(parameter.name):
            argument = {**argument, "description": text}
        properties[parameter.name] = argument
    required = tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)
    schema = {"type": "object", "properties": properties, "required": list(required)}
    tool = Tool(name, summary, json.dumps(schema, ensure_ascii=False))
    types = {parameter.name: hints[parameter.name] for parameter in parameters}
    return MethodTool(tool, function, types, required)


def _parameters(
    function: Callable[..., object], place: str, *, is_method: bool
) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(function).parameters.values())[1 if is_method else 0 :]
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{place}: a tool cannot have {parameter}; name every argument and give it a type"
            )
    return parameters


def _hints(function: Callable[..., object], place: str) -> dict[str, object]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception as error:
        raise ConfigError(
            f"{place}: its type hints cannot be read: {error}; repair them"
        ) from error


def _schema(hint: object, place: str) -> dict[str, object]:
    """Return the JSON schema of a type, without references."""
    try:
        (component,), parts = msgspec.json.schema_components([hint])
    except (TypeError, RecursionError) as error:
        raise ConfigError(
            f"{place}: {hint} has no JSON schema ({error}); use str, int, float, bool, list, dict, "
            "Literal, Optional, an Enum or a dataclass"
        ) from error
    try:
        schema = _inline_references(component, parts)
    except RecursionError as error:
        raise ConfigError(f"{place}: {hint} contains itself; use a flat type") from error
    assert isinstance(schema, dict)
    return schema


def _inline_references(value: object, parts: Mapping[str, object]) -> object:
    if isinstance(value, dict):
        if isinstance(reference := value.get(_REFERENCE), str):
            return _inline_references(parts[reference.rpartition("/")[2]], parts)
        return {
            key: _inline_references(part, parts)
            for key, part in value.items()
            if key != _TITLE or isinstance(part, dict)  # a field of this name
        }
    return [_inline_references(part, parts) for part in value] if isinstance(value, list) else value


def _docstring(function: Callable[..., object], place: str) -> tuple[str, dict[str, str]]:
    """Return the text above the sections, and the description of each argument."""
    text = inspect.cleandoc(function.__doc__ or "")
    if not text:
        raise ConfigError(
            f"{place} has no docstring, from which the policy learns what the tool does; write "
            "one, or begin the method's name with _ if it is no tool"
        )
    summary: list[str] = []
    described: dict[str, str] = {}
    section, argument = "", ""
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section = heading[1]
        elif not section:
            summary.append(line)
        elif section in {"Args", "Arguments", "Parameters"} and line.strip():
            match = _ARGUMENT.match(line.strip())
            is_deeper = len(line) - len(line.lstrip()) > 4
            if match and not is_deeper:
                argument = match[1]
                described[argument] = match[2]
            elif argument:
                described[argument] = f"{described[argument]} {line.strip()}".strip()
    return "\n".join(summary).strip(), described
