"""Fields of other servers' dialects over HTTP: honoured, refused by name, or without a meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

pytest.importorskip("aiohttp")

from google.protobuf.json_format import MessageToDict

from sluice.openai_server.errors import RefusedError
from sluice.openai_server.requests import UNOFFERED, Kind, check_unsupported_fields
from tests.support.http_front import HttpFront, http_front
from tests.support.token_replica import TokenReplica, token_replicas
from tests.support.word_replica import MAX_MODEL_LEN, word_replica, words

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
OF_CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": words(5)}]}
OF_COMPLETION: dict[str, Any] = {"model": "policy", "prompt": words(5)}
BODIES = {CHAT: OF_CHAT, COMPLETION: OF_COMPLETION}
FIELDS: list[tuple[Kind, str]] = [
    (kind, field) for kind in get_args(Kind) for field in UNOFFERED[kind]
]


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_field_that_would_change_the_answer_is_refused_unless_it_says_nothing(
    kind: Kind, field: str
) -> None:
    for value in (None, *UNOFFERED[kind][field].neutral):
        check_unsupported_fields(msgspec.json.encode({field: value}), kind)
    with pytest.raises(RefusedError) as refused:
        check_unsupported_fields(msgspec.json.encode({field: "something"}), kind)
    assert refused.value.param == field
    assert str(refused.value).startswith(f"{field}: 'something' is not offered")
    assert str(refused.value).endswith("leave it out")


@pytest.mark.parametrize(
    ("path", "field", "value", "reported"),
    [
        *(
            (path, *refused)
            for path in (CHAT, COMPLETION)
            for refused in (
                ("min_p", 0.05, "0.05 is not offered; send 0, or leave it out"),
                ("repetition_penalty", 1.2, "1.2 is not offered; send 1, or leave it out"),
                ("presence_penalty", 0.5, "0.5 is not offered; send 0, or leave it out"),
                ("frequency_penalty", -1, "-1 is not offered; send 0, or leave it out"),
                ("min_tokens", 4, "4 is not offered; send 0, or leave it out"),
                ("logit_bias", {"5": 1}, "{'5': 1} is not offered; send {}, or leave it out"),
                ("guided_json", {"type": "object"}, "{'type': 'object'} is not offered; leave it"),
                ("structured_outputs", {"regex": "a"}, "{'regex': 'a'} is not offered; leave it"),
                ("use_beam_search", True, "True is not offered; send false, or leave it out"),
                ("skip_special_tokens", False, "False is not offered; send true, or leave it out"),
                ("bad_words", ["a"], "['a'] is not offered; send [], or leave it out"),
                ("best_of", 3, "3, and n is 1; send the same as n, or leave it out"),
                ("truncate_prompt_tokens", 5, "5 is not offered (prompts are never cut; send a"),
            )
        ),
        (CHAT, "reasoning_effort", "low", "'low' is not offered (set chat_template_kwargs"),
        (CHAT, "enable_thinking", False, "False is not offered (set chat_template_kwargs"),
        (CHAT, "tool_choice", {"a": 1}, "{'a': 1} is not offered (calls are sampled, never"),
        (CHAT, "functions", [{"name": "f"}], "[{'name': 'f'}] is not offered (send tools)"),
        (CHAT, "continue_final_message", True, "True is not offered (render the text, and send"),
        (CHAT, "echo", True, "True is not offered (render the text, and send it as a completion)"),
        (COMPLETION, "prompt_logprobs", 1, "1 is not offered (send echo and logprobs to /v1/comp"),
        (COMPLETION, "max_completion_tokens", 9, "9 is not offered (send max_tokens); leave it"),
        (COMPLETION, "chat_template_kwargs", {"a": 1}, "{'a': 1} is not offered (ask /v1/chat/"),
    ],
)
async def test_what_would_give_another_answer_is_refused_with_field_value_and_remedy(
    path: str, field: str, value: object, reported: str
) -> None:
    replica = TokenReplica()
    async with token_replicas(replica) as addresses, http_front(*addresses) as front:
        for stream in (False, True):
            status, answer = await front.post(path, **BODIES[path], **{field: value}, stream=stream)
            assert (status, answer["error"]["param"]) == (400, field)
            assert answer["error"]["message"].startswith(f"{field}: {reported}")
    assert not replica.requests


async def test_fields_that_say_nothing_or_change_no_answer_are_taken() -> None:
    without_meaning = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "guided_decoding_backend": "x",
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "whatever": [1],
    }
    async with token_replicas(TokenReplica()) as addresses, http_front(*addresses) as front:
        kinds: tuple[tuple[Kind, str], ...] = (("chat", CHAT), ("completion", COMPLETION))
        for kind, path in kinds:
            saying_nothing = {
                field: next(iter(known.neutral), None) for field, known in UNOFFERED[kind].items()
            }
            status, answer = await front.post(
                path, **BODIES[path], **saying_nothing, **without_meaning, top_k=0, n=2, best_of=2
            )
            assert status == 200, answer


async def test_what_the_engine_can_honour_is_passed_on() -> None:
    replica = TokenReplica()
    async with token_replicas(replica) as addresses, http_front(*addresses) as front:
        for path in (CHAT, COMPLETION):
            honoured = {"stop_token_ids": [7, 9], "ignore_eos": True, "add_special_tokens": False}
            assert (await front.post(path, **BODIES[path], **honoured))[0] == 200
            assert (await front.post(path, **BODIES[path]))[0] == 200
        thinking = {"chat_template_kwargs": {"enable_thinking": False, "budget": 3}}
        assert (await front.post(CHAT, **OF_CHAT, **thinking))[0] == 200
    for with_them, without in (replica.requests[:2], replica.requests[2:4]):
        assert list(with_them.sampling.stop_token_ids) == [7, 9]
        assert with_them.sampling.ignore_eos
        assert with_them.prompt.HasField("add_special_tokens")
        assert not with_them.prompt.add_special_tokens
        assert not without.sampling.stop_token_ids
        assert not without.sampling.ignore_eos
        assert not without.prompt.HasField("add_special_tokens")
        assert not without.prompt.chat.HasField("template_kwargs")
    arguments = MessageToDict(replica.requests[4].prompt.chat.template_kwargs)
    assert arguments == {"enable_thinking": False, "budget": 3}


@pytest.mark.parametrize("ids", [[-1], [1 << 32]])
async def test_stop_token_ids_that_are_none_are_refused_by_their_name(ids: list[int]) -> None:
    async with http_front("127.0.0.1:1") as front:
        status, answer = await front.post(COMPLETION, **OF_COMPLETION, stop_token_ids=ids)
    assert (status, answer["error"]["param"]) == (400, "stop_token_ids")


async def prompt_tokens(front: HttpFront, path: str, **fields: object) -> int:
    status, answer = await front.post(path, **(BODIES[path] | fields), max_tokens=1)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens"])


async def test_prompts_are_read_whole_and_begun_as_other_servers_do(tmp_path: Path) -> None:
    long = words(*range(1, 21))
    turns = [{"role": "system", "content": long}, {"role": "user", "content": words(5)}]
    async with (
        word_replica(tmp_path, "data.truncation=left") as address,
        http_front(address) as front,
    ):
        assert await prompt_tokens(front, CHAT, messages=turns) == 21
        assert await prompt_tokens(front, CHAT, messages=turns, add_special_tokens=True) == 22
        assert await prompt_tokens(front, COMPLETION, prompt=long) == 21
        assert await prompt_tokens(front, COMPLETION, prompt=long, add_special_tokens=False) == 20
        assert await prompt_tokens(front, COMPLETION, prompt=[[5, 6]]) == 2
        thought = {"chat_template_kwargs": {"think": False}}
        assert await prompt_tokens(front, CHAT, messages=turns, **thought) == 22
        for path, prompt in (
            (CHAT, {"messages": [*turns, *turns]}),
            (COMPLETION, {"prompt": f"{long} {long}"}),
        ):
            for stream in (False, True):
                status, answer = await front.post(path, **(BODIES[path] | prompt), stream=stream)
                assert status == 400
                reported = (
                    f"tokens; the model's context of {MAX_MODEL_LEN} takes {MAX_MODEL_LEN - 1}"
                )
                assert reported in answer["error"]["message"]


async def test_openais_own_client_has_its_fields_honoured_or_refused(tmp_path: Path) -> None:
    openai: Any = pytest.importorskip("openai")
    async with (
        word_replica(tmp_path) as address,
        http_front(address) as front,
        openai.AsyncOpenAI(
            base_url=f"{front.base_url}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        asked = {**OF_COMPLETION, "max_tokens": 12, "seed": 3}
        extra = {"ignore_eos": True, "return_token_ids": True}
        whole = await client.completions.create(**asked, extra_body=extra)
        ids = whole.choices[0].token_ids
        assert (len(ids), whole.choices[0].finish_reason) == (12, "length")
        extra["stop_token_ids"] = [ids[4]]
        ended = (await client.completions.create(**asked, extra_body=extra)).choices[0]
        assert (ended.token_ids, ended.finish_reason) == (ids[: ids.index(ids[4]) + 1], "stop")
        for refused in ({"presence_penalty": 0.5}, {"extra_body": {"min_p": 0.1}}):
            with pytest.raises(openai.BadRequestError, match="is not offered; send 0"):
                await client.chat.completions.create(**OF_CHAT, **refused)
        fields = {"presence_penalty": 0, "tool_choice": "required", "user": "me"}
        chat = await client.chat.completions.create(
            **OF_CHAT,
            **fields,
            max_tokens=2,
            extra_body={"chat_template_kwargs": {"think": False}, "min_p": 0.0},
        )
        assert chat.usage.prompt_tokens == 2


def test_the_page_for_clients_names_every_field_that_is_refused() -> None:
    page = (Path(__file__).parents[3] / "docs/clients.md").read_text(encoding="utf-8")
    table = page.partition("| refused | unless |")[2].partition("\n\n")[0]
    of_chat = "".join(line for line in table.splitlines(True) if line.startswith("| of chats"))
    of_completion = "".join(
        line for line in table.splitlines(True) if line.startswith("| of completions")
    )
    for field in UNOFFERED["chat"].keys() & UNOFFERED["completion"].keys():
        assert f"`{field}`" in table
        assert f"`{field}`" not in of_chat + of_completion
    for field in UNOFFERED["chat"].keys() - UNOFFERED["completion"].keys():
        assert f"`{field}`" in of_chat
    for field in UNOFFERED["completion"].keys() - UNOFFERED["chat"].keys():
        assert f"`{field}`" in of_completion
