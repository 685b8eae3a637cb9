"""Images from the reward service's batch to the learner's passes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, PreTrainedModel

from services.trainer.learner.batch.micro_batch import MicroBatch, build_micro_batch
from services.trainer.learner.batch.packed_rows import TrainingRow, training_rows
from services.trainer.learner.learner import Learner
from services.trainer.learner.model.attention import PACKED_ATTENTION
from services.trainer.learner.model.decoder import DecoderLayer, use_native_layers
from services.trainer.learner.model.forward import TokenPass, token_outputs
from services.trainer.learner.rank_shares import ImageRanks, SequenceShare
from services.trainer.learner.ranks import ParallelContext
from sluice.algorithm.packing import plan_micro_batches
from sluice.errors import ConfigError
from sluice.types import TrainGroup
from sluice.vision import image_prompts
from tests.support.threaded_ranks import on_ranks
from tests.support.tiny_policy import make_batch, make_config
from tests.support.tiny_policy import save_model as save_text_model
from tests.support.tiny_vision import FAMILIES, FullForward, save_model
from tests.support.vision_batches import (
    make_image_batch,
    make_image_group,
    make_reader,
    without_sampled_images,
)

WAYS = ("sent", "received")

Folder = tuple[Path, PreTrainedModel]
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    directory = tmp_path_factory.mktemp(request.param)
    return directory, save_model(request.param, directory)


@pytest.fixture(scope="module")
def one_family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model("qwen2_5_vl", directory)
    return directory


def _packed(
    directory: Path,
    groups: list[TrainGroup],
    share: SequenceShare | None = None,
    ranks: ImageRanks | None = None,
) -> tuple[list[TrainingRow], MicroBatch]:
    rows = training_rows(groups, [range(4 * g, 4 * g + 4) for g in range(len(groups))])
    (plan,) = plan_micro_batches(
        [row.size for row in rows], range(len(rows)), rows_per_micro=len(rows)
    )
    reader = make_reader(directory)
    images = {
        place: reader.lay_out(group.prompt_token_ids, group.images)
        for place, group in enumerate(groups)
        if group.images
    }
    micro_batch = build_micro_batch(
        rows, plan, torch.device("cpu"), images, share, image_ranks=ranks
    )
    assert micro_batch is not None
    return rows, micro_batch


@pytest.mark.parametrize("numbers", [(1, 0), (2, 2, 1, 0)])
def test_each_image_is_decoded_on_one_of_the_ranks_that_share_its_tokens(
    one_family: Path, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]
) -> None:
    decoded: list[bytes] = []
    original = image_prompts.decode_image

    def noting(encoded: bytes, place: str) -> Any:
        decoded.append(encoded)
        return original(encoded, place)

    monkeypatch.setattr(image_prompts, "decode_image", noting)
    reader = make_reader(one_family)
    groups = [make_image_group(reader, seed, number) for seed, number in enumerate(numbers)]
    group: Any = None  # nothing is sent
    _, whole = _packed(one_family, groups)
    in_all, of_ranks = whole.images, []
    assert in_all is not None
    assert in_all.pixel_values is not None
    decoded.clear()
    for rank in range(3):
        before = len(decoded)
        images = _packed(one_family, groups, SequenceShare(group, rank, 3))[1].images
        assert images is not None
        assert len(decoded) - before == len(images.grid_thw)
        assert len(images.grid_thw) < len(in_all.grid_thw) or len(in_all.grid_thw) == 1
        of_ranks.append(images)
    assert decoded == [one for group in groups for one in group.images]
    pixels = [one.pixel_values for one in of_ranks if one.pixel_values is not None]
    assert torch.equal(torch.cat(pixels), in_all.pixel_values)
    assert torch.equal(torch.cat([one.grid_thw for one in of_ranks]), in_all.grid_thw)
    sent, received = (np.array([getattr(one, way) for one in of_ranks]) for way in WAYS)
    assert np.array_equal(sent.T, received)
    for images, encoded, needed in zip(of_ranks, sent, received, strict=True):
        assert encoded.sum() == images.grid_thw.prod(-1).sum() / 4
        assert needed.sum() == images.is_image.sum()


def test_a_stage_without_the_vision_tower_decodes_no_images(
    one_family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [make_image_group(make_reader(one_family), seed=0, num_images=1)]
    _, first = _packed(one_family, groups)
    monkeypatch.setattr(image_prompts, "decode_image", None)
    _, later = _packed(one_family, groups, ranks=ImageRanks(encodes=False))
    assert later.images is None
    assert torch.equal(later.position_ids, first.position_ids)


@pytest.mark.parametrize("own", [False, True], ids=["transformers' layers", "native layers"])
def test_logprobs_and_gradients_equal_the_plain_models(folder: Folder, own: bool) -> None:
    directory, model = folder
    model.requires_grad_(True)
    reader = make_reader(directory)
    groups = [
        without_sampled_images(make_image_group(reader, seed, seed % 3)) for seed in range(1, 5)
    ]
    rows, micro_batch = _packed(directory, groups)
    full = FullForward(directory, model, differentiable=True)
    plain = torch.cat(
        [
            full.logprobs_tensor(
                row.prompt_token_ids.tolist(), row.token_ids.tolist(), groups[row.group].images, 0.7
            )
            for row in rows
        ]
    )
    expected = _gradients(model, plain)
    trained = copy.deepcopy(model)
    trained.set_attn_implementation({"text_config": PACKED_ATTENTION, "vision_config": "sdpa"})
    if own:
        use_native_layers(trained)
    assert own == any(isinstance(one, DecoderLayer) for one in trained.modules())
    packed = token_outputs(trained, TokenPass(micro_batch, 0.7)).logprobs
    found = _gradients(trained, packed)
    torch.testing.assert_close(packed, plain, atol=1e-4, rtol=1e-5)
    assert found.keys() == expected.keys() == {name for name, _ in model.named_parameters()}
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name] / scale, gradient / scale, atol=1e-5, rtol=1e-4)


def _gradients(model: PreTrainedModel, logprobs: torch.Tensor) -> Weights:
    model.zero_grad()
    (logprobs * torch.linspace(-1.0, 1.0, logprobs.numel())).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _trained(learner: Learner, directory: Path, steps: int = 2) -> Weights:
    for step in range(1, steps + 1):
        learner.train_step(make_image_batch(make_reader(directory), seed=step), step)
    return {name: weight.clone() for name, weight in learner.named_weights()}


def test_a_step_trains_the_vision_tower_and_cutting_it_differently_changes_nothing(
    one_family: Path,
) -> None:
    before = dict(AutoModelForImageTextToText.from_pretrained(one_family).named_parameters())
    cuts: list[dict[str, object]] = [
        {"ppo_micro_batch_size_per_gpu": 12, "use_kl_loss": True},
        {"use_kl_loss": True, "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 90},
    ]
    whole, cut = [
        _trained(Learner(make_config(one_family, **changes), ParallelContext(), 10), one_family)
        for changes in cuts
    ]
    assert whole.keys() == before.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(cut[name], weight, atol=2e-5, rtol=1e-4, msg=name)
        assert not torch.equal(weight, before[name]), name


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_recomputing_activations_in_the_backward_pass_changes_nothing(
    one_family: Path, frozen: bool
) -> None:
    config = make_config(one_family, freeze_vision_tower=frozen)
    model = structs.replace(config.actor_rollout_ref.model, enable_gradient_checkpointing=True)
    recomputing = structs.replace(
        config, actor_rollout_ref=structs.replace(config.actor_rollout_ref, model=model)
    )
    kept, recomputed = [
        _trained(Learner(one, ParallelContext(), 10), one_family, steps=1)
        for one in (config, recomputing)
    ]
    for name, weight in kept.items():
        torch.testing.assert_close(recomputed[name], weight, atol=1e-6, rtol=1e-5, msg=name)


def test_a_step_that_sums_gradients_once_may_begin_without_images(one_family: Path) -> None:
    sharding = {"dtype": "bfloat16", "use_no_sync_for_gradient_accumulation": True}
    keys: dict[str, object] = {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 4}
    config = make_config(one_family, 2, fsdp_config=sharding, **keys)
    reader = make_reader(one_family)
    batch = make_image_batch(reader, num_groups=2)
    groups = tuple(make_image_group(reader, seed, seed) for seed in range(2))
    found = Learner(config, ParallelContext(), 10).train_step(replace(batch, groups=groups), 1)
    assert math.isfinite(found["actor/grad_norm"])


def test_two_ranks_agree_with_one(one_family: Path) -> None:
    config = make_config(one_family, fsdp_config={"dtype": "float32", "fsdp_size": 1})
    alone = _trained(Learner(config, ParallelContext(), 10), one_family)

    ranks = on_ranks(
        2, lambda rank: Learner(config, rank, 10), lambda one: _trained(one, one_family)
    )
    for weights in ranks:
        for name, weight in alone.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=1e-4, msg=name)


def test_a_frozen_vision_tower_stays_as_it_is_and_the_rest_learns(one_family: Path) -> None:
    config = make_config(one_family, freeze_vision_tower=True)
    before = dict(AutoModelForImageTextToText.from_pretrained(one_family).named_parameters())
    after = _trained(Learner(config, ParallelContext(), 10), one_family, steps=1)
    for name, weight in after.items():
        assert torch.equal(weight, before[name]) == name.startswith("model.visual."), name


def test_freezing_the_vision_tower_of_a_text_model_is_refused(tmp_path: Path) -> None:
    config = make_config(save_text_model(tmp_path), freeze_vision_tower=True)
    with pytest.raises(ConfigError, match="reads no images"):
        Learner(config, ParallelContext(), 10)


def test_images_for_a_text_model_are_refused_with_the_prompts_name(
    tmp_path: Path, one_family: Path
) -> None:
    learner = Learner(make_config(save_text_model(tmp_path)), ParallelContext(), 10)
    with pytest.raises(ConfigError, match="prompt prompt-1000 comes with images"):
        learner.train_step(make_image_batch(make_reader(one_family), seed=1), 1)


def test_a_checkpoint_loads_again_and_brings_the_image_processor(
    one_family: Path, tmp_path: Path
) -> None:
    config = make_config(one_family)
    learner = Learner(config, ParallelContext(), 10)
    _trained(learner, one_family)
    learner.save(tmp_path / "actor")
    folder = tmp_path / "actor" / "huggingface"
    loaded = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True)
    trained = dict(learner.named_weights())
    assert {name for name, _ in loaded.named_parameters()} == trained.keys()
    assert all(torch.equal(w, trained[name]) for name, w in loaded.named_parameters())
    noise = np.random.default_rng(0).integers(0, 256, (56, 70, 3), np.uint8)
    pixels = [
        AutoImageProcessor.from_pretrained(place, backend="pil")(images=[Image.fromarray(noise)])
        for place in (folder, one_family)
    ]
    np.testing.assert_array_equal(pixels[0]["pixel_values"], pixels[1]["pixel_values"])

    resumed = Learner(config, ParallelContext(), 10)
    resumed.load(tmp_path / "actor")
    batch = make_image_batch(make_reader(one_family), seed=3)
    learner.train_step(batch, 3)
    resumed.train_step(batch, 3)
    after = dict(resumed.named_weights())
    assert all(torch.equal(weight, after[name]) for name, weight in learner.named_weights())


def test_prompts_without_images_train_a_vision_language_model_too(one_family: Path) -> None:
    learner = Learner(make_config(one_family), ParallelContext(), 10)
    metrics = learner.train_step(make_batch(), 1)
    assert np.isfinite(metrics["actor/grad_norm"])
