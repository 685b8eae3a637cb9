"""Images: prompts that the trainer computes with, token by token and patch by patch."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from transformers import PreTrainedModel

from services.rollout.engines.protocol import GenerationRequest, SampleChunk
from sluice.device.cpu import CpuDevice
from sluice.errors import InvalidRequestError
from sluice.vision.image_prompts import load_image_prompts
from sluice.weights.sender import WeightSender
from tests.engine_vendor.vendor import (
    ROUNDING,
    SGLANG,
    VENDOR,
    VendorsEngine,
    make_engine,
)
from tests.support.causal_lms import request
from tests.support.engine_contract_weights import check_same
from tests.support.engine_contract_world import Trainer, chunks_of, generate, until
from tests.support.tiny_vision import (
    IMAGE,
    PATCH,
    VISION_END,
    VISION_START,
    FullForward,
    image_file,
    save_model,
    scramble,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # the vendor's own
    pytest.mark.timeout(900),
]
_WIDTH = 128
"""Two heads of 64, which vendors' attention takes on a CPU."""
_FAMILIES = ("qwen2_5_vl",) if VENDOR == SGLANG else ("qwen2_5_vl", "qwen2_vl", "qwen3_vl")
"""SGLang's CPU build pads layers of a tiny Qwen3-VL, and its loader cannot read the weights."""
_TAIL, _LONG = 64, 160
"""Tokens of a prompt after its images, so that these are in full blocks; of a long response."""


@pytest.fixture(scope="module", params=_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pictures(family: str) -> tuple[bytes, bytes]:
    """Of whole merged patches, which are not resized."""
    side = 4 * PATCH[family]
    return image_file(1, side, side), image_file(2, 2 * side, side, "JPEG")


@pytest.fixture(scope="module")
def misfits(family: str) -> tuple[bytes, bytes]:
    """One that grows and one that shrinks: vendors would resize them unlike the trainer."""
    side = 3 * PATCH[family] + 2
    return image_file(3, side, side), image_file(4, 300, 190)


@pytest.fixture(scope="module")
def saved(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(family)
    return folder, save_model(family, folder, seed=2, width=_WIDTH)


@asynccontextmanager
async def _running(
    folder: Path,
    *,
    slots: int = 8,
    recompute_kv: bool = True,
    shares_prompts: bool = True,
    serves_model_files: bool = False,
) -> AsyncIterator[tuple[VendorsEngine, Trainer]]:
    engine = make_engine(
        folder,
        slots=slots,
        max_model_len=256,
        recompute_kv=recompute_kv,
        shares_prompts=shares_prompts,
        serves_model_files=serves_model_files,
    )
    sender = WeightSender(device=CpuDevice(), bucket_bytes=1 << 16, timeout_s=30.0)
    await engine.start()
    try:
        yield engine, Trainer(engine, sender)
    finally:
        await engine.stop()
        sender.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    saved: tuple[Path, PreTrainedModel],
) -> AsyncIterator[tuple[VendorsEngine, Trainer]]:
    async with _running(saved[0]) as running:
        yield running


def _wanted(
    folder: Path,
    pictures: Sequence[bytes],
    *,
    samples: int = 2,
    tail: int = 0,
    max_tokens: int = 12,
) -> GenerationRequest:
    reader = load_image_prompts(folder)
    assert reader is not None
    place = [VISION_START, IMAGE, VISION_END, 40]
    prompt = np.array([20, 21, *(place * len(pictures)), 30, *([31] * tail)], np.uint32)
    expanded = reader.expand(prompt, pictures)
    plain = request(expanded.tolist(), samples=samples, max_tokens=max_tokens)
    return replace(plain, images=tuple(pictures))


async def _check(
    engine: VendorsEngine, folder: Path, model: PreTrainedModel, pictures: Sequence[bytes]
) -> None:
    wanted, exact = _wanted(folder, pictures), FullForward(folder, model)
    for tokens, logprobs in (await generate(engine, wanted)).values():
        # Transformers would take an image token for an image.
        end = tokens.index(IMAGE) if IMAGE in tokens else len(tokens)
        assert end > 0
        found = exact.logprobs(wanted.prompt_token_ids.tolist(), tokens[:end], pictures)
        np.testing.assert_allclose(logprobs[:end], found, atol=1e-4)


async def test_logprobs_with_images_are_those_of_the_weights_that_serve(
    saved: tuple[Path, PreTrainedModel],
    world: tuple[VendorsEngine, Trainer],
    pictures: tuple[bytes, bytes],
    misfits: tuple[bytes, bytes],
) -> None:
    (folder, second), (engine, trainer) = saved, world
    other = _other(second)
    for model in (other, second, other):
        await trainer.publish(model)
        for shown in ((), pictures[:1], pictures, misfits):
            await _check(engine, folder, model, shown)


async def test_outputs_after_updates_equal_those_of_an_engine_started_from_a_checkpoint(
    saved: tuple[Path, PreTrainedModel],
    world: tuple[VendorsEngine, Trainer],
    pictures: tuple[bytes, bytes],
) -> None:
    (folder, second), (engine, trainer) = saved, world
    await trainer.publish(second)
    wanted = _wanted(folder, pictures)
    after = await generate(engine, wanted)
    async with _running(folder, serves_model_files=True) as (fresh, _):
        check_same(await generate(fresh, wanted), after, ROUNDING)


async def test_a_prompt_for_other_images_is_refused_and_others_continue(
    saved: tuple[Path, PreTrainedModel],
    world: tuple[VendorsEngine, Trainer],
    pictures: tuple[bytes, bytes],
) -> None:
    (folder, second), (engine, trainer) = saved, world
    await trainer.publish(second)
    wanted = _wanted(folder, pictures)
    with pytest.raises(InvalidRequestError, match=r"1 images(, but 2 runs| take)"):
        await generate(engine, replace(wanted, images=wanted.images[:1]))
    await _check(engine, folder, second, pictures)


async def test_samples_that_wait_for_a_slot_while_weights_come_see_their_images(
    saved: tuple[Path, PreTrainedModel], pictures: tuple[bytes, bytes]
) -> None:
    folder, second = saved
    # With a prefix cache a sample that waits in SGLang may find the old weights' prompt there.
    running = _running(folder, slots=1, recompute_kv=False, shares_prompts=VENDOR != SGLANG)
    async with running as (engine, trainer):
        await trainer.publish(_other(second))
        waiting = _wanted(folder, pictures, samples=8, max_tokens=_LONG)
        chunks = await _publish_meanwhile(engine, trainer, second, waiting)
        exact = FullForward(folder, second)
        _check_new_tokens(chunks, trainer.version, waiting, exact, pictures, of_whole_samples=True)
        await _check(engine, folder, second, pictures)


async def test_samples_of_an_earlier_prompt_continue_when_it_is_recomputed(
    saved: tuple[Path, PreTrainedModel], pictures: tuple[bytes, bytes]
) -> None:
    folder, second = saved
    async with _running(folder) as (engine, trainer):
        await trainer.publish(_other(second))
        await generate(engine, _wanted(folder, pictures, tail=_TAIL, samples=1))
        again = _wanted(folder, pictures, tail=_TAIL, samples=4, max_tokens=_LONG)
        chunks = await _publish_meanwhile(engine, trainer, second, again)
        exact = FullForward(folder, second)
        _check_new_tokens(chunks, trainer.version, again, exact, pictures, of_whole_samples=False)
        await _check(engine, folder, second, pictures)


def _other(model: PreTrainedModel) -> PreTrainedModel:
    other = copy.deepcopy(model)
    scramble(other, seed=1)
    return other


async def _publish_meanwhile(
    engine: VendorsEngine, trainer: Trainer, model: PreTrainedModel, wanted: GenerationRequest
) -> list[SampleChunk]:
    """Make the model serve as soon as the request has tokens; it runs to its end."""
    digest = await trainer.stage(model)
    before = engine.load().generated_tokens
    async with asyncio.TaskGroup() as tasks:
        generating = tasks.create_task(chunks_of(engine, wanted, every_token=True))
        await until(lambda: engine.load().generated_tokens > before)
        await engine.commit(trainer.epoch, trainer.version, digest)
    chunks = generating.result()
    assert len({chunk.version for chunk in chunks}) == 2
    assert {chunk.sample_index for chunk in chunks} == set(wanted.sample_indexes)
    return chunks


def _check_new_tokens(
    chunks: Sequence[SampleChunk],
    version: int,
    wanted: GenerationRequest,
    exact: FullForward,
    pictures: Sequence[bytes],
    *,
    of_whole_samples: bool,
) -> None:
    """Tokens of `version` have its logprobs, or those of samples that it generated alone."""
    num_checked = 0
    for index in wanted.sample_indexes:
        mine = [chunk for chunk in chunks if chunk.sample_index == index]
        tokens = np.concatenate([chunk.token_ids for chunk in mine]).tolist()
        logprobs = np.concatenate([chunk.behavior_logprobs for chunk in mine])
        is_new = np.concatenate(
            [[chunk.version == version] * chunk.token_ids.size for chunk in mine]
        )
        if of_whole_samples and not is_new.all():
            continue
        # Transformers would take an image token for an image.
        end = tokens.index(IMAGE) if IMAGE in tokens else len(tokens)
        if not is_new[:end].any():
            continue
        found = np.asarray(exact.logprobs(wanted.prompt_token_ids.tolist(), tokens[:end], pictures))
        np.testing.assert_allclose(logprobs[:end][is_new[:end]], found[is_new[:end]], atol=1e-4)
        num_checked += 1
    assert num_checked > 0
