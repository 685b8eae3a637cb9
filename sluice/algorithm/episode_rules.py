"""Rules of episodes: what the policy reads next, which earlier turn a conversation continues, and
when an episode ends.

The history of a turn is the conversation up to its answer, the answer included. Two histories are
the same if role, text and calls of each message are; ids of calls and thoughts do not count, since
agents replace or leave them out.
"""

from __future__ import annotations

import json
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from sluice.types import Answer, ChatMessage, EpisodeEnd, FinishReason, Tool, ToolCall, seed_of

ASSISTANT, TOOL, USER = "assistant", "tool", "user"
CONTINUING_ROLES = frozenset((USER, TOOL))
"""Roles of messages that follow an answer whose exact tokens are continued."""

AGENT_NAME = "agent_name"
"""verl's column that chooses how a row is played; in `Prompt.extra_info`."""
SINGLE_TURN, TOOL_AGENT = "single_turn_agent", "tool_agent"
"""verl's names: one answer, and the tools of the run."""

TruncateSide = Literal["left", "middle", "right"]
_MARK = "(truncated)"


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy reads next.

    Args:
        messages: turns that follow its last answer, or the row's prompt; with `is_whole` the whole
            conversation, which may continue any earlier turn, or none.
        tools: the tools that it may call; if empty after the first observation, the same as before.
        drops_tools: if `tools` is empty, it may call none from now on.
        done: the episode is over, and the policy reads nothing more.
        reward: the reward of the answer before, if it has one.
    """

    messages: tuple[ChatMessage, ...] = ()
    is_whole: bool = False
    tools: tuple[Tool, ...] = ()
    done: bool = False
    reward: float | None = None
    drops_tools: bool = False


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """The limits of an episode; fields not listed are keys of `multi_turn` and
    `sluice.environment`.

    Args:
        max_sequence_tokens: most tokens of a conversation, including those only read.
        max_response_tokens: most tokens beyond the row's prompt, including those only read, as
            verl counts a response; ``None`` for no bound of its own.
        max_trained_tokens: most tokens of all sequences of an episode, which one pass trains;
            ``None`` for no bound.
        grades_whole_text: scorers get the text of all turns and of what the policy read between
            them, as in verl's reward managers; otherwise only the last turn's text.
    """

    max_sequence_tokens: int
    max_response_tokens: int | None = None
    max_trained_tokens: int | None = None
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_parallel_calls: int = 1
    max_tool_response_length: int = 256
    truncate_side: TruncateSide = "middle"
    max_invalid_calls: int = 3
    timeout_s: float = 1800.0
    grades_whole_text: bool = False


class TurnStart(NamedTuple):
    """How a turn begins.

    Args:
        parent: index of the turn whose tokens it continues; ``None`` for a root.
        messages: the messages after the parent's answer; for a root, the whole conversation.
    """

    parent: int | None
    messages: tuple[ChatMessage, ...]


def environment_of(extra_info: Mapping[str, object], *, by_default: bool) -> str | None:
    """Return the environment of a row: empty for the run's only one, ``None`` if the row has none.

    Args:
        by_default: whether a row that names no environment has one.
    """
    name = extra_info.get(AGENT_NAME)
    if not name:
        return "" if by_default else None
    if name == SINGLE_TURN:
        return None
    return "" if name == TOOL_AGENT else str(name)


def answer_message(answer: Answer) -> ChatMessage:
    """Return an answer as a message of the conversation."""
    return ChatMessage(ASSISTANT, answer.content, answer.tool_calls, reasoning=answer.reasoning)


def find_turn_start(
    histories: Sequence[Sequence[ChatMessage]], messages: Sequence[ChatMessage]
) -> TurnStart:
    """Return the turn that a whole conversation continues: the first whose history precedes the new
    messages.

    A turn is only continued by messages of users and tools, at least one; a conversation that
    continues no turn is a root.

    Args:
        histories: the histories of the turns so far, in order; each ends with the turn's answer.
    """
    size = num_before_new(messages)
    for index, history in enumerate(histories):
        if len(history) == size < len(messages) and all(map(_is_same, history, messages)):
            return TurnStart(index, tuple(messages[size:]))
    return TurnStart(None, tuple(messages))


def num_before_new(messages: Sequence[ChatMessage]) -> int:
    """Return how many messages precede the trailing messages of users and tools.

    A history that it continues ends with an answer, and so has exactly as many.
    """
    size = len(messages)
    while size and messages[size - 1].role in CONTINUING_ROLES:
        size -= 1
    return size


def _is_same(left: ChatMessage, right: ChatMessage) -> bool:
    left_calls, right_calls = left.tool_calls, right.tool_calls
    return (
        (left.role, left.content, len(left_calls)) == (right.role, right.content, len(right_calls))
        and all(
            left_call.name == right_call.name
            for left_call, right_call in zip(left_calls, right_calls, strict=True)
        )
        and all(
            left_call.arguments == right_call.arguments
            or _arguments(left_call) == _arguments(right_call)
            for left_call, right_call in zip(left_calls, right_calls, strict=True)
        )
    )


def same_prompt_key(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> str:
    """Return a text that two first prompts share exactly if a template writes them alike."""
    turns = [[*_canonical(message), message.reasoning] for message in messages]
    offered = [[tool.name, tool.description, tool.parameters] for tool in tools]
    return json.dumps([turns, offered])


def _canonical(message: ChatMessage) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    calls = tuple((call.name, _arguments(call)) for call in message.tool_calls)
    return message.role, message.content, calls


def _arguments(call: ToolCall) -> str:
    """Return the arguments, the same text for the same values."""
    try:
        return json.dumps(json.loads(call.arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return call.arguments


def truncate_tool_texts(
    messages: Sequence[ChatMessage], rules: EpisodeRules
) -> tuple[ChatMessage, ...]:
    """Return the messages with the texts of tools cut to their limit."""
    return tuple(
        replace(message, content=truncate_text(message.content, rules))
        if message.role == TOOL
        else message
        for message in messages
    )


def truncate_text(text: str, rules: EpisodeRules) -> str:
    """Return a tool's text, cut as verl does: at the named side, or between two halves."""
    max_length = rules.max_tool_response_length
    if len(text) <= max_length:
        return text
    if rules.truncate_side == "left":
        return f"{_MARK}...{text[-max_length:]}"
    if rules.truncate_side == "right":
        return f"{text[:max_length]}...{_MARK}"
    half = max_length // 2
    return f"{text[:half]}...{_MARK}...{text[len(text) - half :]}"


def with_new_ids(answer: Answer, prefix: str, used_ids: Collection[str]) -> Answer:
    """Return an answer whose calls have ids that no other call has.

    An id that the policy wrote stays, since a template may write it beside the result; if another
    call has it, the number at its end becomes the number of earlier calls, as Kimi K2 counts them.

    Args:
        prefix: prefix of new ids; it begins with ``call_``, as in replicas' ids.
        used_ids: ids of earlier calls in the conversation.
    """
    calls: dict[str, ToolCall] = {}
    following = 0  # shared by all calls, so that the search takes time in proportion to `used_ids`
    for number, call in enumerate(answer.tool_calls):
        is_written = call.call_id and not call.call_id.startswith("call_")
        call_id = call.call_id if is_written else f"{prefix}_{number}"
        stem, following = call_id.rstrip(string.digits), max(following, len(used_ids) + number)
        while call_id in used_ids or call_id in calls:
            call_id, following = f"{stem}{following}", following + 1
        calls[call_id] = replace(call, call_id=call_id)
    return replace(answer, tool_calls=tuple(calls.values()))


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn; the first turn's is that of a sample without an environment."""
    if turn == 0:
        return seed
    return seed_of(f"{seed}/turn {turn}")


@dataclass(slots=True)
class EpisodeCounts:
    """What an episode has used of its limits.

    Attributes:
        user_turns: observations that the policy has read after an answer, including tools' (verl's
            count).
        invalid_answers: number of newest answers in a row with calls that cannot be read.
    """

    rules: EpisodeRules
    answers: int = 0
    user_turns: int = 0
    invalid_answers: int = 0

    def count_answer(self, answer: Answer) -> None:
        """Count an answer."""
        self.answers += 1
        self.invalid_answers = self.invalid_answers + 1 if answer.tool_error else 0

    def end(self, finish: FinishReason, observation: Observation) -> EpisodeEnd | None:
        """Return why the episode ends after an observation; ``None`` if the policy reads it.

        Args:
            observation: the observation; it is counted if the policy reads it.
        """
        rules = self.rules
        if observation.done:
            return EpisodeEnd.DONE
        if self.invalid_answers >= rules.max_invalid_calls:
            return EpisodeEnd.INVALID_CALLS
        if finish is FinishReason.LENGTH:
            return EpisodeEnd.MAX_TOKENS
        if rules.max_assistant_turns is not None and self.answers >= rules.max_assistant_turns:
            return EpisodeEnd.MAX_TURNS
        if rules.max_user_turns is not None and self.user_turns >= rules.max_user_turns:
            return EpisodeEnd.MAX_TURNS
        self.user_turns += 1
        return None
