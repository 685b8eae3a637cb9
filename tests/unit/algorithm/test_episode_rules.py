"""Which turn a conversation continues, and what an episode may use."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.algorithm.episode_rules import (
    EpisodeCounts,
    EpisodeRules,
    Observation,
    TurnStart,
    environment_of,
    find_turn_start,
    same_prompt_key,
    truncate_text,
    turn_seed,
    with_new_ids,
)
from sluice.types import Answer, ChatMessage, EpisodeEnd, FinishReason, Tool, ToolCall

ASK = ChatMessage("user", "Add jars.")
MORE = ChatMessage("user", "And?")


def said(text: str, *calls: ToolCall, reasoning: str = "") -> ChatMessage:
    return ChatMessage("assistant", text, calls, reasoning=reasoning)


def result(text: str, call_id: str = "call_0") -> ChatMessage:
    return ChatMessage("tool", text, tool_call_id=call_id)


CALL = ToolCall("look", '{"jar": "C", "deep": true}', "call_0")
FIRST = (ASK, said("", CALL, reasoning="hm"))
SECOND = (*FIRST, result("6"), said("6."))


def test_the_longest_history_that_a_conversation_begins_with_is_continued() -> None:
    assert find_turn_start([FIRST, SECOND], [*SECOND, MORE]) == TurnStart(1, (MORE,))
    assert find_turn_start([FIRST, SECOND], [*FIRST, result("7")]) == TurnStart(0, (result("7"),))


def test_ids_order_of_arguments_and_thoughts_do_not_make_another_history() -> None:
    replayed = said("", ToolCall("look", '{"deep":true,"jar":"C"}', "other"))
    new = result("6", "other")
    assert find_turn_start([FIRST], [ASK, replayed, new]) == TurnStart(0, (new,))


@pytest.mark.parametrize(
    "messages",
    [
        (ASK, said("", ToolCall("look", '{"jar": "D", "deep": true}')), MORE),
        (ASK, said("something else"), MORE),
        (ChatMessage("system", "Be brief."), *FIRST, MORE),
        (ASK,),
        FIRST,  # nothing new to read
        (*FIRST, result("6"), said("an answer of another policy"), MORE),
    ],
)
def test_a_conversation_that_continues_no_turn_is_a_root(messages: tuple[ChatMessage, ...]) -> None:
    assert find_turn_start([FIRST], messages) == TurnStart(None, messages)


@pytest.mark.parametrize(
    ("row", "by_default", "environment"),
    [
        ({}, True, ""),
        ({}, False, None),
        ({"agent_name": "single_turn_agent"}, True, None),
        ({"agent_name": "tool_agent"}, False, ""),
        ({"agent_name": "chess"}, False, "chess"),
    ],
)
def test_a_row_chooses_its_environment_by_verls_names(
    row: dict[str, object], by_default: bool, environment: str | None
) -> None:
    assert environment_of(row, by_default=by_default) == environment


def test_first_prompts_are_the_same_only_if_a_template_would_write_them_alike() -> None:
    tool = Tool("look", "Look.", "{}")
    keys = {
        same_prompt_key([ASK], [tool]),
        same_prompt_key([ASK], []),
        same_prompt_key([MORE], [tool]),
        same_prompt_key([ASK], [Tool("look", "Look into a jar.", "{}")]),
    }
    assert len(keys) == 4
    assert same_prompt_key([ASK], [tool]) in keys


@pytest.mark.parametrize(
    ("side", "kept"),
    [
        ("left", "(truncated)...56789"),
        ("right", "01234...(truncated)"),
        ("middle", "01...(truncated)...89"),
    ],
)
def test_a_long_text_of_a_tool_is_cut_as_verl_does(side: Any, kept: str) -> None:
    rules = EpisodeRules(100, max_tool_response_length=5, truncate_side=side)
    assert truncate_text("0123456789", rules) == kept
    assert truncate_text("01234", rules) == "01234"


@pytest.mark.parametrize(
    ("given", "taken", "ids"),
    [
        (("call_0", "call_1", ""), (), ("call_7_0", "call_7_1", "call_7_2")),
        (("look:0", "open:1"), (), ("look:0", "open:1")),
        (("look:0", "open:1"), ("look:0", "open:1"), ("look:2", "open:3")),
        (("look", "look", "look:007"), (), ("look", "look1", "look:007")),
        (("look:0",), ("look:0", "look:2"), ("look:3",)),
    ],
)
def test_calls_have_the_ids_that_the_policy_wrote_and_no_id_twice(
    given: tuple[str, ...], taken: tuple[str, ...], ids: tuple[str, ...]
) -> None:
    answer = Answer("", tool_calls=tuple(ToolCall("f", "{}", call_id) for call_id in given))
    named = with_new_ids(answer, "call_7", taken).tool_calls
    assert tuple(call.call_id for call in named) == ids


def test_ids_that_repeat_cost_one_search_of_the_earlier_calls() -> None:
    class Counted(set[str]):
        num_lookups = 0

        def __contains__(self, call_id: object) -> bool:
            self.num_lookups += 1
            return super().__contains__(call_id)

    taken = Counted({"f:0", *(f"f:{number}" for number in range(1000, 2000))})
    answer = Answer("", tool_calls=(ToolCall("f", "{}", "f:0"),) * 100)
    assert len({call.call_id for call in with_new_ids(answer, "call_7", taken).tool_calls}) == 100
    assert taken.num_lookups <= len(taken) + 2 * len(answer.tool_calls)


def test_the_first_turn_has_the_seed_of_a_sample_without_an_environment() -> None:
    assert turn_seed(11, 0) == 11
    assert len({turn_seed(11, 0), turn_seed(11, 1), turn_seed(11, 2), turn_seed(12, 1)}) == 4
    assert 0 <= turn_seed(11, 1) < 2**63


def test_the_seed_of_a_later_turn_is_the_same_in_every_release() -> None:
    assert turn_seed(11, 1) == 5163337730184035473


def ended(finish: FinishReason, seen: Observation, **limits: Any) -> EpisodeEnd | None:
    counts = EpisodeCounts(EpisodeRules(100, **limits))
    counts.count_answer(Answer("", tool_error="no call"))
    return counts.end(finish, seen)


def test_an_environment_that_is_done_ends_before_any_limit() -> None:
    over = {"max_assistant_turns": 1, "max_invalid_calls": 1}
    assert ended(FinishReason.LENGTH, Observation(done=True), **over) is EpisodeEnd.DONE
    assert ended(FinishReason.STOP, Observation((MORE,)), **over) is EpisodeEnd.INVALID_CALLS
    assert ended(FinishReason.LENGTH, Observation((MORE,))) is EpisodeEnd.MAX_TOKENS
    assert ended(FinishReason.STOP, Observation((MORE,)), max_assistant_turns=1) is (
        EpisodeEnd.MAX_TURNS
    )
    assert ended(FinishReason.STOP, Observation((MORE,))) is None


def test_only_answers_in_a_row_count_as_unreadable() -> None:
    counts = EpisodeCounts(EpisodeRules(100, max_invalid_calls=2))
    seen = Observation((result("?"),))
    for error, end in (("no call", None), ("", None), ("no call", None)):
        counts.count_answer(Answer("", tool_error=error))
        assert counts.end(FinishReason.STOP, seen) is end
    counts.count_answer(Answer("", tool_error="no call"))
    assert counts.end(FinishReason.STOP, seen) is EpisodeEnd.INVALID_CALLS


def test_results_of_tools_are_turns_of_a_user_as_in_verl() -> None:
    counts = EpisodeCounts(EpisodeRules(100, max_user_turns=3))
    assert counts.end(FinishReason.STOP, Observation((result("6"),))) is None
    whole = Observation((*FIRST, result("6")), is_whole=True)
    assert counts.end(FinishReason.STOP, whole) is None
    assert counts.end(FinishReason.STOP, Observation((MORE,))) is None
    assert counts.end(FinishReason.STOP, Observation((result("6"),))) is EpisodeEnd.MAX_TURNS
