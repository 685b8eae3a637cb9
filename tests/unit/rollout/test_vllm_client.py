"""vLLM's client: its features, prompts with images, and samples."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor

from services.rollout.engines.protocol import GenerationRequest
from services.rollout.engines.vendor_engines.request import EngineDelta, SamplingChoice
from services.rollout.engines.vllm import client as vllm_features
from services.rollout.engines.vllm.client import (
    VllmClient,
    VllmFeatures,
    collapse_images,
    read_images,
)
from sluice.errors import ConfigError, EngineError, InvalidRequestError, MissingPackageError
from sluice.quickstart.tokenizer import save_image_processor
from sluice.vision.image_prompts import ImagePromptReader, expand_placeholders
from tests.support.causal_lms import request
from tests.support.image_files import png
from tests.support.tiny_vision import image_file
from tests.support.vision_batches import make_reader

_CHOICE = SamplingChoice(1.0, 0.9, -1, 8, 3, (7,))


class _OldEngine:
    """As far back as the adapter goes; it generates what `outputs` holds."""

    outputs: tuple[Any, ...] = ()
    errored = False

    def __init__(self) -> None:
        self.prompts: list[Any] = []
        self.sampling: list[Any] = []
        self.ranks: list[int] = []
        self.versions: list[str] = []
        self.encoder_resets = 0
        self.engine_core = SimpleNamespace()

    @classmethod
    def from_engine_args(cls, _: object) -> _OldEngine:
        return cls()

    async def generate(
        self, prompt: object, sampling: object, _: str, *, priority: int
    ) -> AsyncIterator[Any]:
        self.prompts.append(prompt)
        self.sampling.append(sampling)
        self.ranks.append(priority)
        for output in self.outputs:
            yield output

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        return

    async def resume_generation(self) -> None:
        raise RuntimeError("no loop")

    async def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[object]:
        return [(method, *args)]


class _NewEngine(_OldEngine):
    async def update_weight_version(self, version: str) -> None:
        self.versions.append(version)

    async def reset_encoder_cache(self) -> None:
        self.encoder_resets += 1


class _OlderEngine(_OldEngine):
    async def pause_generation(self) -> None:  # type: ignore[override]
        return


@dataclasses.dataclass
class _Arguments:
    model: str = ""
    scheduling_policy: str = "fcfs"


class _Sampling:
    def __init__(
        self, *, temperature: float, logprobs: int, flat_logprobs: bool = False, **more: object
    ) -> None:
        self.seed, self.kind = more["seed"], more["output_kind"]
        self.is_flat, self.prompt_logprobs = flat_logprobs, more["prompt_logprobs"]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(engine: type, **outputs: object) -> None:
        contents: dict[str, dict[str, object]] = {
            "vllm": {"AsyncEngineArgs": _Arguments},
            "vllm.sampling_params": {
                "SamplingParams": _Sampling,
                "RequestOutputKind": SimpleNamespace(DELTA=1, FINAL_ONLY=2),
            },
            "vllm.v1": {},
            "vllm.v1.engine": {"EngineCoreOutputs": SimpleNamespace},
            "vllm.v1.engine.async_llm": {"AsyncLLM": engine},
            "vllm.v1.engine.output_processor": outputs,
        }
        for name, names in contents.items():
            module = ModuleType(name)
            vars(module).update(names)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(vllm_features, "installed_vllm", lambda: "0.99")

    return put


def _output(tokens: list[int], logprobs: object, spans: object = None) -> Any:
    completion = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason="length")
    if spans is not None:
        completion.weight_versions = spans
    return SimpleNamespace(outputs=[completion], finished=True, num_cached_tokens=2)


async def _sampled(client: VllmClient) -> list[EngineDelta]:
    async with aclosing(client.generate("0", [5, 9], "3", _CHOICE, 4)) as deltas:  # type: ignore[type-var]
        return [delta async for delta in deltas]


async def test_of_an_older_version_only_what_it_has_is_used(install: Any) -> None:
    flat = SimpleNamespace(start_indices=[0, 1], logprobs=[-0.5, -0.5])
    install(_OldEngine)
    client = VllmClient({"model": "m"})
    client._llm.outputs = (_output([6, 7], flat),)
    assert client.features == VllmFeatures("0.99", False, False, False)
    assert await _sampled(client) == [EngineDelta([6, 7], [-0.5, -0.5], "length", 2, ())]
    assert client._llm.prompts == [{"prompt_token_ids": [5, 9], "cache_salt": "3"}]
    assert client._llm.ranks == [0], "vLLM refuses priorities without their policy"
    await client.tag_version("3")
    assert client._llm.versions == []


@pytest.mark.parametrize(
    "spans", [[("3", 0, 1), ("4", 1, 2)], [SimpleNamespace(version=3, start=0, end=1), ["4", 1, 2]]]
)
async def test_of_a_newer_version_all_that_helps_is_used(install: Any, spans: object) -> None:
    flat = SimpleNamespace(start_indices=[0, 2], logprobs=[-0.5, -9.0, -0.25])
    install(_NewEngine)
    client = VllmClient({"model": "m", "scheduling_policy": "priority"})
    client._llm.outputs = (_output([6, 7], flat, spans),)
    assert client.features == VllmFeatures("0.99", True, True, False)
    reported = (("3", 0, 1), ("4", 1, 2))
    assert await _sampled(client) == [EngineDelta([6, 7], [-0.5, -0.25], "length", 2, reported)]
    assert client._llm.prompts == [{"prompt_token_ids": [5, 9], "cache_salt": "3"}]
    assert client._llm.ranks == [-4]
    assert client._llm.sampling[0].is_flat
    await client.tag_version("3")
    assert client._llm.versions == ["3"]


@pytest.mark.parametrize("values", [[-0.5], [-0.5, -9.0]])
async def test_tokens_with_fewer_logprobs_are_an_error(install: Any, values: list[float]) -> None:
    install(_NewEngine)
    client = VllmClient({"model": "m"})
    flat = SimpleNamespace(start_indices=[0], logprobs=values)
    client._llm.outputs = (_output([6, 7], flat),)
    with pytest.raises(EngineError, match="2 tokens came with 1 logprobs"):
        await _sampled(client)


async def test_a_last_output_brings_the_experts_of_the_layers_that_have_some(
    install: Any,
) -> None:
    install(_NewEngine)
    client = VllmClient({"model": "m"}, expert_layers=(0, 2))
    flat = SimpleNamespace(start_indices=[0, 2], logprobs=[-0.5, -9.0, -0.25])
    output = _output([6, 7], flat)
    experts = np.arange(18, dtype=np.uint8).reshape(3, 3, 2)  # of three tokens and layers
    output.outputs[0].routed_experts = experts
    client._llm.outputs = (output,)
    (delta,) = await _sampled(client)
    assert delta.routing is not None
    np.testing.assert_array_equal(delta.routing, experts[:, [0, 2]])


@pytest.mark.parametrize("is_flat", [False, True])
async def test_the_prompts_logprobs_are_those_of_its_own_and_the_most_probable_tokens(
    install: Any, is_flat: bool
) -> None:
    install(_NewEngine)
    client = VllmClient({"model": "m"})
    low, high = SimpleNamespace(logprob=-2.0), SimpleNamespace(logprob=-0.25)
    flat = SimpleNamespace(start_indices=[0], logprobs=[-2.0])
    first, *others = (_output([token], flat) for token in (6, 7, 8))
    first.prompt_logprobs = [{} if is_flat else None, {9: low, 4: high}, {5: high}]
    others[0].prompt_logprobs, others[1].prompt_logprobs = [], None
    client._llm.outputs = (first, *others)
    choice = dataclasses.replace(_CHOICE, prompt_logprobs=True)
    stream = client.generate("0", [3, 9, 5], "3", choice)
    async with aclosing(stream) as deltas:  # type: ignore[type-var]
        found, *rest = [one.prompt_logprobs async for one in deltas]
    assert rest == [None, None]
    assert found.logprobs.tolist() == [-2.0, -0.25]
    assert found.top_token_ids.tolist() == [4, 5]
    assert found.top_logprobs.tolist() == [-0.25, -0.25]
    await _sampled(client)
    assert [one.prompt_logprobs for one in client._llm.sampling] == [1, None]


class _State:
    """Of one running sample, as vLLM's client keeps it."""

    def __init__(self, detokenizer: object, logprobs_processor: object) -> None:
        self.detokenizer, self.logprobs_processor = detokenizer, logprobs_processor
        self.num_cached_tokens = 2


class _Outputs:
    """Has taken tokens 6 and 7 of sample "0"."""

    def __init__(self) -> None:
        flat = SimpleNamespace(start_indices=[0, 1], logprobs=[-0.5, -0.25])
        state = _State(SimpleNamespace(output_token_ids=[6, 7]), SimpleNamespace(logprobs=flat))
        self.external_req_ids, self.request_states = {"0": ["0-x"]}, {"0-x": state}

    def abort_requests(self, request_ids: list[str], internal: bool) -> None:
        return


async def test_a_version_that_can_hold_tokens_gives_each_once_and_the_rest_at_the_end(
    install: Any,
) -> None:
    install(_NewEngine, OutputProcessor=_Outputs, RequestState=_State)
    client = VllmClient({"model": "m"})
    client._llm.output_processor = _Outputs()
    assert client.so_far("0", 0) == EngineDelta([6, 7], [-0.5, -0.25], None, 2)
    assert client.so_far("0", 1) == EngineDelta([7], [-0.25], None, 2)
    assert client.so_far("0", 2) is None
    assert client.so_far("1", 0) is None, "its first token is still to come"
    flat = SimpleNamespace(start_indices=[0, 1, 2], logprobs=[-0.5, -0.25, -0.75])
    client._llm.outputs = (_output([6, 7, 8], flat),)
    stream = client.generate("0", [5], "3", _CHOICE, count_known=lambda: 2)
    async with aclosing(stream) as deltas:  # type: ignore[type-var]
        assert [one async for one in deltas] == [EngineDelta([8], [-0.75], "length", 2)]
    await _sampled(client)  # wants every token
    assert [one.kind for one in client._llm.sampling] == [2, 1]


async def test_a_pause_returns_when_all_parts_of_the_last_step_were_handed_out(
    install: Any,
) -> None:
    install(_NewEngine)
    client = VllmClient({"model": "m"})
    waiting = client._llm.engine_core.outputs_queue = asyncio.Queue[Any]()
    handed_out: list[int] = []

    async def hand_out() -> None:
        while True:
            step = await waiting.get()
            for part in getattr(step, "parts", ()):
                handed_out.append(part)
                await asyncio.sleep(0)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        handing = tasks.create_task(hand_out())
        waiting.put_nowait(SimpleNamespace(parts=range(100)))
        await client.pause(recomputes=False)
        assert handed_out == [*range(100)]
        handing.cancel()


async def test_a_pause_fails_at_once_when_nothing_hands_tokens_out_any_more(install: Any) -> None:
    install(_NewEngine)
    client = VllmClient({"model": "m"})
    client._llm.engine_core.outputs_queue = asyncio.Queue[Any]()
    client._llm.errored = True
    async with asyncio.timeout(60):
        with pytest.raises(EngineError, match="hands no more tokens out"):
            await client.pause(recomputes=False)


async def test_a_version_that_cannot_hold_tokens_gives_each_as_it_comes(install: Any) -> None:
    install(_OldEngine)
    client = VllmClient({"model": "m"})
    stream = client.generate("0", [5], "3", _CHOICE, count_known=lambda: 0)
    async with aclosing(stream) as deltas:  # type: ignore[type-var]
        assert [one async for one in deltas] == []
    assert client._llm.sampling[0].kind == 1
    assert client.so_far("0", 0) is None


def _shown() -> Any:
    """Stands for the images of a prompt."""
    return SimpleNamespace(images=["pixels"], names=["a"], continued=list)


async def _sample_from_an_image(client: VllmClient) -> None:
    stream = client.generate("0", [5, 9], "3", _CHOICE, images=_shown())
    async with aclosing(stream) as deltas:  # type: ignore[type-var]
        assert [delta async for delta in deltas] == []


async def test_encoded_images_are_forgotten_once_there_are_any(install: Any) -> None:
    install(_NewEngine)
    client = VllmClient({"model": "m"})
    await client.forget_encoded_images()
    assert client._llm.encoder_resets == 0, "models of text are asked for nothing"
    await _sample_from_an_image(client)
    await client.forget_encoded_images()
    assert client._llm.encoder_resets == 1


async def test_a_version_that_cannot_forget_encoded_images_is_not_asked_to(install: Any) -> None:
    install(_OldEngine)
    client = VllmClient({"model": "m"})
    await _sample_from_an_image(client)
    await client.forget_encoded_images()
    assert client._llm.encoder_resets == 0


@pytest.mark.parametrize(("recomputes", "salt"), [(False, "3"), (True, "3-0")])
async def test_samples_with_images_share_no_prompt_that_will_be_recomputed(
    install: Any, recomputes: bool, salt: str
) -> None:
    install(_NewEngine)
    client = VllmClient({"model": "m"}, recomputes=recomputes)
    await _sample_from_an_image(client)
    await _sampled(client)
    (of_image, of_text) = client._llm.prompts
    assert of_image["cache_salt"] == salt
    assert of_image["multi_modal_uuids"] == {"image": ["3-a"]}, "images are encoded once for all"
    assert of_text["cache_salt"] == "3"


@pytest.mark.parametrize(
    ("engine", "missing"),
    [
        (object, "pause_generation, resume_generation, collective_rpc"),
        (_OlderEngine, r"pause_generation\(mode\)"),
    ],
)
def test_a_version_without_what_weight_updates_need_is_refused_by_name(
    install: Any, engine: type, missing: str
) -> None:
    install(engine)
    with pytest.raises(
        ConfigError, match=rf"vLLM 0\.99 has no {missing}; install 0\.32 .* 0\.23 to 0\.33"
    ):
        VllmClient({})


def test_arguments_that_this_version_does_not_know_are_named(install: Any) -> None:
    install(_NewEngine)
    with pytest.raises(ConfigError, match=r"no engine arguments one, two; .*engine_kwargs\.vllm"):
        VllmClient({"model": "m", "two": 2, "one": 1})


async def test_vllms_errors_are_raised_as_the_engines(install: Any) -> None:
    install(_NewEngine)
    client = VllmClient({})
    with pytest.raises(EngineError, match=r"resume failed: RuntimeError\('no loop'\)"):
        await client.resume()


_IMAGE = 5
_SIDE = 28
"""Of a merged patch, in pixels."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model without weights."""
    directory = tmp_path_factory.mktemp("model")
    config = {"model_type": "qwen2_5_vl", "image_token_id": _IMAGE}
    (directory / "config.json").write_text(json.dumps(config))
    save_image_processor(
        directory, patch_size=_SIDE // 2, min_pixels=_SIDE**2, max_pixels=16 * _SIDE**2
    )
    return directory


@pytest.fixture(scope="module")
def reader(folder: Path) -> ImagePromptReader:
    return make_reader(folder)


words = st.lists(st.integers(6, 99), min_size=1, max_size=4)


@given(words, st.lists(st.tuples(st.integers(1, 9), words), max_size=4))
def test_collapsing_undoes_expanding(start: list[int], images: list[tuple[int, list[int]]]) -> None:
    short = [*start, *(token for _, after in images for token in (_IMAGE, *after))]
    sizes = [size for size, _ in images]
    expanded = expand_placeholders(np.array(short, np.uint32), _IMAGE, sizes)
    assert collapse_images(expanded.tolist(), _IMAGE, len(images)) == short


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_another_number_of_images_than_runs_is_refused(num_images: int) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"{num_images} images, but 2 runs of the image token 5"
    ):
        collapse_images([1, 5, 5, 2, 5, 3], _IMAGE, num_images)


def _request(*images: bytes) -> GenerationRequest:
    return replace(request([8, 5, 5, 5, 9, 5, 10]), images=images)


def test_images_are_decoded_in_order_and_the_same_file_has_the_same_name(
    reader: ImagePromptReader,
) -> None:
    wide, tall = png(2 * _SIDE, _SIDE), png(_SIDE, 2 * _SIDE)
    found = read_images(_request(wide, tall), reader)
    again = read_images(_request(tall, tall), reader)
    assert [image.size for image in found.images] == [(56, 28), (28, 56)]
    assert found.prompt == [8, 5, 9, 5, 10]
    assert again.names == (found.names[1], found.names[1])
    assert found.names[0] != found.names[1]


def test_vllm_is_given_the_trainers_pixels_in_sizes_that_need_no_resizing(
    folder: Path, reader: ImagePromptReader
) -> None:
    files = (image_file(1, 20, 20), image_file(2, 300, 190))
    found = read_images(_request(*files), reader)
    assert [image.size for image in found.images] == [(28, 28), (140, 84)]
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    for file, image in zip(files, found.images, strict=True):
        trained = processor(images=[Image.open(io.BytesIO(file))], return_tensors="np")
        served = processor(images=[image], do_resize=False, return_tensors="np")
        np.testing.assert_array_equal(served["pixel_values"], trained["pixel_values"])


def test_image_tokens_of_a_response_that_is_continued_are_text(reader: ImagePromptReader) -> None:
    found = read_images(_request(png(), png()), reader)
    assert found.continued([8, 5, 5, 5, 9, 5, 10, 5, 5, 11]) == [8, 5, 9, 5, 10, 5, 5, 11]


def test_a_file_that_is_no_image_is_refused_and_named(reader: ImagePromptReader) -> None:
    with pytest.raises(InvalidRequestError, match=r"images\[1\]"):
        read_images(_request(png(), b"text"), reader)


def test_without_vllm_the_engine_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingPackageError, match=r"cannot be imported.*install vllm"):
        VllmClient({})
