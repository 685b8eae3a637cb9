"""From an engine's chunks to whole samples, with tokens as they come if wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.protocol import (
    GenerationRequest,
    RequestTokens,
    SampleChunk,
)
from services.rollout.generation import GenerationEvent, GenerationRunner, StreamSettings
from sluice.errors import EngineError
from sluice.types import FinishReason, Rollout, SamplingParams, TokenIds, VersionSpan
from tests.support.causal_lms import reference_model, request, running_engine, save_config
from tests.support.replica_process import ToyEncoder

STOP = FinishReason.STOP


class Utf8:
    """Each token is a byte of UTF-8."""

    def decode(self, token_ids: TokenIds) -> str:
        return bytes(token_ids.tolist()).decode("utf-8", errors="replace")


class ScriptedEngine:
    """Yields the given deliveries; an event is waited for, an exception raised."""

    def __init__(self, *script: Any) -> None:
        self.script, self.was_closed = script, False
        self.accounting = RequestTokens()

    async def generate(
        self,
        request: GenerationRequest,
        *,
        every_token: bool,
        partial_interval_s: float | None = None,
    ) -> AsyncIterator[tuple[SampleChunk, ...]]:
        try:
            for item in self.script:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, asyncio.Event):
                    await item.wait()
                    continue
                await asyncio.sleep(0)
                yield tuple(item)
        finally:
            self.was_closed = True


def chunk(
    index: int, text: str | bytes, version: int = 0, finish: FinishReason | None = None
) -> SampleChunk:
    data = text.encode() if isinstance(text, str) else text
    ids = np.frombuffer(data, dtype=np.uint8).astype(np.uint32)
    logprobs = -np.arange(1, ids.size + 1, dtype=np.float32) - version
    return SampleChunk(index, ids, logprobs, version, finish)


def request_for(
    *indexes: int, stop: tuple[str, ...] = (), partials: Sequence[Rollout] = ()
) -> GenerationRequest:
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=-1, max_tokens=99, seed=0, stop=stop
    )
    prompt = np.arange(2, dtype=np.uint32)
    return GenerationRequest("r", prompt, indexes, sampling, tuple(partials))


async def generate(
    engine: ScriptedEngine,
    *indexes: int,
    partials: Sequence[Rollout] = (),
    every_token: bool = False,
    linger_s: float = 0.0,
    stop: tuple[str, ...] = (),
) -> list[GenerationEvent]:
    events: list[GenerationEvent] = []

    async def send(event: GenerationEvent) -> None:
        events.append(event)

    async with asyncio.timeout(60):
        await GenerationRunner(engine, Utf8().decode).run(  # type: ignore[arg-type]
            request_for(*indexes, stop=stop, partials=partials),
            StreamSettings(every_token=every_token, linger_s=linger_s),
            send,
        )
    return events


def rollouts(events: list[GenerationEvent]) -> dict[int, Rollout]:
    return {rollout.sample_index: rollout for event in events for rollout in event.rollouts}


async def test_a_sample_is_the_sum_of_its_chunks_with_the_version_of_each_token() -> None:
    engine = ScriptedEngine(
        [chunk(0, "ab", 1), chunk(1, "x", 1)],
        [chunk(0, "c", 1)],
        [chunk(0, "de", 2), chunk(1, "y", 2, FinishReason.LENGTH)],
        [chunk(0, "f", 2, STOP)],
    )
    found = rollouts(await generate(engine, 0, 1))
    assert found[0].text == "abcdef"
    assert found[0].version_spans == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 6))
    assert found[0].finish_reason is STOP
    assert found[0].behavior_logprobs.tolist() == [-2, -3, -2, -3, -4, -3]
    assert found[1].text == "xy"
    assert found[1].version_spans == (VersionSpan(1, 0, 1), VersionSpan(2, 1, 2))
    assert found[1].finish_reason is FinishReason.LENGTH


async def test_a_last_chunk_without_tokens_ends_a_sample_too() -> None:
    engine = ScriptedEngine([chunk(0, "a")], [chunk(0, "", 1, FinishReason.ABORTED)])
    sample = rollouts(await generate(engine, 0))[0]
    assert (sample.text, sample.finish_reason) == ("a", FinishReason.ABORTED)
    assert sample.version_spans == (VersionSpan(0, 0, 1),)


async def test_a_sample_without_any_token_is_whole_as_well() -> None:
    sample = rollouts(await generate(ScriptedEngine([chunk(0, "", 0, STOP)]), 0))[0]
    assert (sample.num_tokens, sample.version_spans, sample.text) == (0, (), "")


async def test_nothing_is_sent_before_a_sample_is_whole() -> None:
    engine = ScriptedEngine([chunk(0, "a")], [chunk(0, "b")], [chunk(0, "c", 0, STOP)])
    (event,) = await generate(engine, 0)
    assert event.deltas == ()
    assert event.rollouts[0].text == "abc"


@pytest.mark.usefixtures("waits_take_no_time")
async def test_samples_that_finish_while_one_lingers_travel_with_it() -> None:
    finish = [[chunk(index, "a", 0, STOP)] for index in range(3)]
    together = await generate(ScriptedEngine(*finish), 0, 1, 2, linger_s=0.2)
    assert [len(event.rollouts) for event in together] == [3]


async def test_without_lingering_a_sample_leaves_while_others_still_run() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine([chunk(0, "a", 0, STOP)], gate, [chunk(1, "b", 0, STOP)])
    sent: list[int] = []

    async def send(event: GenerationEvent) -> None:
        sent.extend(rollout.sample_index for rollout in event.rollouts)
        gate.set()  # the engine continues only once the first sample has left

    async with asyncio.timeout(60):
        await GenerationRunner(engine, Utf8().decode).run(  # type: ignore[arg-type]
            request_for(0, 1), StreamSettings(), send
        )
    assert sent == [0, 1]


async def test_the_last_sample_does_not_linger() -> None:
    async with asyncio.timeout(60):
        events = await generate(ScriptedEngine([chunk(0, "a", 0, STOP)]), 0, linger_s=1000.0)
    assert len(events) == 1


async def test_tokens_come_as_they_are_sampled_and_their_texts_add_up() -> None:
    engine = ScriptedEngine([chunk(0, "ab")], [chunk(0, "c")], [chunk(0, "d", 1, STOP)])
    events = await generate(engine, 0, every_token=True)
    deltas = [delta for event in events for delta in event.deltas]
    assert "".join(delta.text for delta in deltas) == "abcd" == rollouts(events)[0].text
    tokens = np.concatenate([delta.chunk.token_ids for delta in deltas])
    assert tokens.tolist() == rollouts(events)[0].token_ids.tolist()
    assert [delta.chunk.version for delta in deltas] == [0, 0, 0, 1]


async def test_tokens_that_an_engine_joins_have_a_text_each() -> None:
    engine = ScriptedEngine([chunk(0, "ab")], [chunk(0, "cd", 1, STOP)])
    events = await generate(engine, 0, every_token=True)
    deltas = [delta for event in events for delta in event.deltas]
    assert [delta.text for delta in deltas] == ["a", "b", "c", "d"]
    assert [delta.chunk.behavior_logprobs.tolist() for delta in deltas] == [[-1], [-2], [-2], [-3]]
    assert sum(event.new_tokens for event in events) == 4
    assert rollouts(events)[0].text == "abcd"


@pytest.mark.parametrize("last", [b"!", b""], ids=["with a last token", "without"])
async def test_half_a_character_is_not_shown_until_it_is_whole_or_the_sample_ends(
    last: bytes,
) -> None:
    euro = "€".encode()
    pieces = [euro[:1], euro[1:2], euro[2:], b"\xe2"]
    engine = ScriptedEngine(*[[chunk(0, piece)] for piece in pieces], [chunk(0, last, 0, STOP)])
    events = await generate(engine, 0, every_token=True)
    texts = [delta.text for event in events for delta in event.deltas]
    whole = "€\ufffd" + last.decode()
    assert "".join(texts) == whole == rollouts(events)[0].text
    assert "\ufffd" not in "".join(texts[:3])


def partial_of(index: int, text: str, version: int) -> Rollout:
    part = chunk(index, text, version)
    spans = (VersionSpan(version, 0, part.token_ids.size),)
    return Rollout.of_one_turn(
        index, part.token_ids, part.behavior_logprobs, spans, FinishReason.ABORTED, text
    )


async def test_a_continued_sample_is_whole_with_both_versions() -> None:
    engine = ScriptedEngine([chunk(1, "cd", 4), chunk(0, "x", 4, STOP)], [chunk(1, "e", 4, STOP)])
    events = await generate(engine, 0, 1, partials=[partial_of(1, "ab", 3)])
    sample = rollouts(events)[1]
    assert sample.text == "abcde"
    assert sample.version_spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 5))
    assert sample.behavior_logprobs[:2].tolist() == [-4, -5]
    assert rollouts(events)[0].version_spans == (VersionSpan(4, 0, 1),)


async def test_a_continued_sample_sends_only_the_text_that_is_new() -> None:
    engine = ScriptedEngine([chunk(0, "c", 4)], [chunk(0, "d", 4, STOP)])
    partials = [partial_of(0, "ab", 3)]
    events = await generate(engine, 0, partials=partials, every_token=True)
    assert [delta.text for event in events for delta in event.deltas] == ["c", "d"]


async def test_an_engine_error_ends_the_generation_with_it() -> None:
    engine = ScriptedEngine([chunk(0, "a")], EngineError("out of memory"))
    with pytest.raises(ExceptionGroup) as caught:
        await generate(engine, 0)
    assert caught.group_contains(EngineError, match="out of memory")


@pytest.mark.parametrize("linger_s", [0.0, 0.05])
async def test_an_engine_that_ends_without_all_samples_is_an_error_and_no_wait(
    linger_s: float,
) -> None:
    engine = ScriptedEngine([chunk(0, "a", 0, STOP)], [chunk(1, "b")])
    with pytest.raises(ExceptionGroup) as caught:
        await generate(engine, 0, 1, linger_s=linger_s)
    assert caught.group_contains(EngineError, match="ended without 1 of the samples")


async def test_cancelling_closes_the_engines_stream() -> None:
    engine = ScriptedEngine([chunk(0, "a")], asyncio.Event())
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(generate(engine, 0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not engine.was_closed
        running.cancel()
    assert engine.was_closed
    assert running.cancelled()


async def test_a_receiver_that_goes_away_closes_the_engines_stream() -> None:
    engine = ScriptedEngine([chunk(0, "a", 0, STOP)], asyncio.Event())

    async def send(_: GenerationEvent) -> None:
        raise ConnectionError("gone")

    with pytest.raises(ExceptionGroup):
        await GenerationRunner(engine, Utf8().decode).run(  # type: ignore[arg-type]
            request_for(0, 1), StreamSettings(), send
        )
    assert engine.was_closed


async def test_text_ends_before_a_stop_string_that_is_not_sent_and_tokens_are_kept() -> None:
    script = [[chunk(0, part)] for part in ("a", "b<", "c", "<", "e", "n")]
    engine = ScriptedEngine(*script, [chunk(0, "d", finish=STOP)])
    events = await generate(engine, 0, every_token=True, stop=("<end",))
    assert [delta.text for event in events for delta in event.deltas] == [
        "a",
        "b",
        "",
        "<c",
        "",
        "",
        "",
        "",
    ]
    (found,) = rollouts(events).values()
    assert (found.text, found.num_tokens) == ("ab<c", 8)


async def test_a_sample_that_no_stop_string_ended_has_all_of_its_text() -> None:
    engine = ScriptedEngine([chunk(0, "ab<e")], [chunk(0, "", finish=FinishReason.LENGTH)])
    events = await generate(engine, 0, every_token=True, stop=("<end",))
    assert "".join(delta.text for event in events for delta in event.deltas) == "ab<e"
    assert rollouts(events)[0].text == "ab<e"


@pytest.mark.parametrize(("more", "reported"), [("x", "aENx"), ("D", "a")])
async def test_text_that_an_aborted_sample_held_back_is_sent_once_where_the_sample_continues(
    more: str, reported: str
) -> None:
    leaving = ScriptedEngine([chunk(0, "a")], [chunk(0, "EN", 0, FinishReason.ABORTED)])
    events = await generate(leaving, 0, every_token=True, stop=("END",))
    part = rollouts(events)[0]
    continued = ScriptedEngine([chunk(0, more, 0, STOP)])
    events += await generate(continued, 0, partials=[part], every_token=True, stop=("END",))
    assert "".join(delta.text for event in events for delta in event.deltas) == reported


async def test_a_part_that_ends_in_many_bytes_of_no_character_does_not_repeat_its_text() -> None:
    ids = np.frombuffer(b"abc" + b"\xff" * 6, np.uint8).astype(np.uint32)
    spans = (VersionSpan(0, 0, ids.size),)
    part = Rollout.of_one_turn(
        0, ids, np.zeros(ids.size, np.float32), spans, FinishReason.ABORTED, "abc"
    )
    engine = ScriptedEngine([chunk(0, "z", 0, STOP)])
    events = await generate(engine, 0, partials=[part], every_token=True)
    reported = "".join(delta.text for event in events for delta in event.deltas)
    assert not reported.startswith("abc")
    assert reported.endswith("z")


class CountedUtf8(Utf8):
    """Counts how many tokens were decoded in all."""

    num_decoded = 0

    def decode(self, token_ids: TokenIds) -> str:
        self.num_decoded += token_ids.size
        return super().decode(token_ids)


@pytest.mark.parametrize("every_token", [False, True])
async def test_a_long_part_of_bytes_that_are_no_text_costs_no_more_than_any_other(
    every_token: bool,
) -> None:
    ids = np.full(5000, 0xFF, np.uint32)
    spans = (VersionSpan(0, 0, ids.size),)
    part = Rollout.of_one_turn(
        0, ids, np.zeros(ids.size, np.float32), spans, FinishReason.ABORTED, ""
    )
    engine, tokenizer = ScriptedEngine([chunk(0, "z", 0, STOP)]), CountedUtf8()

    async def send(event: GenerationEvent) -> None:
        pass

    await GenerationRunner(engine, tokenizer.decode).run(  # type: ignore[arg-type]
        request_for(0, partials=[part]), StreamSettings(every_token=every_token), send
    )
    assert tokenizer.num_decoded < 30 * ids.size


async def test_the_text_of_each_token_costs_the_same_however_long_the_response_is() -> None:
    script = [[chunk(0, "a")] for _ in range(999)]
    engine, tokenizer = ScriptedEngine(*script, [chunk(0, "z", 0, STOP)]), CountedUtf8()
    reported = []

    async def send(event: GenerationEvent) -> None:
        reported.extend(delta.text for delta in event.deltas)

    await GenerationRunner(engine, tokenizer.decode).run(  # type: ignore[arg-type]
        request_for(0), StreamSettings(every_token=True), send
    )
    assert "".join(reported) == "a" * 999 + "z"
    assert tokenizer.num_decoded < 10 * 1000


TEXT = "aé€😀b"


class ByteEngine:
    """Generates the bytes of `TEXT`, one a chunk."""

    accounting = RequestTokens()

    async def generate(self, request: GenerationRequest, **_: object):  # type: ignore[no-untyped-def]  # noqa: ANN201
        data = TEXT.encode()
        start = request.partials[0].token_ids.size if request.partials else 0
        for place in range(start, len(data)):
            reason = FinishReason.STOP if place + 1 == len(data) else None
            ids = np.array([data[place]], np.uint32)
            yield (SampleChunk(0, ids, np.zeros(1, np.float32), 0, reason),)


@pytest.mark.parametrize("cut", range(1, len(TEXT.encode())))
async def test_the_texts_before_and_after_the_cut_add_up(cut: int) -> None:
    data = np.frombuffer(TEXT.encode(), np.uint8).astype(np.uint32)[:cut]
    zeros = np.zeros(cut, np.float32)
    partial = Rollout.of_one_turn(
        0, data, zeros, (VersionSpan(0, 0, cut),), FinishReason.ABORTED, ""
    )
    before = TEXT.encode()[:cut].decode("utf-8", errors="ignore")  # whole characters came
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=99, seed=0)
    prompt = np.arange(2, dtype=np.uint32)
    request = GenerationRequest("r", prompt, (0,), sampling, (partial,))
    events: list[GenerationEvent] = []

    async def send(event: GenerationEvent) -> None:
        events.append(event)

    engine = ByteEngine()
    await GenerationRunner(engine, Utf8().decode).run(  # type: ignore[arg-type]
        request, StreamSettings(every_token=True), send
    )
    after = "".join(delta.text for event in events for delta in event.deltas)
    assert before + after == TEXT


async def _samples(
    engine: EmbeddedEngine, stop: tuple[str, ...], options: StreamSettings
) -> tuple[dict[int, Rollout], str]:
    """The samples, and the text that sample 0 streamed."""
    events: list[GenerationEvent] = []

    async def send(event: GenerationEvent) -> None:
        events.append(event)

    wanted = request(samples=3, max_tokens=20)
    wanted = replace(wanted, sampling=replace(wanted.sampling, stop=stop))
    async with asyncio.timeout(30):
        await GenerationRunner(engine, ToyEncoder().decode).run(wanted, options, send)
    deltas = [delta for event in events for delta in event.deltas]
    streamed = "".join(delta.text for delta in deltas if delta.chunk.sample_index == 0)
    return {one.sample_index: one for event in events for one in event.rollouts}, streamed


@pytest.mark.parametrize("every_token", [True, False])
async def test_a_stop_string_of_several_tokens_ends_a_sample(
    tmp_path: Path, every_token: bool
) -> None:
    folder, options = save_config("qwen3", tmp_path), StreamSettings(every_token=every_token)
    async with running_engine(folder, reference_model(folder)) as engine:
        free, _ = await _samples(engine, (), options)
        ids = free[0].token_ids.tolist()
        stop = f"{ids[7]} {ids[8]} "  # is there with the first digit after the space
        found, streamed = await _samples(engine, (stop, "never"), options)
    assert found[0].token_ids.tolist() == ids[:10]
    assert found[0].finish_reason is FinishReason.STOP
    assert found[0].text == free[0].text[: free[0].text.index(stop)]
    assert streamed == (found[0].text if every_token else "")
    for index in (1, 2):
        assert stop not in found[index].text
