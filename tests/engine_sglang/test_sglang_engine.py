"""What of SGLang the contract does not reach: its caches, its processes, its refusals."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import zmq

from services.rollout.engines.embedded.engine import EmbeddedEngine, EmbeddedEngineSettings
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.sglang.settings import SglangSettings
from sluice.errors import ConfigError, EngineError, InvalidRequestError
from sluice.types import SamplingParams
from tests.support.causal_lms import expected_logprobs, request, weights_of
from tests.support.engine_contract_world import (
    TIED,
    ContractWorld,
    Insight,
    chunks_of,
    contract_world,
    generate,
    save_contract_config,
    until,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # SGLang's own
    pytest.mark.timeout(900),
]
_ROOT = Path(__file__).parents[2]
_PLAIN = SamplingParams(1.0, 1.0, -1, 1, 0)
_OWNER = """
import asyncio, sys
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.sglang.settings import SglangSettings

async def main():
    engine = SglangEngine(SglangSettings(sys.argv[1], slots=4, max_model_len=128))
    await engine.start()
    print("processes", *engine.processes, flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


def _settings(folder: Path, **arguments: object) -> SglangSettings:
    return SglangSettings(str(folder), slots=16, max_model_len=512, arguments=arguments)


def _blind(_: SglangEngine) -> Insight | None:
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_contract_config(TIED, tmp_path_factory.mktemp(TIED))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(folder: Path) -> AsyncIterator[ContractWorld]:
    async with contract_world(folder, lambda at: SglangEngine(_settings(at)), _blind) as running:
        yield running


async def test_the_cache_of_the_old_weights_serves_no_sample_of_the_new_ones(
    world: ContractWorld,
) -> None:
    prompt = np.random.default_rng(0).integers(8, 100, 200).tolist()
    wanted = request(prompt, samples=2, max_tokens=10)
    for model in (world.first, world.second, world.first):
        await world.serve(model)
        before = world.engine.prefilled_tokens
        for tokens, logprobs in (await generate(world.engine, wanted)).values():
            exact = expected_logprobs(model, prompt, tokens, _PLAIN)
            np.testing.assert_allclose(logprobs, exact, atol=1e-4)
        # It is there to be used: the two samples share it.
        assert len(prompt) <= world.engine.prefilled_tokens - before < 2 * len(prompt)


async def test_without_recomputation_running_samples_keep_their_cache(
    world: ContractWorld,
) -> None:
    await world.serve(world.first)
    digest = await world.trainer.stage(world.second)
    async with asyncio.TaskGroup() as tasks:
        before = world.engine.load().generated_tokens
        running = tasks.create_task(chunks_of(world.engine, request(max_tokens=400)))
        await until(lambda: world.engine.load().generated_tokens > before + 20 or running.done())
        await world.engine.commit(world.trainer.epoch, world.trainer.version, digest)
        world.serving = world.second
    chunks = running.result()
    assert [chunk.version for chunk in chunks] == [world.trainer.version - 1, world.trainer.version]
    tokens = [int(token) for chunk in chunks for token in chunk.token_ids]
    exact = np.array(expected_logprobs(world.second, (5, 9, 23, 54), tokens, _PLAIN))
    start = chunks[0].token_ids.size
    assert np.abs(exact[start:] - chunks[1].behavior_logprobs).max() > 1e-2


async def test_the_same_seed_gives_the_tokens_of_the_embedded_engine(
    world: ContractWorld, folder: Path
) -> None:
    await world.serve(world.first)
    wanted = request(samples=4, max_tokens=40, temperature=0.8, top_p=0.9, top_k=30)
    embedded = EmbeddedEngine(EmbeddedEngineSettings(str(folder), slots=4, max_model_len=64))
    await embedded.start()
    await embedded.load_weights(weights_of(world.first, embedded), 1, "one")
    expected = await generate(embedded, wanted)
    await embedded.stop()
    found = await generate(world.engine, wanted)
    assert {i: tokens for i, (tokens, _) in found.items()} == {
        i: tokens for i, (tokens, _) in expected.items()
    }


async def test_the_best_token_at_a_temperature_is_certain(world: ContractWorld) -> None:
    await world.serve(world.first)
    wanted = request(max_tokens=8, temperature=0.7, top_k=1)
    greedy = request(max_tokens=8, temperature=0.0)
    tokens, logprobs = (await generate(world.engine, wanted))[0]
    assert tokens == (await generate(world.engine, greedy))[0][0]
    np.testing.assert_allclose(logprobs, 0.0, atol=1e-6)


async def test_images_are_refused(world: ContractWorld) -> None:
    await world.serve(world.first)
    with pytest.raises(InvalidRequestError, match="1 images"):
        await generate(world.engine, replace(request(), images=(b"png",)))


async def test_sglang_names_the_arguments_it_does_not_know(folder: Path) -> None:
    engine = SglangEngine(_settings(folder, no_such_argument=1))
    with pytest.raises(ConfigError, match="no_such_argument"):
        await engine.start()


async def test_what_sglang_refuses_is_reported_and_leaves_nothing(folder: Path) -> None:
    engine, opened = (
        SglangEngine(_settings(folder, attention_backend="no_such_backend")),
        _open_sockets(),
    )
    with pytest.raises((ConfigError, EngineError), match=r"SGLang 0\.5\.23 did not start"):
        await engine.start()
    assert _open_sockets() <= opened


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_sglangs_processes_end_with_a_killed_owner(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "owner.py"
    program.write_text(_OWNER)
    paths = os.pathsep.join((str(_ROOT), os.environ.get("PYTHONPATH", "")))
    with subprocess.Popen(
        [sys.executable, str(program), str(folder)],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        line = ""
        while not line.startswith("processes "):  # SGLang says things there too
            line = await asyncio.to_thread(owner.stdout.readline)
            assert line, "the owner ended"
        processes = [int(one) for one in line.split()[1:]]
        assert processes
        assert owner.pid not in processes
        assert all(_is_running(one) for one in processes)
        owner.kill()
    await until(lambda: not any(_is_running(one) for one in processes))


async def test_a_killed_scheduler_fails_what_runs_and_all_that_follows(
    world: ContractWorld,
) -> None:
    await world.serve(world.first)
    stream = world.engine.generate(request(samples=3, max_tokens=400), every_token=True)
    async with aclosing(stream) as chunks:
        await anext(chunks)
        for one in world.engine.processes:
            os.kill(one, signal.SIGKILL)
        with pytest.raises(EngineError):
            async for _ in chunks:
                pass
    for call in (world.engine.probe(), generate(world.engine, request())):
        with pytest.raises(EngineError):
            await call
    with pytest.raises(EngineError):
        world.engine.load()  # heartbeats end with it, and so does the replica's process


async def test_a_stopped_engine_leaves_no_open_socket_to_the_garbage_collector(
    folder: Path,
) -> None:
    engine, before = SglangEngine(_settings(folder)), _open_sockets()
    await engine.start()
    opened = _open_sockets() - before
    await engine.stop()
    assert len(opened) >= 2
    assert opened & _open_sockets() == set()


def _open_sockets() -> set[int]:
    found = [one for one in gc.get_objects() if issubclass(type(one), zmq.Socket)]
    return {one.underlying for one in found if not one.closed}


async def test_a_later_turn_finds_its_history_in_the_cache_and_is_counted(
    world: ContractWorld,
) -> None:
    await world.serve(world.first)
    history = np.random.default_rng(1).integers(8, 100, 300).tolist()
    await generate(world.engine, request(history, max_tokens=10))
    before = world.engine.load()
    await generate(world.engine, request([*history, *range(20, 40)], max_tokens=10))
    after = world.engine.load()
    assert after.prompt_tokens - before.prompt_tokens == 320
    assert 250 <= after.reused_tokens - before.reused_tokens <= 300


async def test_a_full_cache_preempts_and_loses_nothing(folder: Path) -> None:
    def engine(at: Path) -> SglangEngine:
        return SglangEngine(_settings(at, max_total_tokens=1024))

    async with contract_world(folder, engine, _blind) as world:
        await world.serve(world.first)
        assert 0 < world.engine.load().kv_tokens <= 1024

        async def sampled(number: int) -> None:
            prompt = [8 + number, 9, 10]
            ((tokens, logprobs),) = (
                await generate(world.engine, request(prompt, max_tokens=300))
            ).values()
            assert len(tokens) == 300
            exact = expected_logprobs(world.first, prompt, tokens, _PLAIN)
            np.testing.assert_allclose(logprobs, exact, atol=1e-4)

        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(sampled(number))
