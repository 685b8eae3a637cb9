"""What the contract does not reach: the vendor's caches, processes and refusals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from sluice.errors import ConfigError, EngineError, InvalidRequestError
from tests.engine_vendor.vendor import (
    ON_GPU,
    VENDOR,
    VLLM,
    VendorInsight,
    make_engine,
    worker_processes,
)
from tests.support.causal_lms import expected_logprobs, request
from tests.support.engine_contract_world import (
    PLAIN,
    TIED,
    ContractWorld,
    chunks_of,
    contract_world,
    generate,
    save_contract_config,
    until,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # the vendor's own
    pytest.mark.timeout(900),
]
_ROOT = Path(__file__).parents[2]
_STARTED = "the engine has started"
_OWNER = f"""
import asyncio, sys
from pathlib import Path
from tests.engine_vendor.vendor import make_engine

async def main():
    engine = make_engine(Path(sys.argv[1]), slots=4, max_model_len=128)
    await engine.start()
    print("{_STARTED}", flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_contract_config(TIED, tmp_path_factory.mktemp(TIED))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(folder: Path) -> AsyncIterator[ContractWorld]:
    make = partial(make_engine, max_model_len=512, recompute_kv=False)
    async with contract_world(folder, make, VendorInsight) as running:
        yield running


async def test_the_cache_of_the_old_weights_serves_no_sample_of_the_new_ones(
    world: ContractWorld,
) -> None:
    prompt = np.random.default_rng(0).integers(8, 100, 200).tolist()
    wanted = request(prompt, samples=2, max_tokens=10)
    for model in (world.first, world.second, world.first):
        await world.serve(model)
        before = world.engine.load()
        for tokens, logprobs in (await generate(world.engine, wanted)).values():
            exact = expected_logprobs(model, prompt, tokens, PLAIN)
            np.testing.assert_allclose(logprobs, exact, atol=1e-4)
        # It is there to be used: the two samples share it.
        after = world.engine.load()
        reused = after.reused_tokens - before.reused_tokens
        assert len(prompt) <= after.prompt_tokens - before.prompt_tokens - reused < 2 * len(prompt)


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
    exact = np.array(expected_logprobs(world.second, (5, 9, 23, 54), tokens, PLAIN))
    start = chunks[0].token_ids.size
    assert np.abs(exact[start:] - chunks[1].behavior_logprobs).max() > 1e-2


@pytest.mark.skipif(not ON_GPU or VENDOR != VLLM, reason="only vLLM sleeps, and only on a GPU")
async def test_vllm_gives_its_memory_back_and_wakes_for_new_weights_where_samples_run(
    folder: Path,
) -> None:
    make = partial(make_engine, max_model_len=512, sleeps=True)
    async with contract_world(folder, make, VendorInsight) as world:
        await world.serve(world.first)
        async with asyncio.TaskGroup() as tasks:
            before = world.engine.load().generated_tokens
            running = tasks.create_task(chunks_of(world.engine, request(max_tokens=400)))
            await until(lambda: world.engine.load().generated_tokens > before or running.done())
            free, whole = torch.cuda.mem_get_info()
            assert await world.engine.sleep()
            assert torch.cuda.mem_get_info()[0] - free > 0.2 * whole  # it had 0.3
            await world.serve(world.second)
        assert sum(chunk.token_ids.size for chunk in running.result()) == 400
        for prompt in ([5], list(range(8, 48))):
            wanted = request(prompt, max_tokens=20)
            ((tokens, logprobs),) = (await generate(world.engine, wanted)).values()
            exact = expected_logprobs(world.second, prompt, tokens, PLAIN)
            np.testing.assert_allclose(logprobs, exact, atol=1e-4)


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
    assert 250 <= after.reused_tokens - before.reused_tokens <= 300  # vLLM: whole blocks of 32


async def test_a_model_of_text_refuses_images(world: ContractWorld) -> None:
    await world.serve(world.first)
    with pytest.raises(InvalidRequestError, match="1 images"):
        await generate(world.engine, replace(request(), images=(b"png",)))


async def test_the_vendors_unknown_arguments_are_refused_by_name(folder: Path) -> None:
    engine = make_engine(folder, no_such_argument=1)
    with pytest.raises(ConfigError, match="no_such_argument"):
        await engine.start()


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _descendants(process: int) -> list[int]:
    children = [
        int(one)
        for path in Path(f"/proc/{process}/task").glob("*/children")
        for one in path.read_text().split()
    ]
    return [*children, *(one for child in children for one in _descendants(child))]


def _is_starting_engine(process: int) -> bool:
    """A spawned one that imports torch; vLLM has a look at the model in a short-lived other one."""
    at = Path(f"/proc/{process}")
    try:
        return (
            "spawn_main" in (at / "cmdline").read_text() and "libtorch" in (at / "maps").read_text()
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def _owner(folder: Path, at: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that starts an engine, and ends with the block by a signal that it cannot see."""
    program = at / "owner.py"
    program.write_text(_OWNER)
    paths = os.pathsep.join((str(_ROOT), os.environ.get("PYTHONPATH", "")))
    with subprocess.Popen(
        [sys.executable, str(program), str(folder)],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        try:
            yield owner
        finally:
            owner.kill()


async def test_the_vendors_processes_end_with_a_killed_owner(folder: Path, tmp_path: Path) -> None:
    with _owner(folder, tmp_path) as owner:
        assert owner.stdout is not None
        line = ""
        while line.strip() != _STARTED:  # vendors say things there too
            line = await asyncio.to_thread(owner.stdout.readline)
            assert line, "the owner ended"
        processes = _descendants(owner.pid)
        assert processes
    await until(lambda: not any(_is_running(one) for one in processes))


async def test_the_vendors_processes_end_with_an_owner_that_is_killed_while_they_start(
    folder: Path, tmp_path: Path
) -> None:
    with _owner(folder, tmp_path) as owner:
        begun: list[int] = []
        while not begun:
            await asyncio.sleep(0.01)
            assert owner.poll() is None, "the owner ended"
            begun = [one for one in _descendants(owner.pid) if _is_starting_engine(one)]
    await until(lambda: not any(_is_running(one) for one in begun))


async def test_a_killed_worker_fails_what_runs_and_all_that_follows(world: ContractWorld) -> None:
    await world.serve(world.first)
    processes = await worker_processes(world.engine)
    stream = world.engine.generate(request(samples=3, max_tokens=400), every_token=True)
    async with aclosing(stream) as chunks:
        await anext(chunks)
        for one in processes:
            os.kill(one, signal.SIGKILL)
        with pytest.raises(EngineError):
            async for _ in chunks:
                pass
    for call in (world.engine.check_alive(), generate(world.engine, request())):
        with pytest.raises(EngineError):
            await call
    with pytest.raises(EngineError):
        world.engine.load()  # heartbeats end with it, and so does the replica's process


async def test_a_full_cache_preempts_and_loses_nothing(folder: Path) -> None:
    few: dict[str, object] = {"max_total_tokens": 1024}
    if VENDOR == VLLM:
        few = {"num_gpu_blocks_override": 32, "block_size": 32}
    # Without shared prompts, each sample needs memory of its own.
    make = partial(make_engine, max_model_len=512, shares_prompts=False, **few)
    async with contract_world(folder, make, VendorInsight) as world:
        await world.serve(world.first)
        ended: list[int] = []

        async def sampled(number: int) -> None:
            prompt = [8 + number, 9, 10]
            samples = await generate(world.engine, request(prompt, max_tokens=300))
            ended.append(number)
            ((tokens, logprobs),) = samples.values()
            assert len(tokens) == 300
            exact = expected_logprobs(world.first, prompt, tokens, PLAIN)
            np.testing.assert_allclose(logprobs, exact, atol=1e-4)

        # The cache holds three of the eight at their ends, and all of them at their beginnings.
        assert 0 < world.engine.load().kv_tokens <= 1024
        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(sampled(number))
        assert sorted(ended) == list(range(8))
        if VENDOR == VLLM:  # the youngest: SGLang takes back the one with the shortest answer
            assert ended[:2] == [0, 1]
            assert ended.index(7) > 4
