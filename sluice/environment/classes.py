"""Environments that are classes: public methods are the policy's tools.

A class is constructed once for each episode. `reset` gets the row's columns, `turn` answers text,
`score` grades, `close` frees what it holds; all are optional. Any other method without a leading
underscore is a tool.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sluice.algorithm.episode_rules import TOOL, Observation
from sluice.environment.episodes import (
    AuthorCalls,
    CallResult,
    Environment,
    PlayedRow,
    grade_of,
    messages_of,
    results_of_calls,
    text_of,
    with_reward,
)
from sluice.environment.schemas import MethodTool, method_tool
from sluice.errors import ConfigError
from sluice.types import Answer, ChatMessage, FinishReason, Scored, Tool, ToolCall

RESET, TURN, SCORE, CLOSE, DONE = "reset", "turn", "score", "close", "done"
_OWN = frozenset((RESET, TURN, SCORE, CLOSE, DONE))
COLUMNS = ("prompt", "ground_truth", "data_source", "extra_info", "seed")


def class_environment(kind: type, file: str) -> Environment:
    """Check a class.

    Raises:
        ConfigError: the constructor needs arguments, `reset` takes something other than a column,
            `done` is a method, or a tool cannot be described; the error names file, method and
            remedy.
    """
    place = f"{file}: {kind.__name__}"
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise ConfigError(
            f"{place}: it is constructed without arguments, for each episode; give its parameters "
            f"default values, or read the row in reset: {error}"
        ) from error
    if callable(getattr(kind, DONE, None)):
        raise ConfigError(
            f"{place}.{DONE} is a method, and so always true; set self.{DONE} = True where the "
            "episode is over, or make it a property"
        )
    columns = _columns(kind, place)
    tools = {
        name: method_tool(function, f"{place}.{name}", is_method=is_method)
        for name, (function, is_method) in _methods(kind).items()
    }
    if not tools and not hasattr(kind, TURN):
        raise ConfigError(
            f"{place} has neither a tool nor turn; give it a public method with type hints and a "
            "docstring, or turn(self, text)"
        )

    def begin(row: PlayedRow, calls: AuthorCalls, _tasks: asyncio.TaskGroup) -> ClassEpisode:
        return ClassEpisode(kind, tools, columns, row, calls)

    return Environment(kind.__name__, _offered_tools(tools), begin)


def _methods(kind: type) -> dict[str, tuple[Callable[..., object], bool]]:
    """Return the public methods, those of base classes first, and whether each takes the
    instance."""
    methods: dict[str, tuple[Callable[..., object], bool]] = {}
    for base in reversed(kind.__mro__[:-1]):
        for name, member in vars(base).items():
            if name.startswith("_") or name in _OWN:
                continue
            if isinstance(member, staticmethod):
                methods[name] = member.__func__, False
            elif isinstance(member, classmethod) or inspect.isfunction(member):
                function = member.__func__ if isinstance(member, classmethod) else member
                methods[name] = function, True
    return methods


def _columns(kind: type, place: str) -> tuple[str, ...]:
    """Return the columns that `reset` takes."""
    reset = getattr(kind, RESET, None)
    if reset is None:
        return ()
    parameters = list(inspect.signature(reset).parameters.values())[1:]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    columns = tuple(column for column in COLUMNS if takes_all or column in names)
    try:
        inspect.signature(reset).bind(None, **dict.fromkeys(columns))
    except TypeError as error:
        raise ConfigError(
            f"{place}.reset: {error}; a row has {', '.join(COLUMNS)}: take these by name, and read "
            "other values from extra_info"
        ) from error
    return columns


class ClassEpisode:
    """An instance of a checked class."""

    def __init__(
        self,
        kind: type,
        methods: Mapping[str, MethodTool],
        columns: tuple[str, ...],
        row: PlayedRow,
        calls: AuthorCalls,
    ) -> None:
        self._kind, self._methods, self._columns = kind, methods, columns
        self._row, self._calls = row, calls
        self._instance: object = None
        self._last_answer = ""

    async def open(self) -> Observation:
        """Construct the class and reset it."""
        name = self._kind.__name__
        if _has_no_constructor(self._kind):
            self._instance = self._kind()
        else:
            self._instance = await self._calls.required(f"{name}()", self._kind)
        returned: object = None
        if reset := self._method(RESET):
            row = {**self._row.row, "prompt": self._row.prompt, "seed": self._row.seed}
            reset_columns = {column: row.get(column) for column in self._columns}
            returned = await self._calls.required(f"{name}.reset", reset, **reset_columns)
        messages = messages_of(f"{name}.reset", returned)
        return Observation(messages, tools=_offered_tools(self._methods), done=self._is_done)

    async def step(self, answer: Answer, finish: FinishReason) -> Observation:
        """Make the calls of an answer; pass text to `turn`; without one, end the episode."""
        self._last_answer = answer.content
        if answer.tool_error or answer.tool_calls:
            return await self._make_calls(answer)
        if turn := self._method(TURN):
            method_name = f"{self._kind.__name__}.turn"
            returned = await self._calls.required(method_name, turn, answer.content)
            reply, reward = with_reward(method_name, returned)
            is_done = reply is None or self._is_done
            return Observation(messages_of(method_name, reply), done=is_done, reward=reward)
        # A cut answer does not end the episode; the loop ends it at the limit.
        return Observation(done=finish is not FinishReason.LENGTH)

    async def score(self) -> Scored | None:
        """Call the class's `score` with the last answer's text."""
        method, method_name = self._method(SCORE), f"{self._kind.__name__}.score"
        if method is None:
            return None
        return grade_of(
            method_name, await self._calls.required(method_name, method, self._last_answer)
        )

    async def close(self) -> None:
        """Call the class's `close`."""
        if self._instance is not None and (close := self._method(CLOSE)):
            await self._calls.required(f"{self._kind.__name__}.close", close)

    async def _make_calls(self, answer: Answer) -> Observation:
        readers = {name: method.arguments for name, method in self._methods.items()}
        messages, reward = await results_of_calls(answer, readers, self._result)
        return Observation(messages, done=self._is_done, reward=reward)

    async def _result(self, call: ToolCall, arguments: Mapping[str, Any]) -> CallResult:
        method_name = f"{self._kind.__name__}.{call.name}"
        bound = getattr(self._instance, call.name)
        value, reward = with_reward(method_name, await self._calls.run(bound, **arguments))
        return ChatMessage(TOOL, text_of(method_name, value), tool_call_id=call.call_id), reward

    def _method(self, name: str) -> Callable[..., object] | None:
        method = getattr(self._instance, name, None)
        return method if callable(method) else None

    @property
    def _is_done(self) -> bool:
        return bool(getattr(self._instance, DONE, False))


def _has_no_constructor(kind: type) -> bool:
    """Return whether none of the author's code runs when an instance is made."""
    attribute_names = (name for base in kind.__mro__[:-1] for name in vars(base))
    return type(kind) is type and not {"__init__", "__new__"}.intersection(attribute_names)


def _offered_tools(methods: Mapping[str, MethodTool]) -> tuple[Tool, ...]:
    return tuple(method.tool for method in methods.values())
