"""Ranks that share a vision-language model train on images like one that has all of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.learner.learner import Learner
from services.trainer.learner.model.loading import load_policy
from services.trainer.learner.model.stages import own_stage
from services.trainer.learner.ranks import ParallelContext, StageRanks
from sluice.config.schema.actor import ActorFsdpConfig, TransformerOverrides
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.errors import ConfigError
from tests.multiprocess.test_lora_ranks import ADAPTERS, adapters
from tests.multiprocess.test_sharded_trainer import assert_like, copies, wire_digest
from tests.support.layer_parity import MAX_ERROR
from tests.support.rank_parity import compare, made_image_subject
from tests.support.rank_peer import NUM_GROUPS, batch_of, made_batch
from tests.support.saved_states import optimizer_tensors
from tests.support.tiny_policy import adapting, make_config
from tests.support.tiny_vision import save_model
from tests.support.trainer_ranks import trainer

# Small micro-batches: in some passes one rank has images and the other has none, or no rows left.
ACTOR: dict[str, Any] = {
    "ppo_mini_batch_size": 2,
    "use_dynamic_bsz": True,
    "ppo_max_token_len_per_gpu": 60,
    "use_kl_loss": True,
    "fsdp_config": {"dtype": "float32", "fsdp_size": 2},
}
TWO_HEADS: dict[str, Any] = {"num_key_value_heads": 2}
FORM: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "deepstack": (0, 1),
}
"""Images add to the first two layers, as in Qwen3-VL-30B-A3B to the first three."""
EXPERTS = "qwen3_vl_moe"


@pytest.mark.parametrize(
    ("world_size", "layout", "passes"),
    [
        (
            4,
            {"pipeline_parallel_size": 2, "expert_parallel_size": 2},
            [(EXPERTS, FORM, True)],
        ),
        (
            4,
            {"pipeline_parallel_size": 2, "ulysses_sequence_parallel_size": 2},
            [("qwen2_5_vl", TWO_HEADS, False)],
        ),
        (
            4,
            {
                "tensor_parallel_size": 2,
                "ulysses_sequence_parallel_size": 2,
                "expert_parallel_size": 2,
            },
            [(EXPERTS, FORM, True)],
        ),
        (4, {"tensor_parallel_size": 2, "fsdp_size": 1}, [("qwen2_vl", TWO_HEADS, False)]),
    ],
)
def test_gradients_are_those_of_transformers_on_one_rank(
    world_size: int,
    layout: dict[str, int],
    passes: list[tuple[str, dict[str, Any], bool]],
    tmp_path: Path,
) -> None:
    subjects = [
        (made_image_subject(family, **changes), recomputes)
        for family, changes, recomputes in passes
    ]
    found = compare(world_size, layout, subjects, tmp_path)
    for one, (subject, _), (family, _, _) in zip(found, subjects, passes, strict=True):
        assert one.error <= MAX_ERROR, family
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in subject.expected.values()))
        for rank in one.ranks:
            assert rank.norm == pytest.approx(norm, rel=1e-5)
            assert rank.is_equal


@pytest.mark.parametrize(
    ("family", "world_size", "layout", "changes"),
    [
        ("qwen2_5_vl", 2, {}, {}),
        # A pair that shares tokens divides one or two images, or none.
        ("qwen2_vl", 2, {"fsdp_size": 1, "ulysses_sequence_parallel_size": 2}, {}),
        (
            EXPERTS,
            4,
            {"expert_parallel_size": 2, "fsdp_size": 4, "ulysses_sequence_parallel_size": 2},
            {},
        ),
        (EXPERTS, 4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, FORM),
    ],
)
def test_they_train_and_publish_like_one_whatever_images_a_ranks_rows_have(
    family: str, world_size: int, layout: dict[str, int], changes: dict[str, Any], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    save_model(family, model, **changes)
    # Without the engine's experts, passes of one step follow the first; then they follow those.
    actor = ACTOR | ({"router_replay": {"mode": "R3"}} if family == EXPERTS else {})
    commands = ("train", "routed") if family == EXPERTS else ("train",)
    single = Learner(make_config(model, NUM_GROUPS, **actor), ParallelContext(), total_steps=10)
    before = copies(single)
    divided = ACTOR["fsdp_config"] | layout
    with trainer(model, world_size, **(actor | {"fsdp_config": divided})) as ranks:
        for number, command in enumerate(commands, 1):
            expected = single.train_step(made_batch(model, f"{command}-{number}"), number)
            assert_like(ranks[0].command(f"{command} {number}"), expected)
        ranks[0].command(f"weights {tmp_path / 'two'}")
        published = ranks[0].command("publish 1")
        assert [rank.finish() for rank in ranks] == [0] * world_size
    found = load_file(tmp_path / "two")
    assert found.keys() == before.keys()
    for name, weight in copies(single).items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5, msg=name)
        assert not torch.equal(weight, before[name]), name
    saved = tmp_path / "two.saved" / "actor"
    names = [name for file in saved.rglob("model*.safetensors") for name in load_file(file)]
    assert len(names) == len(set(names))
    assert set(names) == load_file(model / "model.safetensors").keys()  # however it was read
    single.load(saved)
    assert published["digest"] == wire_digest(single)


def test_adapters_of_a_model_with_images_train_in_stages_as_on_one_rank(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_model(EXPERTS, model, **FORM)
    config = adapting(make_config(model, NUM_GROUPS, **ACTOR), **ADAPTERS)
    single = Learner(config, ParallelContext(), total_steps=10)
    stages = {"fsdp_config": {"dtype": "float32", "pipeline_parallel_size": 2}}
    with trainer(model, 2, adapters=ADAPTERS, recomputes=True, **(ACTOR | stages)) as ranks:
        assert_like(ranks[0].command("train 1"), single.train_step(batch_of(model, 1), 1))
        ranks[0].command(f"save {tmp_path / 'two' / 'actor'}")
    single.save(tmp_path / "one" / "actor")
    for read in (adapters, optimizer_tensors):
        found, wanted = (read(tmp_path / name / "actor") for name in ("two", "one"))
        assert found.keys() == wanted.keys()
        assert any("visual" in name for name in found)
        assert any("experts" in name for name in found)
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def test_a_first_stage_without_the_layers_that_images_add_to_is_refused(tmp_path: Path) -> None:
    save_model(EXPERTS, tmp_path, **FORM)
    loaded = load_policy(ModelConfig(path=str(tmp_path)), ActorFsdpConfig(), 64)
    ranks = ParallelContext()
    ranks.stages = StageRanks((0, 1), 0)
    cut = TransformerOverrides(num_layers_in_first_pipeline_stage=1)
    with pytest.raises(ConfigError, match=r"the first stage has 1 of .* 4 layers.* the first 2;"):
        own_stage(loaded.model, ActorFsdpConfig(), cut, ranks)
