"""What a response says, by the format of its model family."""

from __future__ import annotations

import json

import pytest

from services.rollout.tool_calls import read_answer
from sluice.types import TOOL_FORMATS, Answer, Tool, ToolCall

LOOK = Tool(
    "look",
    "Look into a jar.",
    '{"type": "object", "properties": {"jar": {"type": "string"}, "deep": {"type": "integer"},'
    ' "how": {"type": ["object", "null"]}, "lid": {"type": ["string", "null"]},'
    ' "who": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "all": {"type": "boolean"},'
    ' "any": {"anyOf": [{"type": "string"}, {"type": "object"}]}}}',
)
SPACED = '{"jar":  "C" ,"deep":1.0}'
"""Arguments that no serializer writes like this."""


def calls_of(answer: Answer) -> list[tuple[str, str]]:
    assert not answer.tool_error, answer.tool_error
    return [(call.name, call.arguments) for call in answer.tool_calls]


def hermes(arguments: str, name: str = "look") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "tool_format"),
    [
        (hermes(SPACED), "hermes"),
        (f'{{"name": "look", "parameters": {SPACED}}}', "llama3_json"),
        (f'<|python_tag|>{{"name": "look", "parameters": {SPACED}}}', "llama3_json"),
        (f'{{"name": "look", "arguments": {SPACED}}}', "llama3_json"),
    ],
)
def test_arguments_are_the_text_that_was_sampled(text: str, tool_format: str) -> None:
    answer = read_answer(text, tool_format, (LOOK,))
    assert answer == Answer("", "", (ToolCall("look", SPACED, "call_0"),))


def test_thoughts_text_and_several_calls_are_apart() -> None:
    text = f"<think>\nwhich?\n</think>\n\nI look.\n{hermes('{}')}\n{hermes(SPACED, 'open')}"
    answer = read_answer(text, "hermes")
    assert (answer.reasoning, answer.content) == ("which?", "I look.")
    assert calls_of(answer) == [("look", "{}"), ("open", SPACED)]
    assert [call.call_id for call in answer.tool_calls] == ["call_0", "call_1"]


def test_a_call_within_thoughts_is_none() -> None:
    answer = read_answer(f"<think>{hermes('{}')}</think>7", "hermes")
    assert answer == Answer("7", hermes("{}"))


def test_thoughts_that_the_prompt_opened_or_that_never_ended_are_thoughts() -> None:
    assert read_answer("why\n</think>\n\n7", "plain") == Answer("7", "why")
    assert read_answer("<think>\nwhy", "plain") == Answer("", "why")


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_text_without_calls_is_the_content_letter_by_letter(tool_format: str) -> None:
    for text in ("", " 7 \n", '{"answer": 7}', "a < b", "{"):
        assert read_answer(text, tool_format) == Answer(text)


def test_plain_reads_no_calls() -> None:
    assert read_answer(hermes("{}"), "plain") == Answer(hermes("{}"))


def coder(*parameters: tuple[str, str], name: str = "look") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def test_qwen3_coders_parameters_have_the_types_of_the_schema() -> None:
    text = "First.\n" + coder(("jar", "7"), ("deep", "2"), ("how", '{"a":  1}'), ("else", "3"))
    answer = read_answer(text, "qwen3_coder", (LOOK,))
    assert answer.content == "First."
    assert calls_of(answer) == [("look", '{"jar": "7", "deep": 2, "how": {"a":  1}, "else": "3"}')]


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("lid", "123", "123"),
        ("who", "123", "123"),
        ("who", "true", "true"),
        ("lid", "null", None),
        ("who", "null", None),
        ("jar", "null", "null"),
        ("any", '{"a": 1}', {"a": 1}),
        ("all", "True", True),
        ("all", "False", False),
        ("all", "true", True),
        ("jar", "True", "True"),
    ],
)
def test_qwen3_coders_value_is_a_text_where_the_schema_allows_a_text(
    key: str, value: str, read: object
) -> None:
    (call,) = read_answer(coder((key, value)), "qwen3_coder", (LOOK,)).tool_calls
    assert json.loads(call.arguments) == {key: read}


def test_qwen3_coders_values_that_do_not_fit_their_type_are_texts() -> None:
    (call,) = read_answer(coder(("deep", "two\nlines")), "qwen3_coder", (LOOK,)).tool_calls
    assert json.loads(call.arguments) == {"deep": "two\nlines"}


def test_llamas_calls_are_separated_by_semicolons() -> None:
    one = '{"name": "look", "parameters": {}}'
    assert calls_of(read_answer(f"{one}; {one}", "llama3_json")) == [("look", "{}")] * 2


@pytest.mark.parametrize(
    "rest", [', "born": 1815}', ', "born": 18', "}", ', "list": ["parameters"]}']
)
def test_an_object_with_a_name_and_no_arguments_is_no_call_of_llamas(rest: str) -> None:
    text = f'{{"name": "Ada"{rest}'
    assert read_answer(text, "llama3_json") == Answer(text)


def test_arguments_written_as_a_text_are_the_object_in_it() -> None:
    text = hermes(json.dumps(SPACED))
    assert calls_of(read_answer(text, "hermes")) == [("look", SPACED)]


@pytest.mark.parametrize(
    ("text", "tool_format", "reported"),
    [
        (hermes("{"), "hermes", "tool call 1: .* is not read"),
        (hermes("[1]"), "hermes", "tool call 1: arguments: '.1.' is no object"),
        (hermes("{}")[:-12], "hermes", "tool call 1: </tool_call> is missing"),
        (hermes("{}") + "<tool_call>", "hermes", "tool call 2: </tool_call> is missing"),
        (hermes("{}", ""), "hermes", "tool call 1: '' is no name of a tool"),
        (hermes('{"a": ' + "[" * 40 + "]" * 40 + "}"), "hermes", "more than 32 levels deep"),
        (hermes('{"a": "' + "b" * (1 << 20) + '"}'), "hermes", "send at most 1048576"),
        (hermes("{}") * 129, "hermes", "129 tool calls; make at most 128"),
        ('{"name": "look", "parameters": {', "llama3_json", "tool call 1: .* is not read"),
        ("<|python_tag|>look(1)", "llama3_json", "tool call 1: .* is not read"),
        ("<tool_call>look</tool_call>", "qwen3_coder", "write <function=NAME>"),
        ("<tool_call><function=a>", "qwen3_coder", "</tool_call> is missing"),
        (
            "<tool_call><function=a><parameter=b>c</function></tool_call>",
            "qwen3_coder",
            "tool call 1: 'b>c' is not read",
        ),
        (
            coder(("jar", "C")).replace("<parameter", "I look.\n<parameter"),
            "qwen3_coder",
            "tool call 1: 'I look.' stands beside",
        ),
        (
            coder(("jar", "C")).replace("</function>", "now</function>"),
            "qwen3_coder",
            "tool call 1: 'now' stands beside",
        ),
        (
            coder(("jar", "C")).replace("</function>", "</function> Then"),
            "qwen3_coder",
            "tool call 1: 'Then' stands beside",
        ),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_for_the_policy_and_its_text_is_kept(
    text: str, tool_format: str, reported: str
) -> None:
    answer = read_answer(text, tool_format)
    assert not answer.tool_calls
    assert answer.content == text
    with pytest.raises(AssertionError, match=reported):
        raise AssertionError(answer.tool_error)
    assert len(answer.tool_error) < 400


HOSTILE = (
    "<tool_call>",
    "<tool_call>{",
    '<tool_call>"\\',
    "</tool_call>",
    '{"name":',
    '{"a":',
    "[",
    '"',
    "<think>",
    "</think>",
    "<function=",
    "<tool_call><function=a><parameter=b>",
    "<|python_tag|>",
    '{"name": "a"};',
    hermes("{}"),
)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
@pytest.mark.parametrize("part", HOSTILE)
def test_a_megabyte_of_hostile_text_is_read(part: str, tool_format: str) -> None:
    # Anything that takes more time than in proportion to the text takes hours here.
    for begin in ("", '{"name": "a", "parameters": ', "<tool_call>", "<tool_call><function=a>"):
        read_answer(begin + part * ((1 << 20) // len(part)), tool_format)
