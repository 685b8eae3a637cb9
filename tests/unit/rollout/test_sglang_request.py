"""One request's samples, over a client that is not SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.rollout.engines.protocol import GenerationRequest, PartialSample, SampleChunk
from services.rollout.engines.sglang.request import SglangRequest
from services.rollout.engines.sglang.sampler import stream_seed
from services.rollout.engines.vendor.samples import Delta, ModelLimits, Pace, SamplingChoice
from sluice.errors import EngineError
from sluice.types import FinishReason
from tests.support.causal_lms import EOS, request

_LIMITS = ModelLimits(48, (EOS,))
_WHOLE = Pace(every_token=False, interval_s=None)
_SINGLE = Pace(every_token=True, interval_s=None)
_Script = Sequence[Delta | int | Exception | None]


class _Serving:
    def __init__(self) -> None:
        self.version: int | None = 1
        self.salt = "s"
        self.sampled = self.prefilled = 0
        self.generating = asyncio.Event()
        self.generating.set()
        self.is_awaited = asyncio.Event()

    def count(self, sampled: int, prefilled: int) -> None:
        self.sampled += sampled
        self.prefilled += prefilled

    async def wait_to_begin(self) -> None:
        self.is_awaited.set()
        await self.generating.wait()


class _Client:
    """Plays the same deltas to every sample; an int among them is the version from there on, a
    ``None`` waits for `go_on`, and the sample is then among those in `waiting`. A sample that finds
    no slot waits for good."""

    def __init__(self, script: _Script, serving: _Serving) -> None:
        self._script, self._serving = script, serving
        self.names: list[str] = []
        self.asked: list[tuple[list[int], str, SamplingChoice]] = []
        self.priorities: list[int] = []
        self.waiting = asyncio.Queue[str]()
        self.go_on = asyncio.Event()
        self.slots = 100
        self.open = 0

    async def generate(
        self, name: str, prompt: Sequence[int], salt: str, choice: SamplingChoice, priority: int
    ) -> AsyncIterator[Delta]:
        self.names.append(name)
        self.priorities.append(priority)
        self.asked.append((list(prompt), salt, choice))
        self.open += 1
        try:
            if self.open > self.slots:
                await asyncio.Event().wait()
            for one in self._script:
                if not self.go_on.is_set():  # from then on everything is there already
                    await asyncio.sleep(0)
                if one is None:
                    self.waiting.put_nowait(name)
                    await self.go_on.wait()
                elif isinstance(one, int):
                    self._serving.version = one
                elif isinstance(one, Exception):
                    raise one
                else:
                    yield one
        finally:
            self.open -= 1


def _delta(tokens: Sequence[int], finish: str | None = None, spans: tuple[Any, ...] = ()) -> Delta:
    return Delta(tokens, [-0.5 * token for token in tokens], finish, 2, spans)


def _run(
    script: _Script, wanted: GenerationRequest, pace: Pace = _WHOLE
) -> tuple[SglangRequest, list[SampleChunk], _Client, _Serving]:
    serving, chunks = _Serving(), list[SampleChunk]()
    client = _Client(script, serving)
    run = SglangRequest(client, 7, wanted, _LIMITS, pace, serving, chunks.extend)  # type: ignore[arg-type]
    return run, chunks, client, serving


async def _ended(
    script: _Script, wanted: GenerationRequest, pace: Pace = _WHOLE
) -> tuple[list[SampleChunk], _Client, _Serving]:
    run, chunks, client, serving = _run(script, wanted, pace)
    async with asyncio.timeout(10):
        await run.run()
    assert run.sampled == serving.sampled
    return chunks, client, serving


def _reported(chunks: Sequence[SampleChunk]) -> list[tuple[list[int], int, FinishReason | None]]:
    return [(chunk.token_ids.tolist(), chunk.version, chunk.finish_reason) for chunk in chunks]


@pytest.mark.parametrize("reported", [(("1", 0, 2), ("2", 2, 3)), (("2", 0, 3),), (("1", 0, 1),)])
async def test_sglangs_own_account_of_versions_must_agree(reported: tuple[Any, ...]) -> None:
    script = [_delta([4]), 2, _delta([5]), _delta([6], "length", reported)]
    with pytest.raises(EngineError, match=r"while \[1, 2\] served"):
        await _ended(script, request())
    script[-1] = _delta([6], "length", (("1", 0, 1), ("2", 1, 3)))
    chunks, _, _ = await _ended(script, request())
    assert _reported(chunks)[-1] == ([5, 6], 2, FinishReason.LENGTH)


async def test_the_others_follow_the_first_sample_once_the_prompt_is_cached() -> None:
    run, _, client, _ = _run([None], request(samples=3))
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.run())
        assert await client.waiting.get() == "7-0-0."
        assert client.names == ["7-0-0."]
        run.cancel()
        await asyncio.wait([running])
    assert client.open == 0
    _, client, _ = await _ended([_delta([4]), _delta([5], "stop")], request(samples=12))
    assert client.names == [f"7-{index}-0." for index in range(12)]
    starts = [a for a in client.names for b in client.names if a != b and b.startswith(a)]
    assert starts == [], "SGLang would abort both"


async def test_a_first_sample_that_fails_does_not_keep_the_others_waiting() -> None:
    with pytest.raises(EngineError, match="boom"):
        await _ended([EngineError("boom")], request(samples=3))


async def test_nothing_is_sent_while_sglang_does_not_draw() -> None:
    run, chunks, client, serving = _run([_delta([5], "stop")], request())
    serving.generating.clear()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(run.run())
        await serving.is_awaited.wait()
        await run.until_none_is_sent()
        assert client.names == []
        serving.generating.set()
    assert _reported(chunks) == [([5], 1, FinishReason.STOP)]


async def test_what_was_put_back_is_sent_anew_by_another_name_and_what_has_tokens_stays() -> None:
    run, chunks, client, serving = _run(
        [_delta([4]), None, _delta([5], "stop")], request(samples=3)
    )
    client.slots = 1
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.run())
        while len(client.names) < 3:
            await asyncio.sleep(0)
        serving.generating.clear()
        run.put_back()
        run.put_back()
        client.go_on.set()
        await run.until_none_is_sent()
        assert _reported(chunks) == [([4, 5], 1, FinishReason.STOP)]
        assert (client.names, client.open) == (["7-0-0.", "7-1-0.", "7-2-0."], 0)
        client.slots = 3
        serving.generating.set()
        await asyncio.wait([running])
    assert client.names[3:] == ["7-1-1.", "7-2-1."]
    assert _reported(chunks) == [([4, 5], 1, FinishReason.STOP)] * 3
    assert serving.sampled == 6


@pytest.mark.parametrize("put_back_first", [True, False])
async def test_what_is_put_back_can_be_cancelled_with_its_request(put_back_first: bool) -> None:
    run, chunks, client, _ = _run([None], request())
    calls = [run.put_back, run.cancel]
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.run())
        await client.waiting.get()
        for call in calls if put_back_first else reversed(calls):
            call()
        await asyncio.wait([running])
    assert (client.open, chunks) == (0, [])


async def test_others_follow_a_first_sample_that_was_put_back_once_its_prompt_is_cached() -> None:
    run, _, client, _ = _run([None], request(samples=3))
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.run())
        await client.waiting.get()
        run.put_back()
        assert await client.waiting.get() == "7-0-1."
        assert client.names == ["7-0-0.", "7-0-1."]
        run.cancel()
        await asyncio.wait([running])


async def test_giving_up_ends_samples_as_aborted_with_what_they_have() -> None:
    run, chunks, client, _ = _run([_delta([4]), _delta([5]), None], request(samples=2))
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.run())
        assert {await client.waiting.get() for _ in range(2)} == {"7-0-0.", "7-1-0."}
        run.give_up()
        await asyncio.wait([running])
    assert _reported(chunks) == [([4, 5], 1, FinishReason.ABORTED)] * 2
    assert client.open == 0, "what runs is left to be aborted"


@pytest.mark.parametrize("last", [_delta([5]), _delta([5], "stop")])
async def test_a_token_that_was_on_its_way_when_samples_were_given_up_is_of_no_use(
    last: Delta,
) -> None:
    run, chunks, client, _ = _run([_delta([4]), None, last], request(), Pace(True, None))
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.run())
        await client.waiting.get()
        client.go_on.set()
        run.give_up()
        await asyncio.wait([running])
        assert running.cancelled()
    assert _reported(chunks) == [([4], 1, None), ([], 1, FinishReason.ABORTED)]


async def test_a_sample_that_is_continued_goes_on_with_its_numbers() -> None:
    partial = PartialSample(1, np.array([8, 9], np.uint32))
    wanted = request([3, 4], samples=2, max_tokens=5, partials=(partial,))
    _, client, _ = await _ended([_delta([5], "stop")], wanted)
    by_prompt = {tuple(prompt): choice for prompt, _, choice in client.asked}
    assert by_prompt[3, 4].seed == stream_seed(wanted.sampling.seed, 0, 2)
    assert by_prompt[3, 4, 8, 9].seed == stream_seed(wanted.sampling.seed, 1, 2)


async def test_every_sample_has_its_requests_priority_and_the_salt_of_the_weights() -> None:
    wanted = replace(request(samples=2), priority=-3)
    _, client, _ = await _ended([_delta([5], "stop")], wanted)
    assert client.priorities == [-3, -3]
    assert {salt for _, salt, _ in client.asked} == {"s"}


async def test_nothing_more_is_asked_for_of_a_sample_that_a_stop_string_ends() -> None:
    wanted = request(max_tokens=9)
    sampling = replace(wanted.sampling, stop=("56",))
    wanted = replace(wanted, sampling=sampling, decode=lambda ids: "".join(map(str, ids)))
    script = [_delta([4, 5]), _delta([6, 7, 8]), EngineError("nothing more is asked for")]
    chunks, _, serving = await _ended(script, wanted)
    assert _reported(chunks) == [([4, 5, 6], 1, FinishReason.STOP)]
    assert serving.sampled == 5
