"""`echo` of /v1/completions: the prompt and its logprobs, as harnesses read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("aiohttp")

from tests.support.causal_lms import VOCABULARY, expected_logprobs, reference_model
from tests.support.engine_contract_world import PLAIN
from tests.support.http_front import HttpFront, http_front
from tests.support.token_replica import TokenReplica, token_replicas
from tests.support.word_replica import BOS, word_replica, words

COMPLETION = "/v1/completions"
PROMPTS = ([5, 9, 23, 54], [17], [8, 8, 90])


async def echoed(front: HttpFront, prompt: object, **fields: object) -> list[Any]:
    asked = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True} | fields
    status, body = await front.post(COMPLETION, model="policy", prompt=prompt, **asked)
    assert status == 200, body
    return list(body["choices"])


async def test_each_prompt_of_a_batch_has_its_logprobs_and_those_of_the_best_tokens(
    tmp_path: Path,
) -> None:
    async with word_replica(tmp_path) as address, http_front(address) as front:
        choices = await echoed(front, PROMPTS, n=2)
        model = reference_model(tmp_path)
    assert [choice["index"] for choice in choices] == list(range(6))
    for prompt, choice in zip([one for one in PROMPTS for _ in "12"], choices, strict=True):
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        exact = expected_logprobs(model, prompt[:1], prompt[1:], PLAIN)
        assert found["token_logprobs"][1:-1] == pytest.approx(exact, abs=1e-4)
        logits = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        for place, top in enumerate(found["top_logprobs"][1:]):
            assert max(top.values()) == pytest.approx(float(logits[place].max()), abs=1e-4)
        # The last token is sampled, by the highest logit.
        assert len(found["tokens"]) == len(prompt) + 1
        assert found["token_logprobs"][-1] == max(found["top_logprobs"][-1].values())


async def test_a_token_has_the_best_logprob_only_if_it_is_the_best_one(tmp_path: Path) -> None:
    async with word_replica(tmp_path) as address, http_front(address) as front:
        (sampled,) = await echoed(front, [PROMPTS[0]], max_tokens=6, return_token_ids=True)
        best = [*PROMPTS[0], *sampled["token_ids"]]
        (choice,) = await echoed(front, [best], max_tokens=0)
        wrong = [*best[:-1], (best[-1] + 1) % VOCABULARY]
        (other,) = await echoed(front, [wrong], max_tokens=0)
    for found, is_best in ((choice["logprobs"], True), (other["logprobs"], False)):
        pairs = zip(found["token_logprobs"][4:], found["top_logprobs"][4:], strict=True)
        assert [own == max(top.values()) for own, top in pairs] == [True] * 5 + [is_best]


async def test_tokens_texts_and_offsets_are_those_of_prompt_and_response(tmp_path: Path) -> None:
    text = words(5, 9)
    async with word_replica(tmp_path) as address, http_front(address) as front:
        given, ids = await echoed(front, text), await echoed(front, [[5, 9]])
        (bare,) = await echoed(front, text, logprobs=None, max_tokens=0)
        status, body = await front.post(
            COMPLETION, model="policy", prompt=text, echo=True, max_tokens=0, return_token_ids=True
        )
    found = given[0]["logprobs"]
    assert found["tokens"][:3] == ["", "w5", " w9"]  # the first is the tokenizer's BOS
    assert found["text_offset"] == [0, 0, 2, 5]
    assert given[0]["text"] == text + found["tokens"][-1]
    assert ids[0]["logprobs"]["tokens"][:2] == ["w5", " w9"]
    assert ids[0]["text"].startswith(text)
    assert (bare["text"], bare["logprobs"], bare["finish_reason"]) == (text, None, "length")
    assert (status, body["choices"][0]["token_ids"]) == (200, [])
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert BOS not in (5, 9)


@pytest.mark.parametrize(
    ("fields", "param", "reported"),
    [
        ({"echo": True, "stream": True}, "echo", "true with stream"),
        ({"max_tokens": 0}, "max_tokens", "0; at least one token is sampled, unless echo is true"),
        ({"echo": True, "logprobs": 2}, "logprobs", "2; only the sampled token's and"),
    ],
)
async def test_what_is_not_offered_with_echo_is_refused_with_the_remedy(
    fields: dict[str, object], param: str, reported: str
) -> None:
    async with http_front("127.0.0.1:1") as front:
        status, body = await front.post(COMPLETION, model="policy", prompt="a", **fields)
    assert (status, body["error"]["param"]) == (400, param)
    assert body["error"]["message"].startswith(f"{param}: {reported}")


async def test_a_replica_that_knows_no_prompt_logprobs_is_named_and_no_answer_is_made_up() -> None:
    async with token_replicas(TokenReplica()) as addresses, http_front(*addresses) as front:
        status, body = await front.post(
            COMPLETION, model="policy", prompt="a", echo=True, logprobs=0
        )
    assert status == 500
    assert "a sample without prompt_logprobs; update the replica" in body["error"]["message"]


async def test_a_text_is_echoed_without_the_work_for_its_logprobs() -> None:
    async with token_replicas(TokenReplica()) as addresses, http_front(*addresses) as front:
        status, body = await front.post(COMPLETION, model="policy", prompt="a", echo=True)
    assert status == 200
    assert body["choices"][0]["text"].startswith("a")
