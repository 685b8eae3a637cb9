"""A prompt in full or cut: the training data's rules hold for the run's own. Real servers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.client import (
    AsyncClient,
    ChatMessage,
    GenerateOptions,
    RetryPolicy,
    RunAddress,
    Sampling,
)
from sluice.client.generation_types import Prompt
from sluice.codec.fields import token_ids_from_bytes
from sluice.codec.rollout import chat_prompt_to_proto, continuation_to_proto
from sluice.errors import InvalidRequestError, PromptTooLongError, SequenceTooLongError
from sluice.rpc.client import open_channel, rollout_stub, stream_call
from sluice.rpc.metadata import SERVICE_KEY
from tests.support.word_replica import BOS, MAX_MODEL_LEN, MAX_PROMPT_LENGTH, word_replica, words

LONG = tuple(range(1, 21))
TURNS = [ChatMessage("system", words(*LONG[:12])), ChatMessage("user", words(*LONG[12:]))]
ONCE = RetryPolicy(patience_s=0.0)


async def read_of_client(address: str, prompt: Prompt, **options: object) -> list[int]:
    """The tokens that the model reads of a client's prompt."""
    wanted = GenerateOptions(sampling=Sampling(max_tokens=1), **options)  # type: ignore[arg-type]
    async with AsyncClient(RunAddress(replicas=(address,)), policy=ONCE) as client:
        return [int(token) for token in (await client.generate(prompt, wanted)).prompt_token_ids]


async def read_of_caller(
    address: str, prompt: common.PromptInput, service: str = "", **fields: int
) -> list[int]:
    """The same of a caller who gives no name, or as a service of the run."""
    return (await answered(address, prompt, service, **fields))[0]


async def answered(
    address: str,
    prompt: common.PromptInput,
    service: str = "",
    *,
    max_tokens: int = 1,
    max_sequence_tokens: int = 0,
) -> tuple[list[int], common.Rollout]:
    """What the model reads, and the sample."""
    request = rollout.GenerateRequest(
        prompt=prompt,
        sample_indexes=[0],
        sampling=common.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        max_sequence_tokens=max_sequence_tokens,
    )
    named = ((SERVICE_KEY, service),) if service else ()
    async with open_channel(address, max_message_bytes=1 << 20, metadata=lambda: named) as channel:
        answers = [
            answer
            async for answer in stream_call(
                rollout_stub(channel).Generate,
                request,
                name="RolloutService/Generate",
                peer=address,
                phase="generating",
                deadline_s=60,
            )
        ]
    (sample,) = answers[-1].rollouts
    ids = answers[0].accepted.prompt_token_ids_u32
    return [int(token) for token in token_ids_from_bytes(ids, "ids")], sample


@pytest.mark.parametrize("truncation", ["error", "left", "right", "middle"])
async def test_a_prompt_of_a_client_is_read_whole_whatever_the_data_set_allows(
    truncation: str, tmp_path: Path
) -> None:
    async with word_replica(
        tmp_path, f"data.truncation={truncation}", "data.filter_overlong_prompts=true"
    ) as address:
        assert len(LONG) > MAX_PROMPT_LENGTH
        assert await read_of_client(address, TURNS) == list(LONG)
        assert await read_of_client(address, words(*LONG)) == [BOS, *LONG]
        assert await read_of_client(address, LONG) == list(LONG)
        assert await read_of_caller(address, chat_prompt_to_proto(TURNS)) == list(LONG)


async def test_a_prompt_of_the_reward_service_is_held_to_the_data_sets_rules(
    tmp_path: Path,
) -> None:
    chat = chat_prompt_to_proto(TURNS)
    async with word_replica(tmp_path / "cut", "data.truncation=left") as address:
        kept = list(LONG[-MAX_PROMPT_LENGTH:])
        assert await read_of_caller(address, chat, "reward") == kept
    reported = f"20 tokens exceed data.max_prompt_length={MAX_PROMPT_LENGTH}"
    for name, settings in (
        ("refused", ("data.truncation=error",)),
        ("left out", ("data.truncation=left", "data.filter_overlong_prompts=true")),
    ):
        async with word_replica(tmp_path / name, *settings) as address:
            with pytest.raises(PromptTooLongError, match=reported):
                await read_of_caller(address, chat, "reward")


async def test_a_prompt_of_a_client_that_leaves_no_space_in_the_context_is_refused_not_cut(
    tmp_path: Path,
) -> None:
    fits = tuple(range(1, MAX_MODEL_LEN))
    over = (*fits, 50)
    async with word_replica(tmp_path, "data.truncation=left") as address:
        assert len(await read_of_client(address, [ChatMessage("user", words(*fits))])) == 31
        prompts: tuple[tuple[Prompt, int], ...] = (
            ([ChatMessage("user", words(*over))], 32),
            (words(*fits), 32),  # the special token counts
            (over, 32),
            (np.asarray(over * 2, np.uint32), 64),
        )
        for prompt, size in prompts:
            with pytest.raises(InvalidRequestError) as refused:
                await read_of_client(address, prompt)
            assert (
                f"prompt: {size} tokens; the model's context of {MAX_MODEL_LEN} takes "
                f"{MAX_MODEL_LEN - 1} and one of the response: shorten the prompt"
            ) in str(refused.value)
            assert "actor_rollout_ref.rollout.max_model_len" in str(refused.value)


async def test_a_text_begins_with_the_tokenizers_special_token_by_default(
    tmp_path: Path,
) -> None:
    turns = [ChatMessage("user", words(5))]
    async with word_replica(tmp_path) as address:
        assert await read_of_caller(address, common.PromptInput(text=words(5))) == [BOS, 5]
        assert await read_of_client(address, words(5)) == [BOS, 5]
        assert await read_of_client(address, words(5), add_special_tokens=False) == [5]
        assert await read_of_client(address, turns) == [5]
        assert await read_of_client(address, turns, add_special_tokens=True) == [BOS, 5]
        assert await read_of_client(address, (5,), add_special_tokens=True) == [5]


async def test_arguments_of_the_template_reach_it_and_those_of_the_run_stay(
    tmp_path: Path,
) -> None:
    turns = [ChatMessage("user", words(5))]
    async with word_replica(tmp_path, "data.apply_chat_template_kwargs={think: false}") as address:
        assert await read_of_client(address, turns) == [5, 9]
        assert await read_of_client(address, turns, chat_template_kwargs={"other": 1}) == [5, 9]
        assert await read_of_client(address, turns, chat_template_kwargs={"think": True}) == [5]


async def test_a_template_counts_by_the_whole_number_that_was_sent(tmp_path: Path) -> None:
    turns = [ChatMessage("user", words(5))]
    async with word_replica(tmp_path) as address:
        counted = await read_of_client(address, turns, chat_template_kwargs={"steps": 2})
    assert counted == [5, 8, 8]


@pytest.mark.parametrize(
    ("prompt", "arguments", "reported"),
    [
        (TURNS, {"chat_template": "x"}, "chat_template_kwargs: chat_template cannot be set"),
        (TURNS, {"x": "y" * 70_000}, "chat_template_kwargs: 70015 bytes; send at most 65536"),
        (TURNS, {"x": float("nan")}, "chat_template_kwargs: not JSON"),
        (
            TURNS,
            {"x": [2**53 + 1]},
            r"chat_template_kwargs\.x: 9007199254740993; give whole numbers",
        ),
        (TURNS, {"x": {1, 2}}, r"chat_template_kwargs\.x: a set; give texts"),
        ("text", {"think": False}, "chat_template_kwargs: .*think.* for a prompt of text"),
    ],
)
async def test_arguments_that_no_template_may_get_are_refused_by_their_name(
    tmp_path: Path, prompt: Prompt, arguments: dict[str, object], reported: str
) -> None:
    async with word_replica(tmp_path) as address:
        with pytest.raises(InvalidRequestError, match=reported):
            await read_of_client(address, prompt, chat_template_kwargs=arguments)


async def test_arguments_that_lie_too_deep_for_a_message_are_refused(tmp_path: Path) -> None:
    deep: dict[str, object] = {"x": 1}
    for _ in range(40):
        deep = {"x": deep}
    async with word_replica(tmp_path) as address:
        with pytest.raises(InvalidRequestError, match="lies more than 16 levels deep"):
            await read_of_client(address, TURNS, chat_template_kwargs=deep)
        less: dict[str, object] = {"x": 1}
        for _ in range(14):
            less = {"x": less}
        assert await read_of_client(address, TURNS, chat_template_kwargs=less) == list(LONG)


async def test_arguments_of_other_languages_clients_are_held_to_the_same(tmp_path: Path) -> None:
    turns, deep = [ChatMessage("user", words(5))], {"x": 1}
    for _ in range(20):
        deep = {"x": deep}  # type: ignore[dict-item]
    async with word_replica(tmp_path) as address:
        for arguments, reported in (
            (deep, "lies more than 16 levels deep"),
            ({"x": "y" * 70_000}, "70015 bytes; send at most 65536"),
            ({"x": float("inf")}, "chat_template_kwargs: not JSON"),
        ):
            prompt = chat_prompt_to_proto(turns)
            prompt.chat.template_kwargs.update(arguments)
            with pytest.raises(InvalidRequestError, match=reported):
                await read_of_caller(address, prompt)


async def test_a_bound_of_the_sequence_takes_the_place_of_the_prompts_and_shortens_the_sample(
    tmp_path: Path,
) -> None:
    chat = chat_prompt_to_proto(TURNS)
    async with word_replica(tmp_path, "data.truncation=error") as address:
        read, sample = await answered(
            address, chat, "reward", max_tokens=9, max_sequence_tokens=len(LONG) + 3
        )
        assert read == list(LONG)
        assert len(sample.token_ids_u32) == 3 * 4
        assert sample.finish_reason == common.FINISH_REASON_LENGTH
        for prompt in (chat, continuation_to_proto(np.array(LONG, np.uint32))):
            with pytest.raises(SequenceTooLongError, match=r"20 tokens; .* allows 20"):
                await answered(address, prompt, "reward", max_sequence_tokens=len(LONG))
        # The model's context bounds it, too.
        long = continuation_to_proto(np.ones(MAX_MODEL_LEN, np.uint32))
        with pytest.raises(SequenceTooLongError, match="32 tokens"):
            await answered(address, long, "reward", max_sequence_tokens=1000)
