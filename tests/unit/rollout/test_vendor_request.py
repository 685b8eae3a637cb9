"""One request's samples, over a script in place of a vendor's engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.rollout.engines.causal_lm import CheckpointLayout
from services.rollout.engines.protocol import GenerationRequest, SampleChunk
from services.rollout.engines.settings import VendorSettings
from services.rollout.engines.thread import ChunkStream
from services.rollout.engines.vendor_engines.request import (
    EngineDelta,
    FlushPolicy,
    RequestRun,
    VendorSample,
    VersionSpans,
)
from sluice.errors import EngineError
from sluice.types import FinishReason, PromptLogprobs
from tests.support.causal_lms import EOS, partial_sample, request

_WHOLE = FlushPolicy(every_token=False, interval_s=None)
_SINGLE = FlushPolicy(every_token=True, interval_s=None)
_Script = Sequence[EngineDelta | int | Exception | None]


class _Vendor:
    """Plays the same deltas to every sample.

    An int among them is the version from there on. A ``None`` puts the sample's name into `waiting`
    and waits for `may_continue`. An error is that of the first sample; the others wait for ever. So
    does a sample that finds no slot.
    """

    settings = VendorSettings("model", max_model_len=48)
    layout = CheckpointLayout(101, (EOS,), ())

    def __init__(self, script: _Script, *, first_goes_ahead: bool = False) -> None:
        self._script = script
        self.first_goes_ahead = first_goes_ahead
        self.version: int | None = 1
        self.sampled = self.prefilled = self.cached = 0
        self.begun: list[int] = []
        self.names: list[str] = []
        self.asked: list[VendorSample] = []
        self.checked: list[VersionSpans] = []
        self.refusal: EngineError | None = None
        self.generating, self.is_awaited, self.may_continue = (asyncio.Event() for _ in range(3))
        self.generating.set()
        self.waiting = asyncio.Queue[int]()
        self.slots = 100
        self.open = 0
        self.held: list[int] = []
        """Tokens of sample 0 that the vendor's client holds until they are asked for."""

    def serving_version(self) -> int:
        if self.version is None:
            raise EngineError("Vendor: a sample runs before the first weights")
        return self.version

    def count(self, sampled: int, prompt: int = 0, cached: int = 0) -> None:
        self.sampled += sampled
        self.prefilled += prompt - cached
        self.cached += cached

    async def wait_to_begin(self) -> None:
        self.is_awaited.set()
        await self.generating.wait()

    def seed(self, request: GenerationRequest, index: int, num_continued: int) -> int:
        return 100 * index + num_continued

    def so_far(self, _run: RequestRun, sample: VendorSample) -> EngineDelta | None:
        if sample.index or not self.held:
            return None
        tokens, self.held = self.held, []
        return _delta(tokens)

    def check_versions(self, sample: VendorSample, spans: VersionSpans) -> None:
        self.checked.append(spans)
        if self.refusal is not None:
            raise self.refusal

    async def deltas(self, run: RequestRun, sample: VendorSample) -> AsyncIterator[EngineDelta]:
        self.begun.append(sample.index)
        self.asked.append(sample)
        self.open += 1
        try:
            if self.open > self.slots:
                await asyncio.Event().wait()
            for one in self._script:
                if not self.may_continue.is_set():  # from then on everything is there already
                    await asyncio.sleep(0)
                if one is None:
                    self.waiting.put_nowait(sample.index)
                    await self.may_continue.wait()
                elif isinstance(one, int):
                    self.version = one
                elif isinstance(one, EngineDelta):
                    yield one
                elif sample.index == 0:
                    raise one
                else:
                    await asyncio.Event().wait()
        finally:
            self.open -= 1


class _Chunks(ChunkStream):
    """Keeps what is posted."""

    def __init__(self, on_post: Callable[[], None]) -> None:
        super().__init__("Vendor engine", 1)
        self.chunks: list[SampleChunk] = []
        self._on_post = on_post

    def post(self, chunks: list[SampleChunk]) -> None:
        self.chunks += chunks
        self._on_post()

    @property
    def reported(self) -> list[tuple[list[int], int, FinishReason | None]]:
        return [
            (chunk.token_ids.tolist(), chunk.version, chunk.finish_reason) for chunk in self.chunks
        ]


def _delta(
    tokens: Sequence[int], finish: str | None = None, spans: tuple[Any, ...] = ()
) -> EngineDelta:
    return EngineDelta(tokens, [-0.5 * token for token in tokens], finish, 2, spans)


def _run(
    vendor: _Vendor,
    wanted: GenerationRequest,
    pace: FlushPolicy = _WHOLE,
    on_post: Callable[[], None] = lambda: None,
) -> tuple[RequestRun, _Chunks]:
    chunks = _Chunks(on_post)
    return RequestRun(7, wanted, pace, vendor, chunks), chunks


async def _ended(
    script: _Script | _Vendor, wanted: GenerationRequest, pace: FlushPolicy = _WHOLE
) -> tuple[_Chunks, _Vendor]:
    vendor = script if isinstance(script, _Vendor) else _Vendor(script)
    run, chunks = _run(vendor, wanted, pace)
    async with asyncio.timeout(60):
        await run.run()
    assert run.sampled == vendor.sampled
    return chunks, vendor


async def test_tokens_come_in_one_chunk_a_version_when_the_sample_ends() -> None:
    script = [_delta([4]), _delta([5, 6]), 2, _delta([8]), _delta([9], "stop")]
    chunks, vendor = await _ended(script, request())
    assert chunks.reported == [([4, 5, 6], 1, None), ([8, 9], 2, FinishReason.STOP)]
    np.testing.assert_array_equal(chunks.chunks[1].behavior_logprobs, np.float32([-4, -4.5]))
    assert (vendor.sampled, vendor.prefilled, vendor.cached) == (5, 2, 2)


@pytest.mark.parametrize(
    ("wants", "num_tokens", "finish", "comes"),
    [
        (True, 4 + 3 - 1, "stop", True),
        (True, 4 + 3 - 1, "abort", False),  # computed again where it continues
        (True, 4 + 3 - 2, "stop", False),  # the vendor has lost some
        (False, 4 + 3 - 1, "stop", False),
    ],
)
async def test_a_finished_sample_comes_with_its_experts_if_they_are_wanted_and_complete(
    wants: bool, num_tokens: int, finish: str, comes: bool
) -> None:
    experts = np.zeros((num_tokens, 2, 2), np.uint8)
    script = [_delta([4]), replace(_delta([5, 6], finish), routing=experts)]
    chunks, _ = await _ended(script, replace(request(), with_routing=wants))
    (chunk,) = chunks.chunks
    assert chunk.routing is (experts if comes else None)


async def test_a_sample_of_several_versions_comes_without_experts() -> None:
    experts = np.zeros((4 + 3 - 1, 2, 2), np.uint8)
    script = [_delta([4]), 2, replace(_delta([5, 6], "stop"), routing=experts)]
    chunks, _ = await _ended(script, replace(request(), with_routing=True))
    assert [chunk.routing for chunk in chunks.chunks] == [None, None]


async def test_every_token_is_handed_on_as_it_comes_when_asked_for() -> None:
    chunks, _ = await _ended([_delta([4]), _delta([5]), _delta([], "abort")], request(), _SINGLE)
    assert chunks.reported == [([4], 1, None), ([5], 1, None), ([], 1, FinishReason.ABORTED)]


async def test_tokens_that_came_together_are_handed_on_one_by_one_when_asked_for() -> None:
    chunks, _ = await _ended([_delta([4, 5]), _delta([6, 7], "stop")], request(), _SINGLE)
    parts = [([4], 1, None), ([5], 1, None), ([6], 1, None), ([7], 1, FinishReason.STOP)]
    assert chunks.reported == parts
    logprobs = [chunk.behavior_logprobs.tolist() for chunk in chunks.chunks]
    assert logprobs == [[-2.0], [-2.5], [-3.0], [-3.5]]


async def test_tokens_of_unfinished_samples_are_handed_on_at_the_interval_asked_for() -> None:
    vendor = _Vendor([_delta([4]), 2, _delta([5]), None, _delta([6], "length")])
    pace = FlushPolicy(every_token=False, interval_s=0.001)

    def seen() -> None:
        # An interval may end before the second token comes.
        if chunks.chunks[-1].token_ids[-1] == 5:
            vendor.may_continue.set()

    run, chunks = _run(vendor, request(), pace, seen)
    async with asyncio.timeout(60):
        await run.run()
    assert chunks.reported == [([4], 1, None), ([5], 2, None), ([6], 2, FinishReason.LENGTH)]


async def _with_held_tokens(
    pace: FlushPolicy, use: Callable[[RequestRun, _Vendor, _Chunks], object], **wanted: Any
) -> tuple[_Chunks, _Vendor, RequestRun]:
    """Run one sample whose client holds tokens 5 and 6; then come what `use` does and token 9."""
    vendor = _Vendor([_delta([4]), None, _delta([9], "stop")])
    run, chunks = _run(vendor, request(**wanted), pace)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.run())
        await vendor.waiting.get()
        vendor.held = [5, 6]
        use(run, vendor, chunks)
        while vendor.held and not running.done():
            await asyncio.sleep(0.001)
        vendor.may_continue.set()
        await asyncio.wait([running])
    return chunks, vendor, run


async def test_held_tokens_are_of_the_version_that_serves_when_they_are_asked_for() -> None:
    def swap(run: RequestRun, vendor: _Vendor, _: _Chunks) -> None:
        run.catch_up()
        vendor.version = 2

    chunks, vendor, _ = await _with_held_tokens(_WHOLE, swap)
    assert chunks.reported == [([4, 5, 6], 1, None), ([9], 2, FinishReason.STOP)]
    assert vendor.sampled == 4


async def test_held_tokens_are_handed_on_at_the_interval_asked_for() -> None:
    pace = FlushPolicy(every_token=False, interval_s=0.001)
    chunks, _, _ = await _with_held_tokens(pace, lambda *_: None)
    assert [one.token_ids.tolist() for one in chunks.chunks][-1] == [9]
    assert [int(token) for one in chunks.chunks[:-1] for token in one.token_ids] == [4, 5, 6]


async def test_held_tokens_are_counted_while_none_is_handed_on() -> None:
    chunks, vendor, _ = await _with_held_tokens(_WHOLE, lambda *_: None)
    assert vendor.sampled == 4
    assert chunks.reported == [([4, 5, 6, 9], 1, FinishReason.STOP)]


@pytest.mark.parametrize("end", [RequestRun.cancel, RequestRun.give_up])
async def test_tokens_held_when_a_request_ends_early_are_counted(
    end: Callable[[RequestRun], None],
) -> None:
    chunks, vendor, run = await _with_held_tokens(_WHOLE, lambda run, *_: end(run))
    assert (vendor.sampled, run.sampled, vendor.open) == (3, 3, 0)
    given_up = [([4, 5, 6], 1, FinishReason.ABORTED)]
    assert chunks.reported == (given_up if end is RequestRun.give_up else [])


async def test_a_request_whose_tokens_are_read_one_by_one_asks_for_none() -> None:
    vendor = _Vendor([_delta([4]), _delta([5], "stop")])
    vendor.held = [6]
    stops = request(max_tokens=9)
    stops = replace(stops, sampling=replace(stops.sampling, stop=("x",)), decode=lambda _: "")
    for wanted, pace in ((request(), _SINGLE), (stops, _WHOLE)):
        run, chunks = _run(vendor, wanted, pace)
        await run.run()
        run.catch_up()
        assert run.reads_tokens
        assert [int(one) for chunk in chunks.chunks for one in chunk.token_ids] == [4, 5]


async def test_a_finished_sample_is_compared_with_the_vendors_account_before_it_is_posted() -> None:
    spans = (("1", 0, 1), ("2", 1, 2))
    script = [_delta([4]), 2, _delta([5], "length", spans)]
    _, vendor = await _ended(script, request())
    assert vendor.checked == [spans]
    refusing = _Vendor(script)
    refusing.refusal = EngineError("other weights")
    run, chunks = _run(refusing, request())
    with pytest.raises(EngineError, match="other weights"):
        await run.run()
    assert chunks.chunks == []


async def test_a_partial_is_part_of_the_prompt_and_of_the_limit() -> None:
    partial = partial_sample(1, [8, 9])
    wanted = request([3, 4], samples=2, max_tokens=5, partials=(partial,), ignore_eos=False)
    _, vendor = await _ended([_delta([5], "stop")], wanted)
    by_prompt = {tuple(sample.prompt): sample.choice for sample in vendor.asked}
    assert (by_prompt[3, 4].max_tokens, by_prompt[3, 4].seed) == (5, 0)
    assert (by_prompt[3, 4, 8, 9].max_tokens, by_prompt[3, 4, 8, 9].seed) == (3, 102)
    assert by_prompt[3, 4].stop_token_ids == (EOS,)


async def test_the_context_bounds_max_tokens() -> None:
    _, vendor = await _ended([_delta([5], "length")], request([3] * 40, max_tokens=20))
    assert vendor.asked[0].choice.max_tokens == 8


@pytest.mark.parametrize(
    ("partial", "reason"), [([4, EOS], FinishReason.STOP), ([4, 5, 6], FinishReason.LENGTH)]
)
async def test_a_complete_partial_is_not_sampled(partial: list[int], reason: FinishReason) -> None:
    partials = (partial_sample(0, partial),)
    wanted = request(max_tokens=3, partials=partials, ignore_eos=False)
    chunks, vendor = await _ended([], wanted)
    assert (chunks.reported, vendor.asked) == ([([], 1, reason)], [])


@pytest.mark.parametrize("finish", [None, "length"])
async def test_a_stop_string_ends_a_sample_in_the_middle_of_what_came(finish: str | None) -> None:
    wanted = request(max_tokens=9)
    sampling = replace(wanted.sampling, stop=("56",))
    wanted = replace(wanted, sampling=sampling, decode=lambda ids: "".join(map(str, ids)))
    script = [_delta([4, 5]), _delta([6, 7, 8], finish), EngineError("nothing more is wanted")]
    chunks, vendor = await _ended(script, wanted)
    assert chunks.reported == [([4, 5, 6], 1, FinishReason.STOP)]
    assert (vendor.sampled, vendor.open) == (5, 0)


async def test_a_failing_sample_fails_its_request_and_the_others_are_cancelled() -> None:
    vendor = _Vendor([_delta([4]), EngineError("boom")])
    with pytest.raises(EngineError, match="boom"):
        await _ended(vendor, request(samples=3))
    assert (len(vendor.asked), vendor.open) == (3, 0)


async def test_without_weights_nothing_is_sampled() -> None:
    vendor = _Vendor([_delta([4], "stop")])
    vendor.version = None
    with pytest.raises(EngineError, match="Vendor: a sample runs before the first weights"):
        await _ended(vendor, request())


async def test_the_others_follow_a_first_sample_once_the_prompt_is_cached() -> None:
    vendor = _Vendor([None], first_goes_ahead=True)
    run, _ = _run(vendor, request(samples=3))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.run())
        assert await vendor.waiting.get() == 0
        assert vendor.begun == [0]
        run.cancel()
        await asyncio.wait([running])
    assert vendor.open == 0
    following = _Vendor([_delta([4]), _delta([5], "stop")], first_goes_ahead=True)
    await _ended(following, request(samples=3))
    assert following.begun == [0, 1, 2]


async def test_a_first_sample_that_fails_does_not_keep_the_others_waiting() -> None:
    vendor = _Vendor([EngineError("boom")], first_goes_ahead=True)
    with pytest.raises(EngineError, match="boom"):
        await _ended(vendor, request(samples=3))


async def test_nothing_is_sent_while_the_engine_does_not_sample() -> None:
    vendor = _Vendor([_delta([5], "stop")])
    run, chunks = _run(vendor, request())
    vendor.generating.clear()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(run.run())
        await vendor.is_awaited.wait()
        assert vendor.begun == []
        vendor.generating.set()
    assert chunks.reported == [([5], 1, FinishReason.STOP)]


async def test_giving_up_ends_samples_as_aborted_with_what_they_have_and_once_only() -> None:
    vendor = _Vendor([_delta([4]), _delta([5]), None])
    run, chunks = _run(vendor, request(samples=2))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.run())
        assert {await vendor.waiting.get() for _ in range(2)} == {0, 1}
        run.give_up()
        run.give_up()
        await asyncio.wait([running])
    assert chunks.reported == [([4, 5], 1, FinishReason.ABORTED)] * 2
    assert vendor.open == 0, "what runs is left to be aborted"


@pytest.mark.parametrize("last", [_delta([5]), _delta([5], "stop")])
async def test_a_token_that_was_on_its_way_when_samples_were_given_up_is_not_used(
    last: EngineDelta,
) -> None:
    vendor = _Vendor([_delta([4]), None, last])
    run, chunks = _run(vendor, request(), _SINGLE)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.run())
        await vendor.waiting.get()
        vendor.may_continue.set()
        run.give_up()
        await asyncio.wait([running])
        assert running.cancelled()
    assert chunks.reported == [([4], 1, None), ([], 1, FinishReason.ABORTED)]


def _chunk(reason: FinishReason | None = None) -> SampleChunk:
    return SampleChunk(0, np.array([4], np.uint32), np.array([-1.0], np.float32), 1, reason)


async def test_an_error_that_comes_with_the_last_chunks_is_raised_after_them() -> None:
    stream = ChunkStream("vLLM engine", 1)
    stream.post([_chunk()])
    stream.end(EngineError("gone"))
    async with asyncio.timeout(60):
        assert len(await stream.next()) == 1
        with pytest.raises(EngineError, match="gone"):
            await stream.next()


async def test_a_request_that_ends_without_all_samples_is_an_error() -> None:
    stream = ChunkStream("vLLM engine", 2)
    stream.post([_chunk(FinishReason.STOP)])
    stream.end(None)
    async with asyncio.timeout(60):
        await stream.next()
        with pytest.raises(EngineError, match="without all"):
            await stream.next()


async def test_the_first_open_sample_brings_the_prompts_logprobs_without_continued_tokens() -> None:
    def scored(size: int) -> PromptLogprobs:
        logprobs = -np.arange(size, dtype=np.float32)
        return PromptLogprobs(logprobs, np.arange(size, dtype=np.uint32), logprobs)

    whole = partial_sample(0, [EOS])
    part = partial_sample(1, [EOS + 1, EOS + 2])
    wanted = request(samples=3, partials=(whole, part), ignore_eos=False)
    sent = replace(_delta([8], "stop"), prompt_logprobs=scored(5))
    for prompt_logprobs in (False, True):
        asked = replace(wanted, with_prompt_logprobs=prompt_logprobs)
        vendor = _Vendor([sent if prompt_logprobs else _delta([8], "stop")])
        chunks, _ = await _ended(vendor, asked)
        assert {one.index: one.choice.prompt_logprobs for one in vendor.asked} == {
            1: prompt_logprobs,
            2: False,
        }
        found = [one.prompt_logprobs for one in chunks.chunks if one.prompt_logprobs]
        assert bool(found) is prompt_logprobs
        assert all(one.logprobs.tolist() == [0, -1, -2] for one in found)
