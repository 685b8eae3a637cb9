"""Common parts of all kinds of environments: tasks, episodes, messages, numbers, calls."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import logging
import math
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from sluice.algorithm.episode_rules import TOOL, USER, Observation
from sluice.concurrency.threads import MethodThreads
from sluice.environment.schemas import ArgumentsError
from sluice.errors import EnvironmentDefectError, EnvironmentUnavailable
from sluice.safe_text import encodable
from sluice.types import Answer, ChatMessage, FinishReason, Scored, Tool, ToolCall

logger = logging.getLogger(__name__)

MAX_RESULT_CHARS = 1 << 20
"""Longest text that an environment may give the policy at once; the rest is cut here, since the
message would not be sent."""
MAX_ERROR_CHARS = 2000
MAX_THREADS = 32
"""Most calls of plain methods at once; further ones wait."""
OUT_OF_MEMORY = 70
"""Exit code of a server whose environment needed more memory than it may."""
_SPARE_BYTES = 64 << 20
"""Bytes: a process that can still reserve them has memory left."""
_CUT = "...(cut)"
_CUT_BEFORE = set[str]()


@dataclass(frozen=True, slots=True)
class PlayedRow:
    """The row that an episode plays.

    Args:
        messages: the row's prompt.
        row: the row's other columns: data_source, ground_truth, extra_info.
        seed: the same for all samples of a prompt.
    """

    messages: tuple[ChatMessage, ...]
    row: Mapping[str, object]
    seed: int

    @property
    def prompt(self) -> list[dict[str, object]]:
        """The prompt as authors know it: role and content of each message."""
        return [{"role": message.role, "content": message.content} for message in self.messages]

    @property
    def extra_info(self) -> Mapping[str, object]:
        """The row's `extra_info`; empty without one."""
        extra_info = self.row.get("extra_info")
        return extra_info if isinstance(extra_info, Mapping) else {}


class PlayedEpisode(Protocol):
    """One open episode. Its calls never overlap.

    Calls raise EnvironmentUnavailable, and EnvironmentDefectError for errors of the author's code.
    """

    async def open(self) -> Observation:
        """Begin; return what the policy reads after the prompt."""
        ...

    async def step(self, answer: Answer, finish: FinishReason) -> Observation:
        """Take an answer; return what the policy reads next."""
        ...

    async def score(self) -> Scored | None:
        """Return the score; ``None`` to let the row's scorer grade the last answer."""
        ...

    async def close(self) -> None:
        """Free the episode's resources, even after an error."""
        ...


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment that a file defines.

    Args:
        name: the class or function, which rows may name.
        tools: the tools that an episode offers if its row does not choose.
        begin: returns a new episode, whose author's methods run in these calls, and whose own work
            in this group.
    """

    name: str
    tools: tuple[Tool, ...]
    begin: Callable[[PlayedRow, AuthorCalls, asyncio.TaskGroup], PlayedEpisode]


class AuthorCalls:
    """Runs an author's methods: coroutines on the event loop, plain methods in threads.

    A plain method that hangs keeps its thread, or waits for one. `longest_s` shows it, and who
    supervises the server ends the process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads = MethodThreads(MAX_THREADS)
        self._clock = clock
        self._started: dict[int, float] = {}
        self._num_calls = 0

    @property
    def longest_s(self) -> float:
        """Seconds that the oldest call has taken, with its wait for a thread; 0 without one."""
        started = list(self._started.values())
        return self._clock() - min(started) if started else 0.0

    async def run(
        self, function: Callable[..., object], *values: object, **named: object
    ) -> object:
        """Call a method; raise what it raises.

        A cancelled call of a plain method ends with its thread. A MemoryError of a process that has
        no memory left ends it: what has filled the memory cannot be known.
        """
        try:
            with self.counted_call():  # a call that waits for a thread, too: perhaps it gets none
                if inspect.iscoroutinefunction(function):
                    return await function(*values, **named)
                context = contextvars.copy_context()
                call = partial(context.run, _run_in_thread, partial(function, *values, **named))
                returned = await self._threads.run(call)
                return await returned if inspect.isawaitable(returned) else returned
        except SystemExit as error:
            raise RuntimeError(f"it called sys.exit({error.code})") from error
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise RuntimeError(f"it raised {raised(error)}") from error

    async def required(
        self, method_name: str, function: Callable[..., object], *values: object, **named: object
    ) -> object:
        """Call a method whose exceptions are failures of the environment.

        Raises:
            EnvironmentUnavailable: it raised this.
            EnvironmentDefectError: it raised another error; names `method_name` and the place. A
                MemoryError, which the policy did not cause, ends this process.
        """
        try:
            return await self.run(function, *values, **named)
        except EnvironmentUnavailable:
            raise
        except MemoryError:
            _end_for_memory()
        except Exception as error:
            raise defect(method_name, error) from error

    @contextmanager
    def counted_call(self) -> Iterator[None]:
        """Count the block as a running call; without memory for it, end the process."""
        self._num_calls += 1
        number = self._num_calls
        self._started[number] = self._clock()
        try:
            with _end_without_memory():
                yield
        finally:
            del self._started[number]

    def close(self) -> None:
        """Let running threads end with the process; no further call is made."""
        self._threads.close()


def _run_in_thread(call: Callable[[], object]) -> object:
    try:
        # Here, since the task that made a call may be cancelled and never see the MemoryError.
        with _end_without_memory():
            return call()
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code})") from error
    except Exception:
        raise
    except BaseException as error:  # it would end the process of all episodes
        raise RuntimeError(f"it raised {raised(error)}") from error


def is_cancelled() -> bool:
    """Return whether this task was cancelled. An author's code may raise the same error, such as by
    awaiting a cancelled task of its own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextmanager
def _end_without_memory() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        if not _has_memory():
            _end_for_memory()
        raise


def _has_memory() -> bool:
    try:
        bytearray(_SPARE_BYTES)  # its pages are never touched
    except MemoryError:
        return False
    return True


def _end_for_memory() -> NoReturn:
    logger.error("the environment needs more memory than its process may have")
    os._exit(OUT_OF_MEMORY)


def defect(method_name: str, error: BaseException) -> EnvironmentDefectError:
    """Return the error of an author's code, with its place."""
    return EnvironmentDefectError(f"{method_name} raised {raised(error)}{_place(error)}")


def raised(error: BaseException) -> str:
    """Return an exception's class and text."""
    return encodable(f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS])


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own_folder = Path(__file__).parent
    of_author = [frame for frame in frames if own_folder not in Path(frame.filename).parents]
    return f" ({Path(of_author[-1].filename).name}:{of_author[-1].lineno})" if of_author else ""


def text_of(method_name: str, value: object) -> str:
    """Return a method's result as text for the policy: text unchanged, other values as JSON.

    Cut a long result, and log the first one of each method.
    """
    if value is None:
        return ""
    text = value if isinstance(value, str) else _json(value)
    if len(text) > MAX_RESULT_CHARS:
        if method_name not in _CUT_BEFORE:
            logger.warning(
                "%s returned %d characters; the policy reads the first %d at most: return less",
                *(method_name, len(text), MAX_RESULT_CHARS),
            )
        _CUT_BEFORE.add(method_name)
        text = text[:MAX_RESULT_CHARS] + _CUT
    return encodable(text)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def with_reward(method_name: str, value: object) -> tuple[object, float | None]:
    """Split ``(text, reward)``; without a reward it is ``None``.

    The first part may also be none, a mapping, messages, or an object with a text; any other pair,
    such as two numbers, is one result.

    Raises:
        EnvironmentDefectError: the reward is not finite.
    """
    if not (isinstance(value, tuple) and len(value) == 2 and _is_messages(value[0])):
        return value, None
    reward = number_of(value[1])
    if reward is None:
        return value, None
    if not math.isfinite(reward):
        raise EnvironmentDefectError(
            f"{method_name} returned the reward {reward}; return a finite one"
        )
    return value[0], reward


def _is_messages(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(message, Mapping) for message in value)
    return value is None or isinstance(value, str | Mapping) or hasattr(value, "text")


def number_of(value: object) -> float | None:
    """Return a value as a float, infinite if it is too large; ``None``: it is no number.

    Texts, lists and arrays of several numbers never are.
    """
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)  # type: ignore[arg-type]  # has __float__, of any library's scalars
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def grade_of(method_name: str, returned: object) -> Scored | None:
    """Interpret a score as reward functions' are: a number, or a mapping with ``score``.

    Other numbers of a mapping are metrics; ``pred`` is the prediction. ``None`` is no score.

    Raises:
        EnvironmentDefectError: it is neither, or a number is not finite.
    """
    if returned is None:
        return None
    values = returned if isinstance(returned, Mapping) else {"score": returned, "acc": returned}
    by_name = {encodable(str(key)): number_of(value) for key, value in values.items()}
    numbers = {key: value for key, value in by_name.items() if value is not None}
    if "score" not in numbers or not all(map(math.isfinite, numbers.values())):
        raise EnvironmentDefectError(
            f"{method_name} returned {str(returned)[:200]}; return a finite number, or a dict with "
            "'score'"
        )
    prediction = values.get("pred")
    score = numbers.pop("score")
    numbers.pop("pred", None)
    text = None if prediction is None else encodable(str(prediction)[:1000])
    return Scored(score, score, numbers, text)


def messages_of(method_name: str, returned: object) -> tuple[ChatMessage, ...]:
    """Return what follows the policy's last answer: a user's text, or messages.

    Raises:
        EnvironmentDefectError: it is something else.
    """
    if returned is None:
        return ()
    if isinstance(returned, str):
        return (ChatMessage(USER, text_of(method_name, returned)),)
    if isinstance(returned, Sequence):
        return tuple(_message_of(method_name, message) for message in returned)
    raise EnvironmentDefectError(
        f"{method_name} returned {type(returned).__name__}; return text or messages"
    )


def _message_of(method_name: str, value: object) -> ChatMessage:
    role = value.get("role") if isinstance(value, Mapping) else None
    content = value.get("content") if isinstance(value, Mapping) else None
    if role not in (USER, TOOL) or not isinstance(content, str):
        raise EnvironmentDefectError(
            f"{method_name} returned {str(value)[:200]}; a message is a dict with role, 'user' or "
            "'tool', and content, a text"
        )
    return ChatMessage(str(role), text_of(method_name, content))


ReadArguments = Callable[[str], Mapping[str, Any]]
"""Reads the JSON of a call; raises ArgumentsError if it does not fit."""
CallResult = tuple[ChatMessage, float | None]
"""The message that the policy reads after a call, and the call's reward."""


async def results_of_calls(
    answer: Answer,
    tools: Mapping[str, ReadArguments],
    make: Callable[[ToolCall, Mapping[str, Any]], Awaitable[CallResult]],
) -> tuple[tuple[ChatMessage, ...], float | None]:
    """Make an answer's calls one by one; return what the policy reads, and their total reward.

    Args:
        tools: what reads the arguments of each, by name.
        make: makes a call with its arguments. What it raises is an error that the policy reads, but
            for the environment's own.
    """
    results = [await _make_call(call, tools, make) for call in answer.tool_calls]
    messages = [message for message, _ in results]
    rewards = [reward for _, reward in results if reward is not None]
    if answer.tool_error:
        text = f"Error: the call cannot be read: {answer.tool_error}"
        messages.append(ChatMessage(TOOL if tools else USER, text, is_error=True))
    return tuple(messages), sum(rewards) if rewards else None


async def _make_call(
    call: ToolCall,
    tools: Mapping[str, ReadArguments],
    make: Callable[[ToolCall, Mapping[str, Any]], Awaitable[CallResult]],
) -> CallResult:
    read_arguments = tools.get(call.name)
    if read_arguments is None:
        tool_names = ", ".join(tools) or "none"
        return error_of(
            call, f"there is no tool {call.name[:64]!r}; the tools are: {tool_names}"
        ), None
    try:
        return await make(call, read_arguments(call.arguments))
    except ArgumentsError as error:
        return error_of(call, str(error)), None
    except (EnvironmentUnavailable, EnvironmentDefectError):
        raise
    except Exception as error:  # noqa: BLE001  the policy's arguments may cause anything
        return error_of(call, raised(error)), None


def error_of(call: ToolCall, error: str) -> ChatMessage:
    """Return what the policy reads after a call that failed."""
    return ChatMessage(TOOL, f"Error: {error}", tool_call_id=call.call_id, is_error=True)
