"""Swaps, sleep and samples in the event loops of both vendors, over fake clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

import services.rollout.engines.vendor_engines.engine as vendor_engine
from services.rollout.engines.causal_lm import CheckpointLayout
from services.rollout.engines.protocol import GenerationRequest
from services.rollout.engines.sglang.engine import SglangCore, SglangEngine
from services.rollout.engines.sglang.sampler import stream_seed
from services.rollout.engines.sglang.settings import SglangSettings
from services.rollout.engines.thread import ChunkStream, LoopThread
from services.rollout.engines.threaded_engine import FlushPolicy
from services.rollout.engines.vendor_engines.engine import VendorCore
from services.rollout.engines.vendor_engines.request import EngineDelta, SamplingChoice
from services.rollout.engines.vllm.engine import VllmCore, VllmEngine
from services.rollout.engines.vllm.settings import VllmSettings
from sluice.errors import EngineError, NotReadyError, WeightSyncError
from sluice.types import FinishReason
from tests.support.causal_lms import partial_sample, request

_LAYOUT = CheckpointLayout(9, (), ())
_NO_ANSWER = EngineError("no answer within 60 s")
_EVERY_TOKEN = FlushPolicy(every_token=True, interval_s=None)
_WHOLE = FlushPolicy(every_token=False, interval_s=None)
_HALF_WAY: dict[str, object] = {"error": "no space", "kind": "EngineError", "broken": True}
_NOT_STAGED: dict[str, object] = {"error": "nothing is staged here", "kind": "WeightSyncError"}


@dataclass
class _Sent:
    """One sample as the client got it."""

    name: str
    prompt: list[int]
    salt: str
    choice: SamplingChoice
    priority: int


class _Client:
    """What both cores use of their clients. Samples token 5 while it is not paused, or a script."""

    is_broken = False

    def __init__(self) -> None:
        self.script: Sequence[EngineDelta | Callable[[], None]] | None = None
        self.sent: list[_Sent] = []
        self.one_by_one: list[bool] = []
        self.called: list[str] = []
        self.failures: dict[str, EngineError] = {}
        self.applied: dict[str, object] = {"seconds": 0.1}
        self.during_load: Callable[[], None] = lambda: None
        self.may_resume = threading.Event()
        self.may_resume.set()
        self.is_asked_to_resume = False
        self.generating = asyncio.Event()
        self.generating.set()
        self.may_end = asyncio.Event()

    @property
    def salts(self) -> list[str]:
        return [one.salt for one in self.sent]

    async def _deltas(self) -> AsyncIterator[EngineDelta]:
        for one in self.script or ():
            if isinstance(one, EngineDelta):
                yield one
            else:
                one()
        while self.script is None:
            await self.generating.wait()
            yield EngineDelta([5], [-0.5], None, 0, ())
            await asyncio.sleep(0)

    async def _call(self, name: str) -> None:
        if name in self.failures:
            raise self.failures[name]
        self.called.append(name)

    async def pause(self, *_: object, **__: object) -> None:
        await self._call("pause")
        self.generating.clear()

    async def resume(self) -> None:
        self.is_asked_to_resume = True
        while not self.may_resume.is_set():
            await asyncio.sleep(0.001)
        await self._call("resume")
        self.generating.set()

    async def close(self) -> None:
        self.called.append("close")

    async def check_alive(self, _timeout_s: float) -> None:
        await self._call("liveness")

    async def call_workers(self, method: str, *_: object, timeout_s: float) -> list[object]:
        if method == "sluice_check_alive":
            await self._call("liveness")
            return [0]
        if method != "sluice_apply":
            return [{}]
        await self._call("load")
        self.during_load()
        await _turns()
        return [self.applied]


class _VllmClient(_Client):
    """Holds `held` of each sample, until asked for, where tokens need not come one by one."""

    held: tuple[int, ...] = ()

    def generate(
        self,
        name: str,
        prompt: Sequence[int],
        salt: str,
        choice: SamplingChoice,
        priority: int,
        *,
        images: None,
        count_known: Callable[[], int] | None,
    ) -> AsyncIterator[EngineDelta]:
        self.sent.append(_Sent(name, list(prompt), salt, choice, priority))
        return (
            self._deltas()
            if count_known is None or not self.held
            else self._at_the_end(count_known)
        )

    async def _at_the_end(self, count_known: Callable[[], int]) -> AsyncIterator[EngineDelta]:
        await self.may_end.wait()
        rest = self.held[count_known() :]
        yield EngineDelta(rest, [-0.5] * len(rest), "stop", 0)

    def so_far(self, _name: str, num_known: int) -> EngineDelta | None:
        rest = self.held[num_known:]
        return EngineDelta(rest, [-0.5] * len(rest), None, 0) if rest else None

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def forget_encoded_images(self) -> None:
        await self._call("forget")

    async def tag_version(self, _: str) -> None:
        await self._call("tag")


class _SglangClient(_Client):
    def generate(
        self,
        name: str,
        prompt: Sequence[int],
        salt: str,
        choice: SamplingChoice,
        priority: int,
        *,
        every_token: bool,
        images: None,
    ) -> AsyncIterator[EngineDelta]:
        self.one_by_one.append(every_token)
        self.sent.append(_Sent(name, list(prompt), salt, choice, priority))
        return self._deltas()


async def _turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class _Vendor:
    """An engine, and its core that serves version 1."""

    def __init__(self, name: str, *, sleeps: bool = False) -> None:
        self.name = name
        self.core: VendorCore
        self.engine: VllmEngine | SglangEngine
        self.client: _Client
        if name == "vllm":
            client: Any = _VllmClient()
            self.core = VllmCore(client, _LAYOUT, VllmSettings("model", sleeps=sleeps))
            self.engine = VllmEngine(VllmSettings("model"))
        else:
            client = _SglangClient()
            self.core = SglangCore(client, _LAYOUT, SglangSettings("model"))
            self.engine = SglangEngine(SglangSettings("model"))
        self.client = client
        self.core.version, self.core.digest = 1, "one"
        self.core.workers.staged = (2, "two")

    def fail(self, call: str, error: EngineError) -> None:
        """Make a call of the client fail; a load fails half-way."""
        if call == "load":
            self.client.applied = _HALF_WAY
        else:
            self.client.failures[call] = error

    def begin(
        self,
        tasks: asyncio.TaskGroup,
        wanted: GenerationRequest | None = None,
        *,
        number: int = 0,
        pace: FlushPolicy = _EVERY_TOKEN,
    ) -> tuple[ChunkStream, asyncio.Task[None]]:
        wanted = wanted or request(max_tokens=40)
        stream = ChunkStream("Vendor engine", len(wanted.sample_indexes))
        run = self.core.new_run(number, wanted, pace, stream)
        return stream, tasks.create_task(self.core.run(run))

    async def cancel(self, stream: ChunkStream, running: asyncio.Task[None]) -> None:
        (run,) = (one for one in self.core._runs if one.stream is stream)
        await self.core.cancel(run)
        await asyncio.wait([running])

    async def whole(self, wanted: GenerationRequest, pace: FlushPolicy = _WHOLE) -> list[Any]:
        """Sample to the end; return the chunks as tokens, version and finish reason."""
        chunks: list[Any] = []
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            stream, _ = self.begin(tasks, wanted, number=7, pace=pace)
            while stream.open_samples:
                chunks += await stream.next()
        return [(one.token_ids.tolist(), one.version, one.finish_reason) for one in chunks]


@pytest.fixture(params=["vllm", "sglang"])
async def vendor(request: pytest.FixtureRequest) -> AsyncIterator[_Vendor]:
    async with asyncio.timeout(60):
        yield _Vendor(request.param)


@pytest.fixture
async def vllm() -> _Vendor:
    return _Vendor("vllm")


@pytest.fixture
async def sglang() -> _Vendor:
    return _Vendor("sglang")


async def _rest(stream: ChunkStream) -> set[int]:
    """Return the versions that sampled what came, until the stream fails."""
    versions: set[int] = set()
    while True:
        try:
            versions |= {chunk.version for chunk in await stream.next()}
        except EngineError:
            return versions


async def _broken_by_swap(vendor: _Vendor) -> str:
    """Check that a swap breaks the engine; return the error's text."""
    async with asyncio.TaskGroup() as tasks:
        stream, running = vendor.begin(tasks)
        await _turns()
        with pytest.raises(EngineError) as failed:
            await vendor.core.swap(2, "two")
        assert str(vendor.core.broken) == str(failed.value)
        await asyncio.wait([running])
        assert await _rest(stream) == {1}
        sampled = vendor.core.generated_tokens
        late, _ = vendor.begin(tasks, number=1)
        await _rest(late)
        for version, digest in ((2, "two"), (3, "three")):
            with pytest.raises(EngineError):
                await vendor.core.swap(version, digest)
    assert vendor.core.generated_tokens == sampled > 0
    assert "resume" not in vendor.client.called, "a mixture of versions samples nothing"
    assert len(vendor.client.sent) == 1
    return str(failed.value)


@pytest.mark.parametrize("call", ["load", "resume"])
async def test_after_a_swap_that_failed_half_way_nothing_is_sampled_and_what_runs_fails(
    vendor: _Vendor, call: str
) -> None:
    vendor.fail(call, _NO_ANSWER)
    assert "restart the replica" in await _broken_by_swap(vendor)


@pytest.mark.parametrize("call", ["tag", "forget"])
async def test_weights_without_a_name_or_with_old_images_sample_nothing(
    vllm: _Vendor, call: str
) -> None:
    vllm.fail(call, _NO_ANSWER)
    assert await _broken_by_swap(vllm) == str(_NO_ANSWER)


async def test_encoded_images_are_forgotten_before_the_new_weights_have_a_name(
    vllm: _Vendor,
) -> None:
    await vllm.core.swap(2, "two")
    assert vllm.client.called == ["pause", "load", "forget", "tag", "resume"]


async def test_when_no_worker_took_the_new_weights_the_old_ones_serve(vllm: _Vendor) -> None:
    vllm.client.applied = _NOT_STAGED
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        stream, running = vllm.begin(tasks)
        with pytest.raises(WeightSyncError):
            await vllm.core.swap(2, "two")
        assert "forget" not in vllm.client.called, "no worker has lost what it encoded"
        assert vllm.core.broken is None
        sampled = vllm.core.generated_tokens
        await _turns()
        assert vllm.core.generated_tokens > sampled
        await vllm.cancel(stream, running)
    assert {chunk.version for chunk in await stream.next()} == {1}


async def test_a_sample_that_comes_during_a_swap_is_sent_after_it_as_one_of_the_new_version(
    vendor: _Vendor,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        begun: list[tuple[ChunkStream, asyncio.Task[None]]] = []
        old, running = vendor.begin(tasks)
        await _turns()
        vendor.client.during_load = lambda: begun.append(vendor.begin(tasks, number=1))
        await vendor.core.swap(2, "two")
        await _turns()
        before, after = vendor.client.salts
        assert before != after, "it would find a cache of the old weights"
        await vendor.cancel(*begun[0])
        await vendor.cancel(old, running)
    assert {chunk.version for chunk in await begun[0][0].next()} == {2}


async def test_what_vllm_holds_when_weights_change_is_of_the_old_version(vllm: _Vendor) -> None:
    client: Any = vllm.client
    client.held = (5, 6)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        stream, _ = vllm.begin(tasks, pace=_WHOLE)
        await _turns()
        await vllm.core.swap(2, "two")
        client.held = (5, 6, 7)
        client.may_end.set()
        chunks = await stream.next()
    assert [(one.token_ids.tolist(), one.version) for one in chunks] == [([5, 6], 1), ([7], 2)]
    assert vllm.core.generated_tokens == 3


def _vllm_core(vendor: _Vendor) -> VllmCore:
    assert isinstance(vendor.core, VllmCore)
    return vendor.core


async def test_a_sample_that_cannot_be_delivered_at_the_end_keeps_no_other_and_no_process(
    vllm: _Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def so_far(name: str, known: int) -> None:
        raise ValueError(f"{name} has fewer logprobs than tokens")

    client: Any = vllm.client
    client.held = (5, 6)
    monkeypatch.setattr(vendor_engine, "_CLOSE_TIMEOUT_S", 0.01)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        _, damaged = vllm.begin(tasks, pace=_WHOLE)
        stream, _ = vllm.begin(tasks, number=1)
        await _turns()
        monkeypatch.setattr(client, "so_far", so_far)
        await vllm.core.close()
        assert [chunk.finish_reason for chunk in await stream.next()][-1] is FinishReason.ABORTED
        damaged.cancel()
    assert client.called == ["close"]


async def test_an_engine_that_sleeps_keeps_its_samples_until_it_wakes() -> None:
    vllm = _Vendor("vllm", sleeps=True)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        stream, running = vllm.begin(tasks)
        await _turns()
        assert await _vllm_core(vllm).sleep()
        assert await _vllm_core(vllm).sleep()
        assert vllm.client.called == ["pause", "sleep"]
        sampled = vllm.core.generated_tokens
        await _turns()
        assert vllm.core.generated_tokens == sampled
        await _vllm_core(vllm).wake()
        await _vllm_core(vllm).wake()
        assert vllm.client.called == ["pause", "sleep", "wake", "resume"]
        await _turns()
        assert vllm.core.generated_tokens > sampled
        await vllm.cancel(stream, running)


async def test_samples_that_wait_for_the_end_of_a_sleep_are_no_work() -> None:
    vllm = _Vendor("vllm", sleeps=True)
    thread = LoopThread("Vendor")
    vars(vllm.engine).update(_thread=thread, _core=vllm.core)
    vllm.engine._unfinished.add(ChunkStream("Vendor engine", 2))
    assert vllm.engine.load().slots_busy + vllm.engine.load().queued == 2
    await thread.call(_vllm_core(vllm).sleep(), "falling asleep")
    assert vllm.engine.load().slots_busy == vllm.engine.load().queued == 0
    await thread.call(_vllm_core(vllm).wake(), "waking")
    assert vllm.engine.load().slots_busy + vllm.engine.load().queued == 2
    await thread.stop()


async def test_an_engine_that_sleeps_swaps_no_weights() -> None:
    vllm = _Vendor("vllm", sleeps=True)
    await _vllm_core(vllm).sleep()
    with pytest.raises(NotReadyError, match="sleeps while the trainer trains"):
        await vllm.core.swap(2, "two")
    assert vllm.client.called == ["pause", "sleep"]


@pytest.mark.parametrize("phase", ["joining epoch 1", "staging version 2"])
async def test_an_epoch_that_is_aborted_while_an_engine_wakes_is_not_joined(phase: str) -> None:
    vllm = _Vendor("vllm", sleeps=True)
    thread = LoopThread("Vendor")
    vars(vllm.engine).update(_thread=thread, _core=vllm.core)
    vllm.core._epoch = 1
    await thread.call(_vllm_core(vllm).sleep(), "falling asleep")
    vllm.client.may_resume.clear()
    spec: Any = SimpleNamespace(epoch=1)
    wanted = vllm.engine.join_group(spec) if "joining" in phase else vllm.engine.stage(1, 2)

    async def call() -> None:
        with pytest.raises(WeightSyncError, match=f"{phase}: .*epoch 1 is not joined here"):
            await wanted

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(call())
        while not vllm.client.is_asked_to_resume:
            await asyncio.sleep(0.001)
        await vllm.engine.abort_update(1, "a test")
        vllm.client.may_resume.set()
    await thread.stop()


async def test_an_engine_with_devices_of_its_own_does_not_sleep(vllm: _Vendor) -> None:
    assert not await _vllm_core(vllm).sleep()
    await _vllm_core(vllm).wake()
    assert vllm.client.called == []


async def test_an_engine_whose_memory_does_not_come_back_is_broken() -> None:
    vllm = _Vendor("vllm", sleeps=True)
    await _vllm_core(vllm).sleep()
    vllm.fail("wake", _NO_ANSWER)
    with pytest.raises(EngineError, match="the trainer left too little memory"):
        await _vllm_core(vllm).wake()
    assert vllm.core.broken is not None


async def test_an_engine_that_may_be_half_asleep_wakes_before_the_next_weights() -> None:
    vllm = _Vendor("vllm", sleeps=True)
    vllm.fail("sleep", _NO_ANSWER)
    with pytest.raises(EngineError, match="no answer"):
        await _vllm_core(vllm).sleep()
    await _vllm_core(vllm).wake()
    assert vllm.client.called == ["pause", "wake", "resume"]


async def test_samples_that_follow_a_first_one_into_a_swap_wait_for_its_end(
    sglang: _Vendor,
) -> None:
    sglang.client.generating.clear()
    # The first sample's token was under way.
    sglang.client.during_load = sglang.client.generating.set
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        stream, running = sglang.begin(tasks, request(max_tokens=40, samples=3))
        await _turns()
        await sglang.core.swap(2, "two")
        await _turns()
        assert sglang.client.salts == ["0", "1", "1"]
        await sglang.cancel(stream, running)


async def test_an_engine_that_could_not_be_paused_for_a_swap_samples_and_swaps_later(
    vendor: _Vendor,
) -> None:
    vendor.fail("pause", _NO_ANSWER)
    with pytest.raises(EngineError, match="no answer"):
        await vendor.core.swap(2, "two")
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        stream, running = vendor.begin(tasks)
        assert await stream.next()
        vendor.client.failures.clear()
        await vendor.core.swap(2, "two")
        assert vendor.client.generating.is_set()
        await vendor.cancel(stream, running)


async def _swap_that_does_not_end(vendor: _Vendor) -> LoopThread:
    """Begin a swap in the engine's thread that ends with `may_resume`; its commit was cancelled."""
    thread, parts = LoopThread("Vendor"), vars(vendor.engine)
    parts |= {"_thread": thread, "_core": vendor.core}
    vendor.client.may_resume.clear()
    thread.begin(vendor.core.swap(2, "two"))
    while not vendor.client.is_asked_to_resume:
        await asyncio.sleep(0.001)
    return thread


async def test_a_repeated_commit_does_not_succeed_before_the_engine_samples(
    vendor: _Vendor,
) -> None:
    thread = await _swap_that_does_not_end(vendor)
    async with asyncio.TaskGroup() as tasks:
        again = tasks.create_task(vendor.engine.commit(1, 2, "two"))
        await asyncio.wait([again], timeout=0.05)
        assert not again.done()
        vendor.client.may_resume.set()
    assert (again.result(), vendor.client.generating.is_set()) == (0, True)
    await thread.stop()


async def test_a_swap_that_takes_long_is_no_engine_that_hangs(vendor: _Vendor) -> None:
    thread = await _swap_that_does_not_end(vendor)
    async with asyncio.TaskGroup() as tasks:
        checking = tasks.create_task(vendor.engine.check_alive())
        await asyncio.wait([checking], timeout=0.05)
        assert "liveness" not in vendor.client.called
        vendor.client.may_resume.set()
    assert vendor.client.called[-2:] == ["resume", "liveness"]
    await thread.stop()


async def test_a_repeated_commit_fails_where_the_engine_does_not_resume(vendor: _Vendor) -> None:
    thread = await _swap_that_does_not_end(vendor)
    vendor.fail("resume", _NO_ANSWER)

    async def commit() -> None:
        with pytest.raises(EngineError, match="after version 2 came; restart the replica"):
            await vendor.engine.commit(1, 2, "two")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(commit())
        await asyncio.sleep(0)
        vendor.client.may_resume.set()
    await thread.stop()


async def test_what_a_request_fails_of_reaches_its_caller(
    vendor: _Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*_: object) -> None:
        raise AttributeError("no logprobs_processor")

    monkeypatch.setattr(vendor.core, "so_far", changed)
    pace = FlushPolicy(every_token=False, interval_s=0.01)
    with pytest.raises(ExceptionGroup) as failed:
        await vendor.whole(request(max_tokens=40), pace)
    (error,) = failed.value.exceptions
    assert isinstance(error, EngineError)
    assert "no logprobs_processor" in str(error)


async def test_every_sample_has_its_requests_priority(vendor: _Vendor) -> None:
    vendor.client.script = [EngineDelta([5], [-0.5], "stop", 2)]
    await vendor.whole(replace(request(samples=2), priority=-3))
    assert [one.priority for one in vendor.client.sent] == [-3, -3]


async def test_sglang_sends_single_tokens_only_of_streams_and_where_a_string_may_end_a_sample(
    sglang: _Vendor,
) -> None:
    sglang.client.script = [EngineDelta([5], [-0.5], "stop", 2)]
    wanted = request()
    stopped = replace(wanted, sampling=replace(wanted.sampling, stop=("x",)), decode=lambda _: "")
    await sglang.whole(wanted)
    await sglang.whole(wanted, _EVERY_TOKEN)
    await sglang.whole(stopped)
    assert sglang.client.one_by_one == [False, True, True]


async def test_no_name_of_a_sample_is_the_beginning_of_another(sglang: _Vendor) -> None:
    sglang.client.script = [EngineDelta([4], [-0.5], None, 2), EngineDelta([5], [-0.5], "stop", 2)]
    await sglang.whole(request(samples=12))
    names = [one.name for one in sglang.client.sent]
    assert len(set(names)) == 12
    starts = [a for a in names for b in names if a != b and b.startswith(a)]
    assert starts == [], "SGLang would abort both"


async def test_vllms_seeds_differ_by_seed_sample_and_first_token(vllm: _Vendor) -> None:
    vllm.client.script = [EngineDelta([5], [-0.5], "stop", 2)]
    partial = partial_sample(0, [8])
    for wanted in (request(samples=3), request(seed=4), request(partials=(partial,))):
        await vllm.whole(wanted)
    seeds = {one.choice.seed for one in vllm.client.sent}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_a_sample_that_sglang_continues_gets_its_own_random_numbers(sglang: _Vendor) -> None:
    sglang.client.script = [EngineDelta([5], [-0.5], "stop", 2)]
    partial = partial_sample(1, [8, 9])
    wanted = request([3, 4], samples=2, max_tokens=5, partials=(partial,))
    await sglang.whole(wanted)
    by_prompt = {tuple(one.prompt): one.choice for one in sglang.client.sent}
    assert by_prompt[3, 4].seed == stream_seed(wanted.sampling.seed, 0, 2)
    assert by_prompt[3, 4, 8, 9].seed == stream_seed(wanted.sampling.seed, 1, 2)


def _over_a_swap(vendor: _Vendor, spans: tuple[Any, ...]) -> None:
    """Sample token 4 with version 1, then 5 and 6 with version 2; `spans` are its account."""

    def swapped() -> None:
        vendor.core.version = 2

    vendor.client.script = [
        EngineDelta([4], [-2.0], None, 2),
        swapped,
        EngineDelta([5], [-2.5], None, 2),
        EngineDelta([6], [-3.0], "length", 2, spans),
    ]


async def test_the_vendors_account_of_versions_corrects_what_was_not_handed_on(
    vendor: _Vendor,
) -> None:
    _over_a_swap(vendor, (("1", 0, 2), ("2", 2, 3)))
    assert await vendor.whole(request()) == [([4, 5], 1, None), ([6], 2, FinishReason.LENGTH)]


async def test_tokens_handed_on_as_another_version_are_an_error(vendor: _Vendor) -> None:
    _over_a_swap(vendor, (("1", 0, 2), ("2", 2, 3)))
    with pytest.raises(ExceptionGroup) as failed:
        await vendor.whole(request(), _EVERY_TOKEN)
    assert failed.group_contains(EngineError, match="handed on as version 2")


async def test_an_account_of_versions_of_other_tokens_is_an_error(vendor: _Vendor) -> None:
    _over_a_swap(vendor, (("1", 0, 1),))
    with pytest.raises(ExceptionGroup) as failed:
        await vendor.whole(request())
    assert failed.group_contains(EngineError, match="spans of 1 tokens for a sample of 3")
