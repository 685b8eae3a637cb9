"""Environments that are functions: ``async def run(task, policy)`` plays a whole episode.

The function calls ``policy.chat(messages, tools)`` as often as it likes, with whole conversations.
It returns the score.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from sluice.algorithm.episode_rules import Observation
from sluice.environment.episodes import (
    AuthorCalls,
    Environment,
    PlayedRow,
    defect,
    grade_of,
    is_cancelled,
    raised,
    text_of,
)
from sluice.environment.schemas import method_tool, openai_call, openai_tool
from sluice.errors import ConfigError, EnvironmentDefectError, EnvironmentUnavailable
from sluice.types import Answer, ChatMessage, FinishReason, Scored, Tool, ToolCall

_ROLES = ("system", "user", "assistant", "tool")


class EpisodeOver(Exception):
    """The episode has reached a limit of the run, and the policy answers no more.

    `Policy.chat` raises it. A function that catches it may return a score; otherwise the row's
    scorer grades the last answer.
    """


@dataclass(frozen=True, slots=True)
class LoopTask:
    """The row, as the function sees it.

    Attributes:
        prompt: the row's messages, dicts with role and content.
        ground_truth: of the row.
        data_source: of the row.
        extra_info: of the row.
        seed: the same for all samples of the prompt.
    """

    prompt: list[dict[str, object]]
    ground_truth: object
    data_source: object
    extra_info: Mapping[str, object]
    seed: int


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """The policy's answer.

    Attributes:
        content: its text, without thoughts and calls.
        tool_calls: dicts in OpenAI's form; the arguments are the text of a JSON object.
        reasoning: its thoughts.
        tool_error: the error of calls that cannot be read; empty if there is none.
        is_cut: whether it ended at the limit of tokens.
    """

    content: str
    tool_calls: list[dict[str, Any]]
    reasoning: str = ""
    tool_error: str = ""
    is_cut: bool = False

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        if self.reasoning:
            message["reasoning"] = self.reasoning
        return message


_Question = tuple[Observation, asyncio.Future[PolicyAnswer]]
"""The question to the policy, and the future of its answer."""


class Policy:
    """The model in training. Its answers are sampled by the run."""

    def __init__(self) -> None:
        self._questions: asyncio.Queue[_Question] = asyncio.Queue()
        self._answer: asyncio.Future[PolicyAnswer] | None = None  # of the call that waits
        self._taken_answer: asyncio.Future[PolicyAnswer] | None = None  # of the last question taken
        self._is_over = False

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> PolicyAnswer:
        """Return the policy's answer to a whole conversation.

        Where it begins as an earlier one, with the policy's own answers unchanged (`message`), it
        continues the same tokens. One call at a time.

        Args:
            messages: dicts with role, content and, as in OpenAI's form, tool_calls and
                tool_call_id.
            tools: that the policy may call: dicts in OpenAI's form, or functions with type hints
                and a docstring. ``None``: as in the call before; an empty list: none.

        Raises:
            EpisodeOver: a limit of the run is reached.
            ValueError: a message or tool is malformed.
        """
        if self._is_over:
            raise EpisodeOver
        if self._answer is not None:
            raise RuntimeError("policy.chat is called while it still answers; one call at a time")
        offered = tuple(map(_tool, tools or ()))
        turns = tuple(map(_message, messages))
        self._answer = asyncio.get_running_loop().create_future()
        is_dropped = tools is not None and not offered
        question = Observation(turns, is_whole=True, tools=offered, drops_tools=is_dropped)
        self._questions.put_nowait((question, self._answer))
        try:
            return await self._answer
        finally:
            self._answer = None

    async def next_question(self) -> Observation:
        """Return what the policy must read next, for a call that still waits."""
        while True:
            question, self._taken_answer = await self._questions.get()
            if not self._taken_answer.done():
                return question

    def give(self, answer: PolicyAnswer) -> None:
        """Answer the last question taken, unless its call was cancelled, as by a timeout."""
        if self._taken_answer is not None and not self._taken_answer.done():
            self._taken_answer.set_result(answer)

    def end(self) -> None:
        """Make the waiting call, and later ones, raise EpisodeOver."""
        self._is_over = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(EpisodeOver())


def loop_environment(function: Callable[..., object], file: str) -> Environment:
    """Check a function.

    Raises:
        ConfigError: it is not ``async``, or does not take a task and a policy.
    """
    place = f"{file}: {function.__name__}"
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{place} is no async function; write async def (task, policy)")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{place}: {error}; it is called with a task and a policy") from error
    return Environment(function.__name__, (), partial(LoopEpisode, cast("Any", function)))


class LoopEpisode:
    """A running call of the function."""

    def __init__(
        self,
        function: Callable[..., Coroutine[Any, Any, object]],
        row: PlayedRow,
        calls: AuthorCalls,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._function, self._row = function, row
        self._calls, self._tasks = calls, tasks
        self._policy = Policy()
        self._running: asyncio.Task[object] | None = None

    async def open(self) -> Observation:
        """Start the function, and wait for its first question."""
        columns = self._row.row
        task = LoopTask(
            self._row.prompt,
            columns.get("ground_truth"),
            columns.get("data_source"),
            self._row.extra_info,
            self._row.seed,
        )
        self._running = self._tasks.create_task(self._run_function(task), name="an author's loop")
        observation = await self._next()
        if observation.done:
            self._return_value()
            raise EnvironmentDefectError(
                f"{self._function.__name__} returned before it called policy.chat; ask the policy "
                "at least once"
            )
        return observation

    async def step(self, answer: Answer, finish: FinishReason) -> Observation:
        """Give the answer to the function; return its next question."""
        calls = list(map(openai_call, answer.tool_calls))
        is_cut = finish is FinishReason.LENGTH
        self._policy.give(
            PolicyAnswer(answer.content, calls, answer.reasoning, answer.tool_error, is_cut)
        )
        return await self._next()

    async def score(self) -> Scored | None:
        """Return the function's result; if it still asks, it gets no further answer."""
        self._policy.end()
        if self._running is None:
            return None
        with self._calls.counted_call():
            await asyncio.wait([self._running])
        returned = self._return_value()
        return None if returned is _UNSCORED else grade_of(self._function.__name__, returned)

    async def close(self) -> None:
        """End the function."""
        if self._running is not None:
            self._running.cancel()
            with self._calls.counted_call():  # it may catch the cancellation and stay
                await asyncio.wait([self._running])

    async def _run_function(self, task: LoopTask) -> object:
        """Run the function; its errors are results, which must not end the other episodes."""
        try:
            return await self._function(task, self._policy)
        except EpisodeOver:
            return _UNSCORED
        except EnvironmentUnavailable as error:
            return error
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            return defect(self._function.__name__, error)  # the author's; it fails this episode

    async def _next(self) -> Observation:
        assert self._running is not None
        # Its errors are in `_running`; the task group waits for it.
        question = self._tasks.create_task(self._policy.next_question(), name="a question")
        try:
            with self._calls.counted_call():
                await asyncio.wait([self._running, question], return_when=asyncio.FIRST_COMPLETED)
            if question.done():
                return question.result()
            self._raise_if_failed(self._running.result())
            return Observation(done=True)
        finally:
            question.cancel()

    def _return_value(self) -> object:
        assert self._running is not None
        return self._raise_if_failed(self._running.result())

    @staticmethod
    def _raise_if_failed(returned: object) -> object:
        if isinstance(returned, EnvironmentUnavailable | EnvironmentDefectError):
            raise returned
        return returned


_UNSCORED = object()


def _message(value: Mapping[str, Any]) -> ChatMessage:
    role, content = value.get("role"), value.get("content")
    if role not in _ROLES or not isinstance(content, str | None):
        raise ValueError(
            f"a message with role {role!r} and content of type {type(content).__name__}; write a "
            f"role of {', '.join(_ROLES)} and a text"
        )
    calls = tuple(map(_call, value.get("tool_calls") or ()))
    call_id, reasoning = value.get("tool_call_id") or "", value.get("reasoning") or ""
    if not all(isinstance(text, str) for text in (call_id, reasoning)):
        raise ValueError("a message whose tool_call_id or reasoning is no text")
    return ChatMessage(
        role, text_of("a message of policy.chat", content), calls, call_id, reasoning
    )


def _call(value: Any) -> ToolCall:  # noqa: ANN401  what an author gives
    try:
        function, call_id = value["function"], value.get("id") or ""
        parts = function["name"], function["arguments"], call_id
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"a call of {str(value)[:200]}; write OpenAI's form") from error
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(
            f"a call of {str(value)[:200]}; its name, arguments and id are texts: write the "
            "arguments with json.dumps"
        )
    return ToolCall(*parts)


def _tool(value: Any) -> Tool:  # noqa: ANN401  a dict or a function
    try:
        if callable(value):
            return method_tool(value, f"tool {value.__name__}", is_method=False).tool
        tool = openai_tool(value.get("function", value))
    except (AttributeError, KeyError, TypeError, ConfigError) as error:
        raise ValueError(
            f"a tool {str(value)[:200]} ({raised(error)}); write OpenAI's form, or give a function "
            "with type hints and a docstring"
        ) from error
    if not all(isinstance(text, str) for text in (tool.name, tool.description)):
        raise ValueError(f"a tool {value!r:.200}; its name and description are texts")
    return tool
