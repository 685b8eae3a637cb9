"""Images from a client: files or bytes, one for each mark, kept when a replica is left."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from google.protobuf.message import Message

from sluice.api.reward.v1 import reward_pb2
from sluice.client import (
    AsyncClient,
    ChatMessage,
    ChatWithImages,
    GenerateOptions,
    NewPrompt,
    PromptEvent,
    RetryPolicy,
    RunAddress,
    Sampling,
    submission,
)
from sluice.client.generation_types import encode_images
from sluice.client.submission import OpenPrompts, prompt_to_proto
from sluice.errors import DataError, InvalidRequestError
from tests.support.image_files import png
from tests.support.token_replica import TokenReplica, token_replicas

QUICK = RetryPolicy(first_s=0.01, max_s=0.02)
TURNS = (ChatMessage("user", "<image>How many?"),)


def test_bytes_and_paths_are_sent_as_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png())
    for image in (png(), file, str(file)):
        assert encode_images("prompt", ChatWithImages(TURNS, [image])) == [png()]
    prompt = NewPrompt("p", TURNS, "math_dapo", "1", images=(file,))
    assert list(prompt_to_proto(prompt).images) == [png()]
    assert not prompt_to_proto(NewPrompt("p", TURNS, "math_dapo", "1")).images


@pytest.mark.parametrize(
    ("text", "images", "error", "message"),
    [
        ("no mark", [png()], InvalidRequestError, "prompt p: images: 1 images for 0 times"),
        ("<image>", [b"GIF89a"], InvalidRequestError, r"prompt p: images\[0\]: 6 bytes"),
        ("<image>", ["missing.png"], DataError, r"prompt p: images\[0\]: no file missing\.png"),
    ],
)
def test_what_cannot_be_sent_is_named(
    text: str, images: list[bytes | str], error: type[Exception], message: str
) -> None:
    prompt = NewPrompt("p", (ChatMessage("user", text),), "math_dapo", "1", images=images)
    with pytest.raises(error, match=message):
        prompt_to_proto(prompt)


async def test_a_broken_generation_takes_its_images_along() -> None:
    broken, sound = TokenReplica(breaks_after=3), TokenReplica(slots_busy=3)
    options = GenerateOptions(sampling=Sampling(seed=11))
    async with (
        token_replicas(broken, sound) as addresses,
        AsyncClient(RunAddress(replicas=addresses), policy=QUICK) as client,
    ):
        found = await client.generate(ChatWithImages(TURNS, [png()]), options)
    assert found.rollouts[0].token_ids.tolist() == list(range(6))
    for replica in (broken, sound):
        (request,) = replica.requests
        assert list(request.prompt.chat.images) == [png()]
        assert request.prompt.chat.messages[0].content == "<image>How many?"
    assert len(sound.requests[0].partials) == 1


def image_prompt(name: str, *images: bytes | Path) -> NewPrompt:
    turns = (ChatMessage("user", "<image>" * len(images)),)
    return NewPrompt(name, turns, "math_dapo", "1", images=images)


async def sent_and_accepted(under_way: OpenPrompts) -> list[reward_pb2.SubmitPromptsRequest]:
    """All that one call sends to a service that accepts it."""
    sent = []
    async for request in under_way.requests():
        sent.append(request)
        under_way.new_events(PromptEvent(request.prompt_id, "accepted", None, (), ""))
    return sent


async def test_a_prompt_too_large_for_a_message_is_an_error_and_never_sent() -> None:
    def check_size(name: str, message: Message) -> None:
        if message.ByteSize() > 1000:
            raise InvalidRequestError(f"{name}: too large")

    prompts = [image_prompt("a", png()), image_prompt("b", png() + bytes(1000))]
    under_way = OpenPrompts(prompts, until_outcome=False, check_size=check_size)
    assert [request.prompt_id for request in await sent_and_accepted(under_way)] == ["a"]
    assert str(under_way.failure) == "prompt b: too large"


async def test_a_file_is_read_once_and_sent_again_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png())
    under_way = OpenPrompts([image_prompt("a", file)], until_outcome=True)
    first = await sent_and_accepted(under_way)
    file.unlink()
    assert await sent_and_accepted(under_way) == first
    assert list(first[0].images) == [png()]
    assert under_way.failure is None


async def test_files_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def encode(prompt: NewPrompt) -> Message:
        threads.append(threading.current_thread())
        return prompt_to_proto(prompt)

    monkeypatch.setattr(submission, "prompt_to_proto", encode)
    under_way = OpenPrompts([image_prompt("a", png())], until_outcome=True)
    assert len(await sent_and_accepted(under_way)) == 1
    assert threading.main_thread() not in threads


async def test_the_images_of_open_prompts_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission, "_IMAGE_WINDOW_BYTES", 2 * len(png()))
    prompts = [image_prompt(name, png()) for name in "abcd"]
    under_way = OpenPrompts(prompts, until_outcome=True)
    requests = under_way.requests()
    assert [(await anext(requests)).prompt_id for _ in range(2)] == ["a", "b"]
    async with asyncio.TaskGroup() as tasks:
        third = tasks.create_task(anext(requests))
        await asyncio.sleep(0.05)
        assert not third.done()
        under_way.new_events(PromptEvent("a", "trained", 1, (), ""))
    assert third.result().prompt_id == "c"


async def test_a_prompt_whose_call_failed_while_its_file_was_read_is_sent_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def encode(prompt: NewPrompt) -> Message:
        begun.set()
        assert may_end.wait(60)
        return prompt_to_proto(prompt)

    monkeypatch.setattr(submission, "prompt_to_proto", encode)
    under_way = OpenPrompts([image_prompt(name, png()) for name in "ab"], until_outcome=True)
    failed, following = under_way.requests(), under_way.requests()
    async with asyncio.TaskGroup() as tasks:
        stale = tasks.create_task(anext(failed, None))
        assert await asyncio.to_thread(begun.wait, 60)
        first = tasks.create_task(anext(following))
        await asyncio.sleep(0)
        may_end.set()
    assert stale.result() is None
    assert [first.result().prompt_id, (await anext(following)).prompt_id] == ["a", "b"]
    for name in "ab":
        under_way.new_events(PromptEvent(name, "accepted", None, (), ""))
    assert await anext(following, None) is None
    assert under_way.are_done() is False
