"""Two ranks that share one model train, save, resume and publish like one that holds it whole.

The model has a tied and a frozen weight; there are a critic and a reference too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from services.trainer.learner import learner as learner_module
from services.trainer.learner.learner import Learner
from services.trainer.learner.rank_shares import check_shareable
from services.trainer.learner.ranks import ParallelContext
from sluice.errors import ConfigError
from tests.support.rank_peer import NUM_GROUPS
from tests.support.saved_states import model_tensors, optimizer_tensors
from tests.support.tiny_policy import (
    freezing,
    make_batch,
    make_config,
    make_model,
    save_model,
    with_critic,
)
from tests.support.trainer_ranks import Rank, trainer
from tests.support.weight_digest import plain_digest

FROZEN = "model.layers.0.mlp.up_proj.weight"
TIED = "model.embed_tokens.weight"
# Rows are few and of many lengths: the ranks differ in their number of micro-batches.
ACTOR: dict[str, Any] = {
    "ppo_micro_batch_size_per_gpu": 3,
    "ppo_mini_batch_size": 2,
    "use_kl_loss": True,
    "entropy_coeff": 0.01,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ranks(model: Path) -> Iterator[list[Rank]]:
    with trainer(model, 2, frozen=FROZEN, **ACTOR) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def single(model: Path) -> Learner:
    """One rank in this process."""
    config = with_critic(make_config(model, NUM_GROUPS, **ACTOR))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner_module, "load_policy", freezing(FROZEN))
        return Learner(config, ParallelContext(), total_steps=10)


def assert_like(found: dict[str, float], expected: dict[str, float]) -> None:
    # Experts' loads count packed tokens, and ranks pack other rows together.
    for name, value in expected.items():
        if not name.startswith(("timing", "perf", "global_seqlen", "actor/moe")):
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def step(learner: Learner, number: int) -> dict[str, float]:
    return learner.train_step(make_batch(NUM_GROUPS, seed=number), number)


def copies(learner: Learner) -> dict[str, torch.Tensor]:
    return {
        name: (weight.full_tensor() if isinstance(weight, DTensor) else weight).clone()
        for name, weight in learner.named_weights()
    }


def wire_digest(learner: Learner) -> str:
    return plain_digest({name: w.bfloat16() for name, w in learner.named_weights()})


def test_they_train_like_one(ranks: list[Rank], single: Learner, tmp_path: Path) -> None:
    before = copies(single)
    for number in (1, 2):
        assert_like(ranks[0].command(f"train {number}"), step(single, number))
    ranks[0].command(f"weights {tmp_path / 'two'}")
    found, expected = load_file(tmp_path / "two"), copies(single)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5, msg=name)
    assert torch.equal(found[FROZEN], before[FROZEN])
    assert not torch.equal(found[TIED], before[TIED])


def test_what_shards_wrote_continues_whole_and_the_other_way_round(
    ranks: list[Rank], single: Learner, tmp_path: Path
) -> None:
    sharded, whole = tmp_path / "a" / "actor", tmp_path / "b" / "actor"
    ranks[0].command("train 3")
    ranks[0].command(f"save {sharded}")
    single.load(sharded)
    single.save(whole)
    for folder in ("actor", "critic"):
        for read in (model_tensors, optimizer_tensors):
            ours, theirs = read(tmp_path / "a" / folder), read(tmp_path / "b" / folder)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    continued = ranks[0].command("train 4")
    assert_like(step(single, 4), continued)
    ranks[0].command(f"load {whole}")
    again = ranks[0].command("train 4")
    assert again["actor/grad_norm"] == continued["actor/grad_norm"]
    assert again["critic/vf_loss"] == continued["critic/vf_loss"]


def test_replicas_get_the_bytes_that_a_whole_model_gives_them(
    ranks: list[Rank], single: Learner, tmp_path: Path
) -> None:
    for version, rows in ((1, 0), (2, 1)):
        with torch.no_grad():
            dict(single.named_weights())[TIED][:rows] += 0.5
        folder = tmp_path / f"{version}" / "actor"
        single.save(folder)
        ranks[0].command(f"load {folder}")
        published = ranks[0].command(f"publish {version}")
        assert published["digest"] == wire_digest(single)
        is_sparse = published["sent"] < 0.2 * published["all"]
        assert is_sparse == (version == 2)


def test_a_reader_that_fails_in_the_middle_leaves_the_ranks_where_they_were(
    ranks: list[Rank], tmp_path: Path
) -> None:
    ranks[0].command("train 5")
    ranks[0].command(f"weights {tmp_path / 'before'}")
    ranks[0].command("fail reader")
    ranks[0].command(f"weights {tmp_path / 'after'}")
    before, after = load_file(tmp_path / "before"), load_file(tmp_path / "after")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert ranks[0].command("train 6")["actor/grad_norm"] > 0


def test_each_holds_about_half(ranks: list[Rank], single: Learner) -> None:
    policy = sum(w.numel() * w.element_size() for _, w in single.named_weights())
    # Weights and two moments of policy and critic, and the reference's weights. No gradients are
    # left between steps; the critic has one output instead of the tied vocabulary's.
    whole = 3 * policy + 3 * policy + policy
    assert [rank.finish() for rank in ranks] == [0, 0]
    held = ranks[1].answer()["held_bytes"]
    assert 0.45 * whole < held < 0.6 * whole


def test_skipped_samples_change_nothing_even_where_a_step_has_no_others(
    model: Path, tmp_path: Path
) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for skips in (False, True):
        with trainer(model, 2, skips=skips, ppo_mini_batch_size=2) as ranks:
            ranks[0].command("train 1")
            metrics = ranks[0].command("uniform 2")
            assert metrics.get("actor/skipped_samples", 0.0) == 8.0 * skips
            ranks[0].command(f"weights {tmp_path / str(skips)}")
        found.append(load_file(tmp_path / str(skips)))
    whole, skipped = found
    for name, weight in whole.items():
        torch.testing.assert_close(skipped[name], weight, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", {}),
        ("qwen3_moe", {"expert_parallel_size": 2}),
        ("qwen3", {"tensor_parallel_size": 2}),
        ("qwen3", {"pipeline_parallel_size": 2}),
    ],
)
def test_two_ranks_in_bfloat16_train_like_one(
    family: str, layout: dict[str, int], tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", family)
    mixed: dict[str, Any] = {"fsdp_config": {"dtype": "bfloat16"}, "ppo_mini_batch_size": 2}
    divided = mixed | {"fsdp_config": {"dtype": "bfloat16", **layout}}
    single = Learner(make_config(folder, NUM_GROUPS, **mixed), ParallelContext(), total_steps=10)
    before = copies(single)
    expected = step(single, 1)
    with trainer(folder, 2, **divided) as ranks:
        found = ranks[0].command("train 1")
        ranks[0].command(f"weights {tmp_path / 'weights'}")
    # Ranks pack other rows together, so roundings differ.
    assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=0.05)
    weights = load_file(tmp_path / "weights")
    moved = {name: weight - before[name] for name, weight in copies(single).items()}
    gap = sum((weights[name] - before[name] - one).square().sum() for name, one in moved.items())
    assert gap < 0.1**2 * sum(one.square().sum() for one in moved.values())


@pytest.mark.parametrize(
    ("family", "world_size", "sharing", "fsdp_size", "recomputes"),
    [
        ("qwen3_moe", 4, 2, -1, True),
        ("gpt_neox", 2, 2, -1, False),
        ("llama", 4, 4, 1, True),  # fewer key-value heads than ranks
    ],
)
def test_ranks_that_share_sequences_train_like_one(
    family: str, world_size: int, sharing: int, fsdp_size: int, recomputes: bool, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", family)
    # A reference is a second model that passes run through.
    settings = {**ACTOR, "fsdp_config": {"dtype": "float32"}}
    single = Learner(make_config(folder, NUM_GROUPS, **settings), ParallelContext(), total_steps=10)
    layout = {"ulysses_sequence_parallel_size": sharing, "fsdp_size": fsdp_size}
    shared = settings | {"fsdp_config": {"dtype": "float32", **layout}}
    with trainer(folder, world_size, recomputes=recomputes, **shared) as ranks:
        assert_like(ranks[0].command("train 1"), step(single, 1))
        ranks[0].command(f"weights {tmp_path / 'weights'}")
    found, expected = load_file(tmp_path / "weights"), copies(single)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5, msg=name)


def test_a_critics_gradients_are_one_ranks_where_ranks_share_sequences(
    model: Path, tmp_path: Path
) -> None:
    frozen = "model.norm.weight"
    settings = {**ACTOR, "fsdp_config": {"dtype": "float32"}}
    config = with_critic(make_config(model, NUM_GROUPS, **settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner_module, "load_policy", freezing(frozen))
        single = Learner(config, ParallelContext(), total_steps=10)
    layout = {"dtype": "float32", "ulysses_sequence_parallel_size": 2}
    shared = settings | {"fsdp_config": layout}
    with trainer(model, 2, frozen=frozen, **shared) as ranks:
        assert_like(ranks[0].command("train 1"), step(single, 1))
        ranks[0].command(f"save {tmp_path / 'saved' / 'actor'}")
    single.save(tmp_path / "one" / "actor")
    # AdamW's first moments are means of gradients.
    found, expected = (optimizer_tensors(tmp_path / one / "critic") for one in ("saved", "one"))
    assert found.keys() == expected.keys()
    for name, moment in expected.items():
        scale = max(float(moment.abs().max()), 1e-8)
        torch.testing.assert_close(found[name] / scale, moment / scale, atol=1e-4, rtol=0, msg=name)


def test_a_size_that_does_not_divide_is_refused_with_those_that_do(model: Path) -> None:
    three = {"fsdp_config": {"dtype": "float32", "ulysses_sequence_parallel_size": 3}}
    with pytest.raises(ConfigError, match=r"size=3 does not divide the 1 trainer ranks.*give 1"):
        Learner(make_config(model, NUM_GROUPS, **three), ParallelContext(), total_steps=10)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "possible"),
    [(6, 6, 4, "1, 2, 3, 6"), (12, 2, 5, "1, 2, 4, 6, 12"), (12, 2, 3, "1, 2, 4, 6, 12")],
)
def test_heads_that_cannot_be_shared_are_named_with_possible_sizes(
    heads: int, kv_heads: int, size: int, possible: str
) -> None:
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = make_model("llama", hidden_size=48, **counts).config
    with pytest.raises(ConfigError, match=rf"cannot share {heads} .* give one of {possible}$"):
        check_shareable(size, config)


def test_a_rotation_that_depends_on_the_length_is_refused_where_ranks_share_sequences() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = AutoConfig.for_model("llama", rope_parameters=rope)
    with pytest.raises(ConfigError, match=r"positions \(dynamic\) depends on the length"):
        check_shareable(2, config)
