"""Prompts with images in the embedded engine, against transformers' own full forward pass."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from services.rollout.engines.causal_lm import build_causal_lm
from services.rollout.engines.embedded.decoder_choice import choose_decoder
from services.rollout.engines.embedded.generic_decoder import GenericDecoder
from services.rollout.engines.protocol import GenerationRequest
from services.rollout.prompt_encoder import PromptEncoder
from sluice.errors import ExhaustedError, InvalidRequestError
from sluice.types import ChatMessage, SamplingParams
from sluice.vision.image_prompts import ImagePromptReader
from tests.support.causal_lms import (
    Samples,
    engine_settings,
    generate,
    load_weights,
    partial_sample,
    running_engine,
    save_config,
    weights_of,
)
from tests.support.tiny_vision import FAMILIES, IMAGE, FullForward, image_file, save_model, scramble

_TOLERANCE = 1e-4
_LENGTH = 128

Folder = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    directory = tmp_path_factory.mktemp(request.param)
    return directory, save_model(request.param, directory)


@pytest.fixture(scope="module")
def one_family(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    directory = tmp_path_factory.mktemp("model")
    return directory, save_model("qwen2_5_vl", directory)


def _wanted(directory: Path, text: str, images: tuple[bytes, ...], **changes: Any) -> Any:
    encoder = PromptEncoder(directory)
    ids = encoder.encode_chat([ChatMessage("user", text)], images)
    settings = {"temperature": 1.0, "max_tokens": 10, "seed": 3, "samples": 3} | changes
    sampling = SamplingParams(
        settings["temperature"], 1.0, -1, settings["max_tokens"], settings["seed"], (), True
    )
    indexes = tuple(range(settings["samples"]))
    partials = settings.get("partials", ())
    return GenerationRequest("test", ids, indexes, sampling, partials, images=images)


def _error(full: FullForward, wanted: GenerationRequest, samples: Samples) -> float:
    """Largest difference of logprobs, up to the first sampled image token, which ends samples:
    transformers' own forward would take it for a place of an image."""
    errors = []
    prompt = wanted.prompt_token_ids.tolist()
    for tokens, logprobs in samples.values():
        length = tokens.index(IMAGE) if IMAGE in tokens else len(tokens)
        expected = (
            full.logprobs(prompt, tokens[:length], wanted.images, wanted.sampling.temperature)
            if length
            else np.zeros(0)
        )
        errors.append(np.abs(expected - logprobs[:length]).max(initial=0))
    return float(max(errors))


async def test_logprobs_equal_a_full_forward_for_prompts_with_and_without_images_together(
    folder: Folder,
) -> None:
    directory, model = folder
    full = FullForward(directory, model)
    wide = image_file(2, 140, 56)
    requests = [
        _wanted(directory, "how many? <image>", (image_file(1),), samples=5),
        _wanted(directory, "one <image> and <image>, which", (wide, image_file(3, 30, 90))),
        _wanted(directory, "no image", (), samples=4, temperature=0.7),
        _wanted(directory, "<image>", (image_file(4, 20, 20, "JPEG"),), seed=9),
    ]
    engine_of = running_engine(directory, model, max_model_len=_LENGTH)
    async with engine_of as engine, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(generate(engine, wanted)) for wanted in requests]
    for wanted, task in zip(requests, running, strict=True):
        assert _error(full, wanted, task.result()) < _TOLERANCE


async def test_other_images_give_other_tokens(one_family: Folder) -> None:
    directory, model = one_family
    async with running_engine(directory, model, max_model_len=_LENGTH) as engine:
        one, other = [
            await generate(engine, _wanted(directory, "<image>?", (image_file(seed),)))
            for seed in (1, 2)
        ]
    assert one != other


async def test_a_continued_sample_sees_its_prompts_images(one_family: Folder) -> None:
    directory, model = one_family
    images = (image_file(1),)
    async with running_engine(directory, model, max_model_len=_LENGTH) as engine:
        whole = await generate(engine, _wanted(directory, "<image> so", images, samples=1))
        tokens, logprobs = whole[0]
        partial = partial_sample(0, tokens[:4])
        rest = await generate(
            engine, _wanted(directory, "<image> so", images, samples=1, partials=(partial,))
        )
    assert rest[0][0] == tokens[4:]
    np.testing.assert_allclose(rest[0][1], logprobs[4:], atol=_TOLERANCE)


async def test_a_sampled_image_token_is_text_when_its_sample_is_continued(folder: Folder) -> None:
    directory, model = folder
    images = (image_file(1),)
    async with running_engine(directory, model, max_model_len=_LENGTH) as engine:
        before = partial_sample(0, [40, IMAGE])
        # Fed one by one, or prefilled: the same state.
        stepped = await generate(
            engine, _wanted(directory, "<image>", images, samples=1, partials=(before,))
        )
        second = partial_sample(0, [40, IMAGE, *stepped[0][0][:3]])
        prefilled = await generate(
            engine, _wanted(directory, "<image>", images, samples=1, partials=(second,))
        )
    assert prefilled[0][0] == stepped[0][0][3:]
    np.testing.assert_allclose(prefilled[0][1], stepped[0][1][3:], atol=_TOLERANCE)


async def test_after_new_weights_running_samples_are_recomputed_with_the_vision_tower(
    folder: Folder,
) -> None:
    directory, model = folder
    changed = save_model(model.config.model_type, directory / "changed")
    scramble(changed, 1)
    wanted = _wanted(directory, "<image> so", (image_file(1),), samples=2, max_tokens=40)
    async with running_engine(directory, model, max_model_len=_LENGTH, recompute_kv=True) as engine:
        spans: dict[int, list[int]] = {}
        samples: Samples = {}
        async for chunks in engine.generate(wanted, every_token=True):
            for chunk in chunks:
                tokens, logprobs = samples.setdefault(chunk.sample_index, ([], []))
                tokens += chunk.token_ids.tolist()
                logprobs += chunk.behavior_logprobs.tolist()
                spans.setdefault(chunk.sample_index, []).extend(
                    [chunk.version] * chunk.token_ids.size
                )
            if engine.load().version == 1 and len(samples[0][0]) >= 3:
                await load_weights(engine, weights_of(changed, engine), 2, "two")
    full = FullForward(directory, changed)
    for index, (tokens, logprobs) in samples.items():
        new = np.array(spans[index]) == 2
        assert new.any()
        assert not new.all()
        if IMAGE in tokens:
            continue
        expected = full.logprobs(wanted.prompt_token_ids.tolist(), tokens, wanted.images)
        np.testing.assert_allclose(expected[new], np.array(logprobs)[new], atol=_TOLERANCE)


async def test_the_weights_that_are_expected_are_those_of_the_whole_model(folder: Folder) -> None:
    directory, model = folder
    async with running_engine(directory, model, max_model_len=_LENGTH) as engine:
        names = {spec.name for spec in engine.weight_layout}
    assert names == {name for name, _ in model.named_parameters()}
    assert any(name.startswith("model.visual.") for name in names)


def test_the_generic_decoder_is_chosen(folder: Folder) -> None:
    settings = engine_settings(folder[0])
    model = build_causal_lm(settings.model_path, torch.device("cpu"), dtype=settings.dtype).model
    assert type(choose_decoder(model, 4, 48)) is GenericDecoder


async def test_images_for_a_text_model_are_refused(tmp_path: Path) -> None:
    save_config("qwen3", tmp_path)
    sampling = SamplingParams(1.0, 1.0, -1, 4, 0)
    wanted = GenerationRequest(
        "test", np.array([5], np.uint32), (0,), sampling, images=(image_file(1),)
    )
    async with running_engine(tmp_path) as engine:
        await load_weights(
            engine, {spec.name: torch.zeros(spec.shape) for spec in engine.weight_layout}, 1, "one"
        )
        with pytest.raises(InvalidRequestError, match="1 images for a model that takes none"):
            await generate(engine, wanted)


async def test_tokens_of_other_images_are_refused_and_the_engine_continues(
    one_family: Folder,
) -> None:
    directory, model = one_family
    wanted = _wanted(directory, "<image>", (image_file(1, 112, 112),))
    swapped = GenerationRequest(
        "test", wanted.prompt_token_ids, (0,), wanted.sampling, images=(image_file(1),)
    )
    async with running_engine(directory, model, max_model_len=_LENGTH) as engine:
        with pytest.raises(InvalidRequestError, match="image tokens, but its 1 images take"):
            await generate(engine, swapped)
        assert len(await generate(engine, wanted)) == 3


async def test_samples_whose_images_are_decoded_count_before_they_are_in_the_engine(
    one_family: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = one_family
    may_end, original = threading.Event(), ImagePromptReader.read

    def slow(*given: Any) -> Any:
        assert may_end.wait(60)
        return original(*given)

    monkeypatch.setattr(ImagePromptReader, "read", slow)
    capacity = {"slots": 1, "max_queued": 3}
    async with running_engine(directory, model, max_model_len=_LENGTH, **capacity) as engine:
        wanted = _wanted(directory, "<image>", (image_file(1),), samples=3)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(generate(engine, wanted))
            await asyncio.sleep(0)
            with pytest.raises(ExhaustedError, match="6 samples would be under way"):
                await generate(engine, wanted)
            may_end.set()
        assert len(first.result()) == 3
