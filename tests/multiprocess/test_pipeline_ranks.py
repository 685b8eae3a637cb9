"""Ranks that hold stages of a model train, save, resume and publish like one that holds all."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.learner.learner import Learner
from services.trainer.learner.model.loading import Stage, load_critic
from services.trainer.learner.model.stages import check_stages_train, keep_stage
from services.trainer.learner.ranks import ParallelContext
from sluice.config.schema.actor import FsdpConfig, TransformerOverrides
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.errors import ConfigError
from tests.multiprocess.test_sharded_trainer import assert_like, copies, step, wire_digest
from tests.support.layer_parity import MAX_ERROR
from tests.support.rank_parity import Compared, Subject, compare, made_subject
from tests.support.rank_peer import NUM_GROUPS, made_batch
from tests.support.saved_states import are_equal, model_tensors, optimizer_tensors
from tests.support.steered_process import ANSWER_S
from tests.support.tiny_policy import (
    adapting,
    make_config,
    make_model,
    save_model,
    with_critic,
    with_sources,
)
from tests.support.trainer_ranks import trainer

FOUR: dict[str, Any] = {"num_hidden_layers": 4}
SIX: dict[str, Any] = {"num_hidden_layers": 6}
ENDS = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}
ACTOR: dict[str, Any] = {
    "ppo_micro_batch_size_per_gpu": 3,
    "ppo_mini_batch_size": 2,
    "use_kl_loss": True,
    "entropy_coeff": 0.01,
}
# Ranks have 3 and 4 micro-batches of the critic, so that a pass is idle.
OWN_STEPS: dict[str, Any] = {
    "ppo_epochs": 2,
    "ppo_mini_batch_size": 4,
    "use_dynamic_bsz": True,
    "ppo_max_token_len_per_gpu": 40,
    "model": {"enable_gradient_checkpointing": True},
    "fsdp": {"dtype": "float32", "param_offload": True},
}
# One source has neither the loss of the other nor its divergence from the reference.
SOURCES: dict[str, Any] = {
    "math": {"loss_mode": "gspo"},
    "code": {"adv_estimator": "rloo", "use_kl_loss": False},
}


def stages(count: int, **layout: int) -> dict[str, int]:
    return {"pipeline_parallel_size": count, **layout}


# The embeddings of qwen3 are tied. The last of several shares of rows has none.
@pytest.mark.parametrize(
    ("world_size", "layout", "cut", "asked"),
    [
        (4, stages(4), ENDS, ("qwen3", SIX, True)),
        (4, stages(2, expert_parallel_size=2, fsdp_size=2), {}, ("qwen3_moe", FOUR, True)),
        (4, stages(2, ulysses_sequence_parallel_size=2), {}, ("qwen3", FOUR, True)),
        (4, stages(2, fsdp_size=1), {}, ("qwen3", FOUR, False)),
        (4, stages(2, tensor_parallel_size=2), {}, ("qwen3", FOUR, True)),
    ],
)
def test_gradients_are_those_of_transformers_on_one_rank(
    world_size: int,
    layout: dict[str, int],
    cut: dict[str, int],
    asked: tuple[str, dict[str, Any], bool],
    tmp_path: Path,
) -> None:
    family, changes, recomputes = asked
    subject = made_subject(family, **changes)
    (found,) = compare(world_size, layout, [(subject, recomputes)], tmp_path, cut)
    assert_gradients(found, subject)


def assert_gradients(found: Compared, subject: Subject) -> None:
    assert found.error <= MAX_ERROR
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in subject.expected.values()))
    for rank in found.ranks:
        assert rank.norm == pytest.approx(norm, rel=1e-5)
        assert rank.is_equal


def test_a_rank_holds_its_stage_only(tmp_path: Path) -> None:
    subject = made_subject("llama", **FOUR)
    (found,) = compare(2, stages(2), [(subject, False)], tmp_path)
    assert_gradients(found, subject)
    sizes = {name: one.numel() for name, one in subject.expected.items()}
    first = sum(
        size
        for name, size in sizes.items()
        if name.startswith(("model.embed_tokens.", "model.layers.0.", "model.layers.1."))
    )
    assert [rank.held for rank in found.ranks] == [first, sum(sizes.values()) - first]


def test_they_train_skip_save_and_publish_like_one(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen3", **FOUR)
    settings = {**ACTOR, "fsdp_config": {"dtype": "float32"}}
    config = with_sources(make_config(folder, NUM_GROUPS, **settings), SOURCES)
    single = Learner(config, ParallelContext(), total_steps=10)

    def alone(number: int) -> dict[str, float]:
        return single.train_step(made_batch(folder, f"sources-{number}"), number)

    staged, whole = tmp_path / "a" / "actor", tmp_path / "b" / "actor"
    layout = stages(2, param_offload=True, optimizer_offload=True)
    divided = settings | {"fsdp_config": {"dtype": "float32", **layout}}
    with trainer(folder, 4, sources=SOURCES, **divided) as ranks:
        assert_like(ranks[0].command("sources 1"), alone(1))
        ranks[0].command(f"save {staged}")
        expected = copies(single)
        for name, weight in model_tensors(staged).items():
            torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-5, msg=name)
        single.load(staged)
        single.save(whole)
        for read in (model_tensors, optimizer_tensors):
            ours, theirs = read(staged), read(whole)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        published = ranks[0].command("publish 1")
        assert published["digest"] == wire_digest(single)
        # Of an infinite gradient on the first stage the others know only by the norm.
        ranks[0].command("spoil 2")
        skipped = ranks[0].command("sources 2")
        assert skipped["actor/skipped_updates"] == 2.0
        assert "actor/grad_norm" not in skipped
        after = ranks[0].command("sources 2")
        assert_like(alone(2), after)
        ranks[0].command(f"load {whole}")
        # Equal to the bit: no stage has changed its weights or moments in the steps skipped.
        assert ranks[0].command("sources 2")["actor/grad_norm"] == after["actor/grad_norm"]
        assert [rank.finish() for rank in ranks] == [0] * 4


def test_each_weight_of_a_critic_is_on_one_stage_and_its_head_on_the_last(tmp_path: Path) -> None:
    settings = ModelConfig(path=str(save_model(tmp_path, "qwen3", **FOUR)))
    found: list[set[str]] = []
    for number in range(2):
        loaded = load_critic(settings, FsdpConfig(dtype="float32"), 28)
        whole = {name for name, _ in loaded.model.named_parameters()}
        layers = range(2 * number, 2 * number + 2)
        keep_stage(loaded, Stage((0, 1), number, layers, None, 48, torch.float32))
        found.append({name for name, _ in loaded.model.named_parameters()})
    assert sorted([*found[0], *found[1]]) == sorted(whole)
    assert "model.embed_tokens.weight" in found[0]
    assert {"model.norm.weight", "score.weight", "score.bias"} <= found[1]


# The policy's embedding is tied in qwen3 alone; a critic's is not.
@pytest.mark.parametrize(
    ("family", "layout", "keys"),
    [
        ("qwen3", stages(2), OWN_STEPS),
        ("qwen3_moe", stages(2, tensor_parallel_size=2, expert_parallel_size=2), {}),
    ],
)
def test_a_critic_trains_saves_and_resumes_like_one_of_one_rank(
    family: str, layout: dict[str, int], keys: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", family, **FOUR)
    # No reference, whose passes are those of a policy.
    settings = {**ACTOR, "use_kl_loss": False, "fsdp_config": {"dtype": "float32"}}
    config = with_critic(make_config(folder, NUM_GROUPS, **settings), **keys)
    single = Learner(config, ParallelContext(), total_steps=10)
    cut = settings | {"fsdp_config": {"dtype": "float32", **layout}}
    staged, one, whole, later = (
        tmp_path / name / "actor" for name in ("staged", "one", "whole", "later")
    )
    critics = [folder.parent / "critic" for folder in (staged, one, whole)]
    with trainer(folder, 4, critic=keys, **cut) as ranks:
        assert_like(ranks[0].command("train 1"), step(single, 1))
        ranks[0].command(f"save {staged}")
        single.save(one)
        for read in (model_tensors, optimizer_tensors):  # first moments are means of gradients
            found, expected = read(critics[0]), read(critics[1])
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                scale = max(float(tensor.abs().max()), 1e-8)
                torch.testing.assert_close(
                    found[name] / scale, tensor / scale, atol=1e-4, rtol=0, msg=name
                )
        single.load(staged)
        single.save(whole)
        assert are_equal(critics[0], critics[2])
        # The stages have not made step 2: what they continue with is what they read.
        step(single, 2)
        single.save(later)
        ranks[0].command(f"load {later}")
        assert_like(ranks[0].command("train 3"), step(single, 3))
        assert [rank.finish() for rank in ranks] == [0] * 4


def test_adapters_of_stages_continue_in_one_rank(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen3", **FOUR)
    keys: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8}
    layout = {"fsdp_config": {"dtype": "float32", **stages(2)}}
    config = adapting(make_config(folder, NUM_GROUPS, **ACTOR), **keys)
    single = Learner(config, ParallelContext(), total_steps=10)
    saved = tmp_path / "saved" / "actor"
    with trainer(folder, 2, adapters=keys, **ACTOR | layout) as ranks:
        assert_like(ranks[0].command("train 1"), step(single, 1))
        ranks[0].command(f"save {saved}")
        after = ranks[0].command("train 2")
        ranks[0].command(f"load {saved}")
        assert ranks[0].command("train 2")["actor/grad_norm"] == after["actor/grad_norm"]
    single.load(saved)
    assert_like(step(single, 2), after)
    assert load_file(saved / "lora_adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize(("rank", "raises"), [(0, True), (1, False)])
def test_all_end_where_a_stage_dies_or_raises(rank: int, raises: bool, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama", num_hidden_layers=3)
    layout: dict[str, Any] = {"fsdp_config": {"dtype": "float32", **stages(3)}}
    with trainer(folder, 3, fails_between_stages=(rank, 4, raises), **layout) as ranks:
        ranks[0].tell("train 1")
        for one in ranks[:rank] + ranks[rank + 1 :]:
            error = one.answer()
            assert error.startswith("PeerError: "), error
            assert f"trainer rank {rank} (" in error, "others may have ended since"
            assert one.process.wait(ANSWER_S) == 3
        assert ranks[rank].process.wait(ANSWER_S) == (1 if raises else -signal.SIGKILL)


@pytest.mark.parametrize(("trained", "stage"), [("layers.0", 2), ("layers.3", 1), ("lm_head", 1)])
def test_every_rank_refuses_a_stage_with_nothing_to_train(trained: str, stage: int) -> None:
    model, cut = make_model("llama", num_hidden_layers=4), TransformerOverrides()
    for name, weight in model.named_parameters():
        weight.requires_grad_(trained in name)
    check_stages_train(model, 1, cut)
    with pytest.raises(ConfigError, match=f"size=2: stage {stage} has nothing to train; adapt"):
        check_stages_train(model, 2, cut)
    model.get_parameter("model.layers.1.mlp.up_proj.weight").requires_grad_()
    model.get_parameter("model.norm.weight").requires_grad_()
    check_stages_train(model, 2, cut)
