"""verl's tools as an environment: functions with ``@function_tool``, and `BaseTool` classes.

Classes are constructed once; each episode has an instance, made by `create` when it opens and given
to `release` when it ends. The row chooses tools with ``extra_info.tool_selection``, and gives them
arguments with ``extra_info.tools_kwargs``. The row's scorer grades; a tool's reward is the turn's.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sluice.algorithm.episode_rules import ASSISTANT, TOOL, Observation
from sluice.config.loading.settings_tree import resolved_document
from sluice.environment import verl_stand_in
from sluice.environment.episodes import (
    MAX_ERROR_CHARS,
    AuthorCalls,
    CallResult,
    Environment,
    PlayedRow,
    error_of,
    raised,
    results_of_calls,
    text_of,
    with_reward,
)
from sluice.environment.loading import file_module
from sluice.environment.schemas import (
    MethodTool,
    json_object,
    method_tool,
    openai_call,
    openai_tool,
)
from sluice.errors import (
    ConfigError,
    EnvironmentDefectError,
    EnvironmentUnavailable,
    SluiceError,
)
from sluice.types import Answer, ChatMessage, FinishReason, Scored, Tool, ToolCall

FUNCTIONS_KEY = "actor_rollout_ref.rollout.multi_turn.function_tool_path"
CLASSES_KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
NAME = "tool_agent"
_NATIVE = "native"
_DATA = "agent_data"
_TYPE, _DESCRIPTION, _ENUM = "type", "description", "enum"
_KINDS: Mapping[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
    NoneType: "null",
}
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class VerlTool:
    """A tool of verl's form.

    Args:
        function: a function; ``None``: `state` has it.
        state: an instance of a `BaseTool` class.
    """

    tool: Tool
    function: Callable[..., object] | None = None
    state: Any = None


def verl_environment(function_path: str | None, config_path: str | None) -> Environment:
    """Load the tools.

    Raises:
        ConfigError: a file or class cannot be loaded, or two tools have one name.
    """
    verl_stand_in.provide()
    tools = [  # in the order in which verl offers them
        *(_classes(config_path) if config_path else []),
        *(_functions(function_path) if function_path else []),
    ]
    by_name: dict[str, VerlTool] = {}
    for verl_tool in tools:
        if verl_tool.tool.name in by_name:
            raise ConfigError(
                f"{CLASSES_KEY}: two tools are named {verl_tool.tool.name}; rename one"
            )
        by_name[verl_tool.tool.name] = verl_tool
    if not by_name:
        raise ConfigError(
            f"{FUNCTIONS_KEY} = {function_path}, {CLASSES_KEY} = {config_path}: no tool is "
            "defined; put @function_tool above a function, or list classes under tools"
        )

    def begin(row: PlayedRow, calls: AuthorCalls, _tasks: asyncio.TaskGroup) -> VerlEpisode:
        return VerlEpisode(by_name, row, calls)

    return Environment(NAME, tuple(verl_tool.tool for verl_tool in by_name.values()), begin)


def _functions(path: str) -> list[VerlTool]:
    registry = importlib.import_module("verl.tools.function_tool").FUNCTION_TOOL_REGISTRY
    names_before = set(registry)
    file_module(path, FUNCTIONS_KEY)
    return [_function(registry[name], path) for name in sorted(set(registry) - names_before)]


def _function(tool: Any, path: str) -> VerlTool:  # noqa: ANN401  verl's class or ours
    if tool.tool_schema is not None:  # the author's own, or verl has derived it
        return VerlTool(_tool(tool.tool_schema, path), tool.fn)
    function_tool = method_tool(tool.fn, f"{path}: {tool.name}", name=tool.name, is_method=False)
    return VerlTool(_tool_as_in_verl(function_tool), tool.fn)


def _tool_as_in_verl(function_tool: MethodTool) -> Tool:
    """Return a function's tool as verl shows it to the policy."""
    schema: dict[str, Any] = json.loads(function_tool.tool.parameters)
    for name, property_schema in schema["properties"].items():
        text = property_schema.pop(_DESCRIPTION, "")
        kind = _kind(function_tool.hints[name]) or property_schema  # verl refuses what has no type
        if (choices := _CHOICES.search(text)) and (values := _json_list(choices[1])):
            kind, text = kind | {_ENUM: values}, text[: choices.start()].strip()
        schema["properties"][name] = kind | ({_DESCRIPTION: text} if text else {})
    if not schema["required"]:
        del schema["required"]
    return replace(
        function_tool.tool, parameters=json.dumps(_parameters(schema), ensure_ascii=False)
    )


def _json_list(text: str) -> list[object]:
    """Return the values of a JSON list; none: it is no list."""
    try:
        values = json.loads(text)
    except ValueError:
        return []
    return values if isinstance(values, list) else []


def _kind(hint: object) -> dict[str, Any]:
    """Return the type of a hint, and its values; empty: it has none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        kinds = list(dict.fromkeys(_KINDS.get(type(argument), "object") for argument in arguments))
        return {_TYPE: kinds[0] if len(kinds) == 1 else kinds, _ENUM: list(arguments)}
    if origin not in (Union, UnionType):
        kind = _KINDS.get(origin or hint)
        return {_TYPE: kind} if kind else {}
    parts = [_kind(argument) for argument in arguments if argument is not NoneType]
    if len(parts) == 1:
        return parts[0]
    named = [part.get(_TYPE) for part in parts if part.keys() == {_TYPE}]
    kinds = sorted({kind for kind in named if isinstance(kind, str)})
    return {_TYPE: kinds} if len(named) == len(parts) else {}


def _classes(path: str) -> list[VerlTool]:
    try:
        listed: Any = resolved_document(Path(path).read_text(encoding="utf-8"), path)
        entries = listed["tools"]
        return [_class(entry, path) for entry in entries]
    except (OSError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{CLASSES_KEY}: {path} cannot be read ({raised(error)}); it holds tools, a list of "
            "class_name, config and tool_schema"
        ) from error


def _class(entry: Mapping[str, Any], path: str) -> VerlTool:
    name, config = entry["class_name"], dict(entry.get("config") or {})
    kind = config.get("type", _NATIVE)
    if kind != _NATIVE:
        raise ConfigError(
            f"{CLASSES_KEY}: {path}: {name} has the type {kind}; only native is loaded"
        )
    module, _, class_name = name.rpartition(".")
    schemas = importlib.import_module("verl.tools.schemas")
    try:
        tool_class = getattr(importlib.import_module(module), class_name)
        written_schema = entry.get("tool_schema")
        schema = (
            schemas.OpenAIFunctionToolSchema.model_validate(written_schema)
            if written_schema
            else None
        )
        state = tool_class(config=config, tool_schema=schema)
    except Exception as error:
        raise ConfigError(
            f"{CLASSES_KEY}: {path}: {name} cannot be loaded: {raised(error)}; name a class as "
            "module.Class, below the working directory or PYTHONPATH (of verl's own modules only "
            "the base classes are there without verl)"
        ) from error
    return VerlTool(_tool(state.tool_schema, path), state=state)


def _tool(schema: Any, path: str) -> Tool:  # noqa: ANN401  verl's class or ours
    plain_schema = schema.model_dump(exclude_unset=True, exclude_none=True)
    function = plain_schema.get("function", {})
    if "name" not in function:
        raise ConfigError(f"{path}: a tool_schema without function.name; write OpenAI's form")
    parameters = function.get("parameters")
    if parameters and isinstance(parameters.get("properties"), dict):
        function = {**function, "parameters": _parameters(parameters)}
    return openai_tool(function)


def _parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return what verl keeps of a schema, in its order."""
    properties = {
        name: {
            key: property_schema[key]
            for key in (_TYPE, _DESCRIPTION, _ENUM)
            if property_schema.get(key) is not None
        }
        if isinstance(property_schema, dict) and _TYPE in property_schema
        else property_schema
        for name, property_schema in schema["properties"].items()
    }
    kept_schema = {_TYPE: schema.get(_TYPE, "object"), "properties": properties}
    return kept_schema | {key: schema[key] for key in ("required",) if key in schema}


class VerlEpisode:
    """Tools of one episode."""

    def __init__(self, by_name: Mapping[str, VerlTool], row: PlayedRow, calls: AuthorCalls) -> None:
        selection = row.extra_info.get("tool_selection")
        self._tools = dict(by_name)
        if isinstance(selection, list) and selection:  # an empty one is none, as in verl
            self._tools = {name: by_name[name] for name in map(str, selection) if name in by_name}
        kwargs = row.extra_info.get("tools_kwargs")
        self._kwargs: Mapping[str, Any] = kwargs if isinstance(kwargs, Mapping) else {}
        self._calls = calls
        self._ids: dict[str, str] = {}
        # Tools read the conversation in it, and keep in extra_fields what they like.
        self._data = SimpleNamespace(
            messages=row.prompt, tools_kwargs=self._kwargs, extra_fields={}
        )

    async def open(self) -> Observation:
        """Create an instance of each tool with state."""
        for name, tool in self._tools.items():
            if tool.state is not None:
                create_arguments = self._keyword_arguments(name, "create_kwargs")
                created = await self._calls.required(
                    f"{name}.create", tool.state.create, create_kwargs=create_arguments
                )
                instance_id = created[0] if isinstance(created, tuple) else created
                self._ids[name] = str(instance_id)
        return Observation(tools=tuple(tool.tool for tool in self._tools.values()))

    async def step(self, answer: Answer, finish: FinishReason) -> Observation:
        """Make the calls of an answer; text without calls ends the episode."""
        if not answer.tool_calls and not answer.tool_error:
            return Observation(done=finish is not FinishReason.LENGTH)
        # A tool that is not there says so itself.
        names = (*self._tools, *(call.name for call in answer.tool_calls))
        readers = dict.fromkeys(names, json_object) if self._tools else {}
        openai_calls = list(map(openai_call, answer.tool_calls))
        message = {"role": ASSISTANT, "content": answer.content, "tool_calls": openai_calls}
        self._data.messages.append(message)
        messages, reward = await results_of_calls(answer, readers, self._result)
        self._data.messages += [
            {"role": tool_message.role, "content": tool_message.content}
            for tool_message in messages
        ]
        return Observation(messages, reward=reward)

    async def score(self) -> Scored | None:
        """Leave it to the row's scorer, as verl does."""
        return None

    async def close(self) -> None:
        """Release each created instance; raise the first error."""
        errors = list[SluiceError]()
        while self._ids:
            name, instance = self._ids.popitem()
            release = self._tools[name].state.release
            release_arguments = self._keyword_arguments(name, "release_kwargs")
            try:
                await self._calls.required(
                    f"{name}.release", release, instance, **release_arguments
                )
            except SluiceError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    async def _result(self, call: ToolCall, arguments: Mapping[str, Any]) -> CallResult:
        """Make a call; what fails reads as in verl."""
        tool = self._tools.get(call.name)
        if tool is None:
            tool_names = list(self._tools)
            return _failure_result(
                call, f"Unknown function '{call.name}'. Available tools: {tool_names}"
            )
        try:
            if tool.function is not None:
                return _response(call, await self._calls.run(tool.function, **arguments))
            return _response(call, await self._execute(call.name, tool, arguments))
        except (EnvironmentUnavailable, EnvironmentDefectError):
            raise
        except Exception as error:  # noqa: BLE001  the policy's arguments may cause anything
            return _failure_result(call, f"Error executing tool '{call.name}': {error}")

    async def _execute(self, name: str, tool: VerlTool, arguments: Mapping[str, Any]) -> object:
        execute_arguments = self._keyword_arguments(name, "execute_kwargs")
        parameters = inspect.signature(tool.state.execute).parameters.values()
        if any(
            parameter.name == _DATA or parameter.kind is parameter.VAR_KEYWORD
            for parameter in parameters
        ):
            execute_arguments[_DATA] = self._data
        return await self._calls.run(
            tool.state.execute, self._ids[name], arguments, **execute_arguments
        )

    def _keyword_arguments(self, name: str, kind: str) -> dict[str, Any]:
        kwargs = self._kwargs.get(name)
        return dict(kwargs.get(kind) or {}) if isinstance(kwargs, Mapping) else {}


def _failure_result(call: ToolCall, text: str) -> CallResult:
    content = text_of(call.name, text[:MAX_ERROR_CHARS])
    return ChatMessage(TOOL, content, tool_call_id=call.call_id, is_error=True), None


def _response(call: ToolCall, returned: object) -> CallResult:
    """Return message and reward of verl's ``(response, reward, metrics)``, or of its first parts.

    As in verl, mappings are JSON and other values their Python text.
    """
    parts = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(
            f"{call.name} returned {len(parts)} values; return response, reward, metrics"
        )
    response, reward = parts[0], None
    if len(parts) > 1 and parts[1] is not None:
        _, reward = with_reward(call.name, ("", float(parts[1])))
    if getattr(response, "image", None) or getattr(response, "video", None):
        return error_of(call, f"{call.name} returned an image, which cannot be read here"), None
    text = response.text if hasattr(response, "text") else response
    if not isinstance(text, str | Mapping | None) or response is None:
        text = str(text)
    return ChatMessage(TOOL, text_of(call.name, text), tool_call_id=call.call_id), reward or None
