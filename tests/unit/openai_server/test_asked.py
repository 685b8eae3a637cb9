"""What requests in the OpenAI dialect mean, and which are refused with the field's name."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest

from sluice.client.generation_types import ChatWithImages
from sluice.openai_server.errors import RefusedError
from sluice.openai_server.requests import (
    Bounds,
    ChatRequest,
    CompletionRequest,
    ParsedRequest,
    decode,
    parse_chat,
    parse_completion,
)
from sluice.types import ChatMessage
from tests.support.image_files import png

TURN = {"role": "user", "content": "hi"}


def image_part(url: str | None = None) -> dict[str, Any]:
    url = url or f"data:image/png;base64,{b64encode(png()).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def chat(bounds: Bounds = Bounds(), **fields: Any) -> ParsedRequest:  # noqa: B008
    body = json.dumps({"model": "policy", "messages": [TURN], **fields}).encode()
    return parse_chat(decode(body, ChatRequest), bounds)


def completion(**fields: Any) -> ParsedRequest:
    body = json.dumps({"model": "policy", "prompt": "hi", **fields}).encode()
    return parse_completion(decode(body, CompletionRequest), Bounds(deadline_s=7.0))


def test_a_bare_request_draws_one_choice_at_temperature_1() -> None:
    asked = chat()
    assert asked.prompts == ((ChatMessage("user", "hi"),),)
    sampling = asked.options.sampling
    assert (asked.options.n, sampling.temperature, sampling.top_p, sampling.max_tokens) == (
        1,
        1.0,
        1.0,
        0,
    )
    assert (asked.stream, asked.logprobs, sampling.stop) == (False, False, ())
    assert completion().options.sampling.max_tokens == 16
    assert completion().options.deadline_s == 7.0


def test_an_image_stands_where_its_part_stood() -> None:
    text = {"type": "text", "text": "how many?"}
    (prompt,) = chat(messages=[TURN, {"role": "user", "content": [image_part(), text]}]).prompts
    assert isinstance(prompt, ChatWithImages)
    assert [turn.content for turn in prompt.messages] == ["hi", "<image>how many?"]
    assert prompt.images == (png(),)
    (prompt,) = chat(messages=[{"role": "user", "content": "the word <image>"}]).prompts
    assert prompt == (ChatMessage("user", "the word <image>"),)


def test_every_field_that_is_offered_counts() -> None:
    asked = chat(
        n=3,
        temperature=0,
        top_p=0.5,
        top_k=4,
        seed=-1,
        stop="END",
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=9,
        max_tokens=5,
        logprobs=True,
        priority=-3,
    )
    sampling = asked.options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 4)
    assert (sampling.max_tokens, sampling.seed) == (9, 2**64 - 1)
    assert (asked.options.n, asked.options.priority, sampling.stop) == (3, -3, ("END",))
    assert asked.stream
    assert asked.include_usage
    assert asked.logprobs


def test_content_in_parts_is_their_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).prompts == (
        (ChatMessage("user", "ab"),),
    )


def test_a_developers_turn_is_the_systems_which_templates_write() -> None:
    turns = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    assert chat(messages=turns).prompts == ((ChatMessage("system", "a"), ChatMessage("user", "b")),)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_all_four_forms_of_a_prompt_are_taken(prompt: Any, prompts: Any) -> None:
    asked = completion(prompt=prompt, n=2)
    assert asked.prompts == prompts
    assert asked.num_choices == 2 * len(prompts)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"n": 0}, "n"),
        ({"n": "1"}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "é" * 65}, "stop"),
        ({"tools": [{}]}, "tools"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"seed": 1 << 63}, "seed"),
        ({"priority": 1}, "priority"),
        ({"priority": -101}, "priority"),
        ({"token_budget": 1, "n": 2}, "token_budget"),
        ({"token_budget": -1}, "token_budget"),
        ({"token_budget": 1 << 32}, "token_budget"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role"),
        *(
            ({"messages": [{"role": "user", "content": content}]}, param)
            for content, param in (
                ([{"type": "input_audio"}], "messages[0].content"),
                ([{"type": "image_url"}], "messages[0].content[0]"),
                ([image_part("https://example.org/a.png")], "messages[0].content[0]"),
                ([image_part("data:image/png,abc")], "messages[0].content[0]"),
                ([image_part("data:image/png;base64,!!")], "messages[0].content[0]"),
                ([image_part("data:image/png;base64,R0lGODlh")], "messages[0].content[0]"),
                ([image_part(), {"type": "text", "text": "no <image> here"}], "messages"),
            )
        ),
    ],
)
def test_a_chat_request_that_cannot_be_is_refused_with_its_field(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RefusedError, match=param.partition("[")[0]) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "stream": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt[...][...]"),
    ],
)
def test_a_completion_request_that_cannot_be_is_refused_with_its_field(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        completion(**fields)
    assert caught.value.param.startswith(param.partition("[")[0])


@pytest.mark.parametrize("given", [0, -1])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chat_answer_of_no_tokens_is_refused_and_not_taken_for_no_limit(
    field: str, given: int
) -> None:
    with pytest.raises(RefusedError, match=f"{field}: {given}; at least one token") as caught:
        chat(**{field: given})
    assert caught.value.param == field


def test_a_chat_answer_without_a_limit_may_fill_the_context() -> None:
    assert chat().options.sampling.max_tokens == 0
    assert chat(max_tokens=None, max_completion_tokens=None).options.sampling.max_tokens == 0


@pytest.mark.parametrize("stop", ["", [], [""], ["", ""] * 16])
def test_an_empty_stop_is_none(stop: Any) -> None:
    assert chat(stop=stop).options.sampling.stop == ()
    assert chat(stop=["", "END"]).options.sampling.stop == ("END",)


def test_a_deadline_of_the_request_counts_if_it_passes_before_the_servers() -> None:
    assert [completion(deadline_s=s).options.deadline_s for s in (2.5, 70)] == [2.5, 7.0]
    assert chat(deadline_s=70).options.deadline_s == 70.0
    assert chat().options.deadline_s is None


def test_a_token_budget_is_that_of_all_prompts_together() -> None:
    asked = completion(prompt=["a", "b"], n=2, token_budget=10)
    assert (asked.options.n, asked.options.token_budget) == (2, 5)
    assert completion(token_budget=0).options.token_budget == 0


def test_no_request_has_more_priority_than_the_server_allows() -> None:
    with pytest.raises(RefusedError, match=r"priority: 1; at most 0 .* --max-priority"):
        chat(priority=1)
    higher = Bounds(max_priority=5)
    assert [chat(higher, priority=given).options.priority for given in (5, -100)] == [5, -100]
    with pytest.raises(RefusedError, match="at most 5"):
        chat(higher, priority=6)
    assert [chat(Bounds(max_priority=m)).options.priority for m in (-10, 10)] == [-10, 0]


def test_more_choices_than_the_server_ever_draws_are_no_request() -> None:
    bounds = Bounds(max_choices=3, choices_option="--max-key-choices")
    assert chat(bounds, n=3).num_choices == 3
    with pytest.raises(RefusedError, match=r"n: 4 .* at most 3 .*--max-key-choices") as caught:
        chat(bounds, n=4)
    assert (caught.value.param, caught.value.status) == ("n", 400)
