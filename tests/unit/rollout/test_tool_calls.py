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
    for text in ("", " 7 \n", '{"answer": 7}', "a < b", "{", "go to=b"):
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


def kimi(arguments: str, identity: str = "functions.look:0") -> str:
    call = f"{identity}<|tool_call_argument_begin|>{arguments}"
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{call}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )


def glm(*parameters: tuple[str, str]) -> str:
    pairs = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in parameters
    )
    return "\n".join(("<tool_call>look", *pairs, "</tool_call>"))


def seed(*parameters: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in parameters)
    return f"<seed:tool_call>\n<function=look>\n{inner}</function>\n</seed:tool_call>"


def minimax(*parameters: tuple[str, str]) -> str:
    inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in parameters)
    return f'<minimax:tool_call>\n<invoke name="look">\n{inner}</invoke>\n</minimax:tool_call>'


def deepseek(key: str, value: str, end: str = "parameter") -> str:
    return (
        f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="{key}">'
        f"{value}</｜DSML｜{end}>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )


def gemma(arguments: str) -> str:
    return f"<|tool_call>call:look{{{arguments}}}<tool_call|>"


def harmony(*messages: str) -> str:
    """An answer in channels. The generation prompt has written its first mark and the role."""
    return "<|end|><|start|>assistant".join(messages)


GPT_OSS = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"jar": "C"}'
INVOKE_OPEN = '<invoke name="open">\n</invoke>\n</minimax:tool_call>'


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "read"),
    [
        (
            "hermes",
            "I look.\n"
            + hermes('{"jar": "}{", "how": {"a": {"b": [1]}}}')
            + hermes("{}", "open")
            + " 7",
            "I look.\n7",
            [("look", {"jar": "}{", "how": {"a": {"b": [1]}}}), ("open", {})],
        ),
        ("hermes", f"```\n{hermes('{}')}\n```", "```\n```", [("look", {})]),
        (
            "qwen3_coder",
            coder(("jar", "C\n"), ("deep", "2")).replace(
                "</function>", "</function>\n<function=open>\n</function>"
            ),
            "",
            [("look", {"jar": "C\n", "deep": 2}), ("open", {})],
        ),
        (
            "glm",
            "I look.\n" + glm(("jar", 'C {"a"}'), ("deep", "2")) + "<tool_call>open</tool_call>",
            "I look.",
            [("look", {"jar": 'C {"a"}', "deep": 2}), ("open", {})],
        ),
        (
            "glm",
            "<think>7</think>\n" + glm(("how", '{"a": {"b": [1]}}'), ("else", "7")),
            "",
            [("look", {"how": {"a": {"b": [1]}}, "else": 7})],
        ),
        (
            "kimi",
            "I look." + kimi('{"jar": "C"}') + kimi(" {} ", " look "),
            "I look.",
            [("look", {"jar": "C"}), ("look", {})],
        ),
        (
            "minimax",
            "why</think>\n\nI look.\n" + minimax(("how", '{"a": "}"}'), ("else", "text")),
            "I look.",
            [("look", {"how": {"a": "}"}, "else": "text"})],
        ),
        (
            "minimax",
            minimax(("deep", "2")).replace("</minimax:tool_call>", INVOKE_OPEN),
            "",
            [("look", {"deep": 2}), ("open", {})],
        ),
        (
            "seed",
            "I look.\n" + seed(("jar", "日本"), ("all", "true")) + seed(("jar", "\na\nb\n")),
            "I look.",
            [("look", {"jar": "日本", "all": True}), ("look", {"jar": "a\nb"})],
        ),
        (
            "deepseek_v4",
            "I look.\n\n" + deepseek('jar" string="true', "\n7\n"),
            "I look.",
            [("look", {"jar": "\n7\n"})],
        ),
        ("deepseek_v4", deepseek('deep" string="false', "2"), "", [("look", {"deep": 2})]),
        ("deepseek_v4", deepseek('deep" string="false', "two"), "", [("look", {"deep": "two"})]),
        (
            "gemma4",
            "<|channel>thought\n7\n<channel|>"
            + gemma('jar:<|"|>a, {b}: c<|"|>,deep:2')
            + gemma(""),
            "",
            [("look", {"jar": "a, {b}: c", "deep": 2}), ("look", {})],
        ),
        ("gemma4", gemma("deep: -1.5,else:null"), "", [("look", {"deep": -1.5, "else": None})]),
        (
            "gpt-oss",
            harmony("<|channel|>analysis<|message|>7", f"{GPT_OSS}<|call|>"),
            "",
            [("look", {"jar": "C"})],
        ),
        (
            "gpt-oss",
            harmony("<|channel|>commentary<|message|>I look.", f"{GPT_OSS}<|call|>"),
            "I look.",
            [("look", {"jar": "C"})],
        ),
    ],
)
def test_calls_are_those_that_verls_parser_reads(
    tool_format: str, text: str, content: str, read: list[tuple[str, object]]
) -> None:
    # verl 0.9.1, verl/experimental/agent_loop/tool_parser.py, has read these.
    answer = read_answer(text, tool_format, (LOOK,))
    assert answer.content == content
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(answer)] == read


@pytest.mark.parametrize(
    ("tool_format", "text", "read"),
    [
        ("qwen3_coder", coder(("jar", "null"), ("all", "yes")), {"jar": "null", "all": "yes"}),
        ("glm", glm(("jar", "7")), {"jar": "7"}),
        ("seed", seed(("jar", " 7 "), ("all", "True")), {"jar": " 7 ", "all": True}),
        ("minimax", minimax(("jar", "null")), {"jar": "null"}),
        (
            "gemma4",
            gemma('how:{a:[1,{b:<|"|>c<|"|>}],<|"|>d e<|"|>:None}'),
            {"how": {"a": [1, {"b": "c"}], "d e": None}},
        ),
        ("gpt-oss", GPT_OSS, {"jar": "C"}),
        ("gpt-oss", GPT_OSS.replace(" <|constrain|>json", ""), {"jar": "C"}),
        (
            "gpt-oss",
            ' to=functions.look<|channel|>commentary json<|message|>{"jar": "C"}',
            {"jar": "C"},
        ),
    ],
)
def test_calls_that_verls_parser_misreads_have_the_schemas_types_and_all_their_values(
    tool_format: str, text: str, read: object
) -> None:
    ((name, arguments),) = calls_of(read_answer(text, tool_format, (LOOK,)))
    assert (name, json.loads(arguments)) == ("look", read)


def test_kimis_calls_have_the_ids_that_the_policy_wrote() -> None:
    answer = read_answer(kimi("{}", "functions.a:b:12"), "kimi")
    assert answer.tool_calls == (ToolCall("a:b", "{}", "functions.a:b:12"),)


@pytest.mark.parametrize(
    ("tool_format", "text", "said"),
    [
        ("seed", "<seed:think>hm</seed:think>\n7", Answer("7", "hm")),
        ("gemma4", "<|channel>thought\nhm\n<channel|>7", Answer("7", "hm")),
        ("gemma4", "<|channel>thought\n<channel|>7", Answer("7")),
        (
            "gpt-oss",
            harmony("<|channel|>analysis<|message|>hm", "<|channel|>final<|message|>7"),
            Answer("7", "hm"),
        ),
        ("gpt-oss", "<|channel|>final<|message|>7", Answer("7")),
        ("gpt-oss", "<|channel|>analysis<|message|>hm", Answer("", "hm")),
        (
            "gpt-oss",
            harmony(
                f"<|channel|>analysis<|message|>{GPT_OSS.replace('<|message|>', ' ')}",
                *["<|channel|>analysis<|message|>hm", "<|channel|>final<|message|>7"],
            ),
            Answer("7", f"{GPT_OSS.replace('<|message|>', ' ')}\nhm"),
        ),
    ],
)
def test_thoughts_have_their_formats_marks(tool_format: str, text: str, said: Answer) -> None:
    assert read_answer(text, tool_format) == said


@pytest.mark.parametrize("header", ["", "<|channel|>", "<|channel|>final", "<|channel|>commentary"])
@pytest.mark.parametrize("tool_format", ["gpt-oss", "plain"])
def test_a_header_that_is_cut_is_no_text(header: str, tool_format: str) -> None:
    answer = harmony("<|channel|>analysis<|message|>hm", header)
    assert read_answer(answer, tool_format, family="gpt-oss") == Answer("", "hm")
    assert read_answer(header, tool_format, family="gpt-oss") == Answer("")


def test_a_name_alone_is_a_call_without_arguments_and_one_with_other_keys_is_none() -> None:
    text = "<tool_call>{}</tool_call>"
    assert calls_of(read_answer(text.format('{"name": "look"}'), "hermes")) == [("look", "{}")]
    answer = read_answer(text.format('{"name": "look", "argument": {"jar": "C"}}'), "hermes")
    assert "has no arguments, and has other keys" in answer.tool_error


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
            coder() + coder().replace("</function>", "</function><function=b</function>"),
            "qwen3_coder",
            "tool call 3: '<function=b' is not read",
        ),
        ("<tool_call></tool_call>", "glm", "tool call 1: '' is not read; write NAME<arg_key>KEY</"),
        (hermes(SPACED), "glm", "tool call 1: .* is not read; write NAME<arg_key>KEY</arg_key>"),
        ("<tool_call>f<arg_value>5</arg_value></tool_call>", "glm", "write NAME<arg_key>KEY"),
        ("<tool_call>look<arg_key>jar</arg_key>C</tool_call>", "glm", "write <arg_key>KEY</arg_k"),
        (glm(("jar", "C"))[:-12], "glm", "</tool_call> is missing"),
        (kimi("{"), "kimi", "tool call 1: arguments: '{' is not JSON"),
        (kimi("[]"), "kimi", "tool call 1: arguments: '.*' is no object"),
        (kimi("{}")[:-26], "kimi", "<.tool_calls_section_end.> is missing"),
        (kimi("{}").replace("<|tool_call_end|>", ""), "kimi", "<.tool_call_end.> is missing"),
        (kimi("{}").replace("<|tool_call_begin|>", ""), "kimi", "write <.tool_call_begin.>"),
        (kimi("{}").replace("argument_begin", "arguments"), "kimi", "write <.tool_call_begin.>"),
        (minimax(("jar", "C")).replace('">C', ">C"), "minimax", 'write <parameter name="KEY">'),
        (minimax().replace("</invoke>", ""), "minimax", 'write <invoke name="NAME">'),
        (seed(("jar", "C")).replace("</parameter>", ""), "seed", "write <parameter=KEY>"),
        (deepseek("jar", "C"), "deepseek_v4", 'write <.*parameter name="KEY" string="true">'),
        (deepseek('jar" string="maybe', "C"), "deepseek_v4", 'name="KEY" string="true">'),
        (gemma('jar:<|"|>C'), "gemma4", "write call:NAME{key:value}"),
        (gemma("jar:C"), "gemma4", "tool call 1: arguments: .* is not JSON"),
        ("<|tool_call>look{}<tool_call|>", "gemma4", "write call:NAME{key:value}"),
        ("<|tool_call>call:look{}", "gemma4", "<tool_call.> is missing"),
        (GPT_OSS[:-1], "gpt-oss", "tool call 1: arguments: .* is not JSON"),
        (GPT_OSS.replace("functions.look", ""), "gpt-oss", "'' is no name of a tool"),
        (GPT_OSS.partition(" <")[0], "gpt-oss", "tool call 1: arguments: '' is not JSON"),
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
    "<tool_call><arg_key>",
    "<arg_key>a</arg_key><arg_value>",
    "<|tool_calls_section_begin|><|tool_call_begin|>",
    kimi("{}"),
    "<minimax:tool_call><invoke name=",
    minimax(("a", "b")),
    "<seed:think>",
    "<seed:tool_call><function=a></function>",
    deepseek('a" string="true', "b"),
    '<|tool_call>call:a{<|"|>',
    "<|tool_call>call:a{a a{",
    "a:",
    "a ",
    "<|channel>thought\n",
    "<|start|>",
    "<|channel|>analysis<|message|>",
    "<|start|>assistant to=functions.a<|message|>{}",
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
    for begin in (
        *("", '{"name": "a", "parameters": ', "<tool_call>", "<tool_call><function=a>"),
        "<|tool_call>call:a{",
    ):
        read_answer(begin + part * ((1 << 20) // len(part)), tool_format)
