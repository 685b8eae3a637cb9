"""Conversations continue from their exact tokens, with what the template writes between turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.continuation import Bridge, History
from services.rollout.prompt_encoder import PromptEncoder
from sluice.algorithm.episode_rules import with_new_ids
from sluice.errors import HistoryRewrittenError, InvalidRequestError
from sluice.types import Answer, ChatMessage, TokenIds, Tool, ToolCall
from tests.support.chat_templates import FAMILIES, save_family

LOOK = Tool(
    "look", "Look into a jar.", '{"type": "object", "properties": {"jar": {"type": "string"}}}'
)
QUESTION = ChatMessage("user", "What is in jar C?")
CALLS = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"jar": "C"}}\n</tool_call>',
    "qwen3_coder": (
        "<tool_call>\n<function=look>\n<parameter=jar>\nC\n</parameter>\n</function>\n</tool_call>"
    ),
    "llama3_json": '{"name": "look", "parameters": {"jar": "C"}}',
    "glm": ("<tool_call>look\n<arg_key>jar</arg_key>\n<arg_value>C</arg_value>\n</tool_call>"),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        '<|tool_call_argument_begin|>{"jar": "C"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="jar">C</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    ),
    "seed": (
        "<seed:tool_call>\n<function=look>\n<parameter=jar>C</parameter>\n</function>\n"
        "</seed:tool_call>"
    ),
    "deepseek_v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="jar" '
        'string="true">C</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    ),
    "gemma4": '<|tool_call>call:look{jar:<|"|>C<|"|>}<tool_call|>',
    "gpt-oss": ' to=functions.look<|channel|>commentary json<|message|>{"jar": "C"}',
}
IDS = {"kimi": "functions.look:0"}
CALL = ChatMessage("assistant", "", (ToolCall("look", '{"jar": "C"}', "call_0"),))
RESULT = ChatMessage("tool", "6", tool_call_id="call_0")
FORMATS = {
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3": "llama3_json",
    "glm": "glm",
    "kimi": "kimi",
    "minimax": "minimax",
    "seed": "seed",
    "deepseek_v4": "deepseek_v4",
    "gemma4": "gemma4",
    "gpt-oss": "gpt-oss",
    "phi": "plain",
    "gemma": "plain",
    "chatml": "plain",
    "reversed": "plain",
    "counted": "plain",
    "named results": "hermes",
    "no end": "plain",
    "other calls": "plain",
    "other calls, one end": "plain",
}
ALL = (("user", False), ("user", True), ("tool", False), ("tool", True))
WITH_TOOLS = (
    *("qwen2.5", "qwen3", "qwen3_coder", "llama3"),
    *("glm", "kimi", "minimax", "seed", "deepseek_v4"),
)
WITH_BRIDGES = (*WITH_TOOLS, "phi", "gemma", "chatml")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptEncoder]:
    root = tmp_path_factory.mktemp("families")
    return {name: PromptEncoder(save_family(name, root / name)) for name in FAMILIES}


def sampled(encoder: PromptEncoder, family: str, text: str) -> TokenIds:
    """The tokens of a response that ended."""
    known = FAMILIES[family]
    called = known.call_end if CALLS.get(FORMATS[family], "\0") in text else ""
    return encoder.encode_text(text + (called or known.control[0]), add_special_tokens=False)


def joined(*parts: TokenIds | Sequence[int]) -> list[int]:
    return [int(token) for part in parts for token in part]


def continued(
    encoder: PromptEncoder, earlier: Sequence[int], *new: ChatMessage, tools: Sequence[Tool] = ()
) -> list[int]:
    ids = encoder.encode_continuation(np.asarray(earlier, np.uint32), new, tools=tools)
    assert ids.dtype == np.uint32
    assert ids[: len(earlier)].tolist() == list(earlier)
    return ids.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_read_as_the_template_writes_them(
    encoders: dict[str, PromptEncoder], family: str
) -> None:
    assert encoders[family].tool_format == FORMATS[family]


@pytest.mark.parametrize("family", WITH_BRIDGES)
def test_turns_of_users_continue_as_a_full_rendering_has_them(
    encoders: dict[str, PromptEncoder], family: str
) -> None:
    encoder = encoders[family]
    history: list[ChatMessage] = [QUESTION]
    ids = joined(encoder.encode_chat(history))
    # An end token in a text, and lines around it, must not mislead.
    for text in ("And D?", "\n  twice\n", f"What is {FAMILIES[family].control[0]} now?"):
        new = ChatMessage("user", text)
        ids = continued(encoder, joined(ids, sampled(encoder, family, "It holds 6.")), new)
        history += [ChatMessage("assistant", "It holds 6."), new]
        assert ids == joined(encoder.encode_chat(history))


@pytest.mark.parametrize("family", [*WITH_TOOLS, "gemma4", "gpt-oss", "named results"])
def test_results_of_tools_continue_as_a_full_rendering_has_them(
    encoders: dict[str, PromptEncoder], family: str
) -> None:
    encoder = encoders[family]
    history: list[ChatMessage] = [ChatMessage("system", "Be brief."), QUESTION]
    ids = joined(encoder.encode_chat(history, tools=[LOOK]))
    # A result has the id of the call that was read.
    call = ToolCall("look", '{"jar": "C"}', IDS.get(family, "call_0"))
    result = replace(RESULT, tool_call_id=call.call_id)
    for _ in range(3):
        response = sampled(encoder, family, CALLS[FORMATS[family]])
        answer = encoder.read_answer(response, tools=[LOOK])
        assert answer == Answer("", "", (call,))
        ids = continued(encoder, joined(ids, response), result, tools=[LOOK])
        history += [ChatMessage("assistant", "", answer.tool_calls), result]
        assert ids == joined(encoder.encode_chat(history, tools=[LOOK]))


def test_results_follow_the_first_calls_of_an_answer(encoders: dict[str, PromptEncoder]) -> None:
    # Episodes make the first `max_parallel_calls`.
    encoder, peek = encoders["gemma4"], replace(LOOK, name="peek")
    tools, history = [LOOK, peek], [QUESTION]
    ids = joined(encoder.encode_chat(history, tools=tools))
    for names in (("look", "peek"), ("peek", "look")):
        calls = "".join(CALLS["gemma4"].replace("look", name) for name in names)
        response = encoder.encode_text(f"{calls}<|tool_response>", add_special_tokens=False)
        answer = encoder.read_answer(response, tools=tools)
        assert [call.name for call in answer.tool_calls] == list(names)
        ids = continued(encoder, joined(ids, response), RESULT, tools=tools)
        history += [ChatMessage("assistant", "", answer.tool_calls), RESULT]
        assert ids == joined(encoder.encode_chat(history, tools=tools))


def test_a_result_has_the_id_that_the_policy_wrote_for_its_call(
    encoders: dict[str, PromptEncoder],
) -> None:
    encoder, history, taken = encoders["kimi"], [QUESTION], list[str]()
    ids = joined(encoder.encode_chat(history, tools=[LOOK]))
    for turn in range(2):
        response = sampled(encoder, "kimi", CALLS["kimi"].replace(":0", f":{turn}"))
        answer = with_new_ids(encoder.read_answer(response, tools=[LOOK]), f"call_{turn}", taken)
        (call,) = answer.tool_calls
        taken.append(call.call_id)
        result = replace(RESULT, tool_call_id=call.call_id)
        ids = continued(encoder, joined(ids, response), result, tools=[LOOK])
        history += [ChatMessage("assistant", "", answer.tool_calls), result]
        assert ids == joined(encoder.encode_chat(history, tools=[LOOK]))
    assert taken == ["functions.look:0", "functions.look:1"]


def test_kimis_answers_are_not_read_again_for_the_ids_beside_results(
    encoders: dict[str, PromptEncoder],
) -> None:
    assert not encoders["kimi"]._bridge({})._repeats_calls
    response = sampled(encoders["kimi"], "kimi", "<|tool_calls_section_begin|>look")
    assert continued(encoders["kimi"], response.tolist(), ChatMessage("tool", "Error: no"))


@pytest.mark.parametrize("said", ["look(", CALLS["gpt-oss"][:-1]])
def test_a_result_without_a_call_is_not_continued_where_the_template_repeats_calls(
    encoders: dict[str, PromptEncoder], said: str
) -> None:
    encoder = encoders["gpt-oss"]
    begun = encoder.encode_chat([QUESTION], tools=[LOOK])
    with pytest.raises(HistoryRewrittenError, match="a result follows no call that is read"):
        continued(encoder, joined(begun, sampled(encoder, "gpt-oss", said)), RESULT, tools=[LOOK])


def test_several_results_are_one_turn_where_the_template_has_it_so(
    encoders: dict[str, PromptEncoder],
) -> None:
    encoder, call = encoders["qwen2.5"], CALLS["hermes"]
    begun = joined(encoder.encode_chat([QUESTION], tools=[LOOK]))
    ids = continued(
        encoder,
        joined(begun, sampled(encoder, "qwen2.5", f"{call}\n{call}")),
        RESULT,
        RESULT,
        tools=[LOOK],
    )
    twice = ChatMessage("assistant", "", CALL.tool_calls * 2)
    assert ids == joined(encoder.encode_chat([QUESTION, twice, RESULT, RESULT], tools=[LOOK]))


@pytest.mark.parametrize(
    ("family", "refused"),
    [
        ("qwen2.5", ()),
        ("qwen3", (("user", True),)),
        ("qwen3_coder", ()),
        ("llama3", (("tool", True),)),
        ("glm", ()),
        ("kimi", ()),
        ("minimax", ()),
        ("seed", ()),
        ("deepseek_v4", ()),
        ("named results", ()),
        ("gemma4", (("tool", True),)),
        ("gpt-oss", (("user", False), ("user", True))),
        ("phi", (("tool", False), ("tool", True))),
        ("gemma", (("tool", False), ("tool", True))),
        ("chatml", ()),
        ("reversed", ALL),
        ("counted", ALL),
        ("no end", ALL),
        ("other calls", (("tool", False), ("tool", True))),
        ("other calls, one end", ()),
    ],
)
def test_what_a_template_rewrites_is_known_before_anyone_asks(
    encoders: dict[str, PromptEncoder], family: str, refused: tuple[tuple[str, bool], ...]
) -> None:
    refusals = encoders[family]._bridge({}).refusals
    found = {kind for kind, reason in refusals.items() if reason}
    assert found == {History(*kind) for kind in refused}


def test_thoughts_that_history_leaves_out_are_refused_and_others_continue(
    encoders: dict[str, PromptEncoder],
) -> None:
    encoder, begun = encoders["qwen3"], encoders["qwen3"].encode_chat([QUESTION])
    new, thoughts = ChatMessage("user", "And D?"), "<think>\nhm\n</think>\n\n"
    earlier = joined(begun, sampled(encoder, "qwen3", f"{thoughts}6"))
    with pytest.raises(HistoryRewrittenError, match=r"rewrites history before turns of user.*root"):
        continued(encoder, earlier, new)
    assert continued(encoder, joined(begun, sampled(encoder, "qwen3", "6")), new)
    # Within one question's tool calls the thoughts stay.
    call = sampled(encoder, "qwen3", thoughts + CALLS["hermes"])
    ids = continued(encoder, joined(begun, call), RESULT)
    thinking = ChatMessage("assistant", thoughts, CALL.tool_calls)
    assert ids == joined(encoder.encode_chat([QUESTION, thinking, RESULT]))


def test_arguments_of_the_template_decide_too(encoders: dict[str, PromptEncoder]) -> None:
    # Empty thoughts of the generation prompt are not in the history.
    encoder, without = encoders["qwen3"], {"enable_thinking": False}
    begun = encoder.encode_chat([QUESTION], template_kwargs=without)
    earlier = np.asarray(joined(begun, sampled(encoder, "qwen3", "6")), np.uint32)
    with pytest.raises(HistoryRewrittenError):
        encoder.encode_continuation(
            earlier, [ChatMessage("user", "And D?")], template_kwargs=without
        )


def test_arguments_of_a_client_do_not_take_the_place_of_the_runs(
    encoders: dict[str, PromptEncoder],
) -> None:
    encoder: Any = encoders["qwen3"]
    own = encoder._bridge({})
    for number in range(40):
        encoder._bridge({"number": number})
    assert encoder._bridge({}) is own


def test_only_the_roles_of_the_new_turns_are_proved(
    encoders: dict[str, PromptEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, proved = encoders["qwen3"], set[str]()
    prove = Bridge._refusal

    def noted(bridge: Bridge, kind: History) -> str:
        proved.add(kind.role)
        return prove(bridge, kind)

    monkeypatch.setattr(Bridge, "_refusal", noted)
    ids = encoder.encode_chat([QUESTION])
    kwargs = {"asked": "for the first time"}
    encoder.encode_continuation(ids, [ChatMessage("user", "7")], template_kwargs=kwargs)
    assert proved == {"user"}


def test_a_response_that_was_cut_gets_the_end_that_it_lacks(
    encoders: dict[str, PromptEncoder],
) -> None:
    encoder, new = encoders["qwen2.5"], ChatMessage("user", "Continue.")
    begun, whole = encoder.encode_chat([QUESTION]), sampled(encoder, "qwen2.5", "It holds")
    cut = continued(encoder, joined(begun, whole[:-1]), new)
    assert cut == continued(encoder, joined(begun, whole), new)


def test_another_end_token_of_the_model_ends_a_response_as_well(tmp_path: Path) -> None:
    folder = save_family("llama3", tmp_path)
    (eom,) = PromptEncoder(folder).encode_text("<|eom_id|>", add_special_tokens=False).tolist()
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{eom}]}}', encoding="utf-8")
    encoder = PromptEncoder(folder)
    begun = encoder.encode_chat([QUESTION], tools=[LOOK])
    called = encoder.encode_text(CALLS["llama3_json"] + "<|eom_id|>", add_special_tokens=False)
    ids = continued(encoder, joined(begun, called), RESULT, tools=[LOOK])
    end = encoder.encode_text("<|eot_id|>", add_special_tokens=False)[0]
    assert ids[len(begun) + len(called)] != end


@pytest.mark.parametrize(
    ("family", "other", "said", "new"),
    [
        ("glm", "<|endoftext|>", CALLS["glm"], RESULT),
        ("glm", "<|endoftext|>", "It holds 6.", ChatMessage("user", "And D?")),
        ("glm", "<|observation|>", "It holds 6.", ChatMessage("user", "And D?")),
        ("gemma4", "<turn|>", CALLS["gemma4"], RESULT),
    ],
)
def test_another_end_token_is_not_taken_for_the_role_of_the_next_turn(
    family: str, other: str, said: str, new: ChatMessage, tmp_path: Path
) -> None:
    folder = save_family(family, tmp_path)
    (end,) = PromptEncoder(folder).encode_text(other, add_special_tokens=False).tolist()
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {end}}}', encoding="utf-8")
    encoder = PromptEncoder(folder)
    begun = encoder.encode_chat([QUESTION], tools=[LOOK])
    cut = joined(begun, encoder.encode_text(said, add_special_tokens=False))
    ended = [*cut, end]
    added = continued(encoder, cut, new, tools=[LOOK])[len(cut) :]
    assert continued(encoder, ended, new, tools=[LOOK]) == ended + added


def test_a_tokenizer_without_a_template_continues_nothing_and_reads_plain_answers(
    tmp_path: Path,
) -> None:
    folder = save_family("qwen3", tmp_path)
    (folder / "chat_template.jinja").unlink()
    encoder = PromptEncoder(folder)
    assert encoder.read_answer(encoder.encode_text("6")) == Answer("6")
    assert "calls of tools are plain" in encoder.prove_continuations()
    with pytest.raises(HistoryRewrittenError):
        continued(encoder, [5], ChatMessage("user", "And D?"))


def test_without_new_turns_the_tokens_are_the_prompt(encoders: dict[str, PromptEncoder]) -> None:
    assert continued(encoders["reversed"], [5, 6, 7]) == [5, 6, 7]


def test_results_continue_where_the_template_writes_no_calls(
    encoders: dict[str, PromptEncoder],
) -> None:
    encoder, said = encoders["chatml"], "look C"
    ids = joined(encoder.encode_chat([QUESTION]), sampled(encoder, "chatml", said))
    history = [QUESTION, ChatMessage("assistant", said), RESULT]
    assert continued(encoder, ids, RESULT) == joined(encoder.encode_chat(history))


@pytest.mark.parametrize("family", ["phi", "gemma", "chatml"])
def test_tools_that_a_template_would_drop_without_a_word_are_refused(
    encoders: dict[str, PromptEncoder], family: str
) -> None:
    with pytest.raises(InvalidRequestError, match="tools: the model's chat template shows none"):
        encoders[family].encode_chat([QUESTION], tools=[LOOK])


@pytest.mark.parametrize(
    ("family", "role"), [("qwen2.5", "tool"), ("gemma4", "user"), ("gpt-oss", "user")]
)
def test_what_a_tool_says_without_a_call_is_the_users_where_a_template_would_not_show_it(
    encoders: dict[str, PromptEncoder], family: str, role: str
) -> None:
    encoder, broken = encoders[family], ChatMessage("assistant", "look(")
    chats = ([QUESTION, broken, ChatMessage(each, "Error: no")] for each in ("tool", role))
    ids, wanted = (joined(encoder.encode_chat(chat, tools=[LOOK])) for chat in chats)
    assert ids == wanted
    assert "Error: no" in encoder.decode(np.asarray(ids, np.uint32))


def test_gpt_oss_reads_its_thoughts_before_a_call_and_its_result(
    encoders: dict[str, PromptEncoder],
) -> None:
    encoder = encoders["gpt-oss"]
    thoughts = "<|channel|>analysis<|message|>Which jar?<|end|><|start|>assistant"
    answer = encoder.read_answer(sampled(encoder, "gpt-oss", thoughts + CALLS["gpt-oss"]))
    assert answer.reasoning == "Which jar?"
    said = ChatMessage("assistant", answer.content, answer.tool_calls, reasoning=answer.reasoning)
    ids = encoder.encode_chat([QUESTION, said, RESULT], tools=[LOOK])
    assert "analysisWhich jar?assistant to=functions.look" in encoder.decode(ids)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\n6"),
        ("seed", "<seed:think>hm</seed:think>6"),
        ("gemma4", "<|channel>thought\nhm<channel|>6"),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>6",
        ),
    ],
)
def test_where_no_calls_are_read_thoughts_and_text_are_those_of_the_templates_format(
    encoders: dict[str, PromptEncoder], family: str, text: str
) -> None:
    encoder = encoders[family]
    response = sampled(encoder, family, text)
    assert encoder.read_answer(response, tool_format="plain") == Answer("6", "hm")


def test_marks_of_one_format_are_not_in_texts_of_another(
    encoders: dict[str, PromptEncoder],
) -> None:
    response = sampled(encoders["phi"], "phi", "6")
    assert encoders["phi"].read_answer(response) == Answer("6")
    assert encoders["phi"].read_answer(response, tool_format="gpt-oss") == Answer("6<|end|>")


def test_a_schemas_keys_reach_the_template_in_their_order(
    encoders: dict[str, PromptEncoder],
) -> None:
    schema = '{"type": "object", "properties": {"z": {}, "a": {}}, "required": ["z"]}'
    ids = encoders["qwen2.5"].encode_chat([QUESTION], tools=[Tool("look", "", schema)])
    assert f'"parameters": {schema}' in encoders["qwen2.5"].decode(ids)


def test_marks_that_are_special_tokens_are_read_and_others_are_not_in_the_text(
    encoders: dict[str, PromptEncoder], tmp_path: Path
) -> None:
    text = f"<|python_tag|>{CALLS['llama3_json']}"
    encoder: Any = PromptEncoder(save_family("llama3", tmp_path))
    encoder._fast.add_special_tokens(["<|python_tag|>"])
    ids = encoder.encode_text(f"{text}<|eot_id|>", add_special_tokens=False)
    assert "python_tag" not in encoder.decode(ids)
    assert [call.name for call in encoder.read_answer(ids).tool_calls] == ["look"]
