"""Ranks that cut layers train, save, resume and publish like one that holds the model whole.

There are a critic and a reference too. The vocabulary does not divide.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.learner import learner as learner_module
from services.trainer.learner.learner import Learner
from services.trainer.learner.model.loading import load_policy
from services.trainer.learner.model.tensor_cut import check_cuttable
from services.trainer.learner.rank_shares import check_shareable
from services.trainer.learner.ranks import ParallelContext
from sluice.config.schema.actor import ActorFsdpConfig
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.errors import ConfigError
from tests.multiprocess.test_sharded_trainer import ACTOR, assert_like, copies, step, wire_digest
from tests.support.rank_peer import NUM_GROUPS, saved_weights
from tests.support.saved_states import are_equal, optimizer_tensors
from tests.support.steered_process import ANSWER_S
from tests.support.tiny_policy import (
    freezing,
    make_config,
    make_model,
    save_model,
    with_critic,
)
from tests.support.trainer_ranks import trainer

FROZEN = "model.norm.weight"
FLOAT32 = {"dtype": "float32"}
TWO = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("family", "layout", "recomputes", "other", "num_others"),
    [
        ("qwen3", {**TWO, "param_offload": True, "optimizer_offload": True}, False, 1, 2),
        ("qwen3_moe", {**TWO, "ulysses_sequence_parallel_size": 2}, True, 4, 4),
    ],
)
def test_they_train_publish_save_and_resume_like_one(
    family: str,
    layout: dict[str, Any],
    recomputes: bool,
    other: int,
    num_others: int,
    tmp_path: Path,
) -> None:
    # More heads for keys than by default, so that four ranks can resume.
    folder = save_model(tmp_path / "model", family, num_key_value_heads=4)
    settings: dict[str, Any] = {**ACTOR, "fsdp_config": FLOAT32}
    config = with_critic(make_config(folder, NUM_GROUPS, **settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner_module, "load_policy", freezing(FROZEN))
        single = Learner(config, ParallelContext(), total_steps=10)
    cut = settings | {"fsdp_config": {**FLOAT32, **layout}}
    with trainer(folder, 4, frozen=FROZEN, recomputes=recomputes, **cut) as ranks:
        assert_like(ranks[0].command("train 1"), step(single, 1))
        saved = tmp_path / "saved" / "actor"
        ranks[0].command(f"save {saved}")
        published = ranks[0].command("publish 1")["digest"]
    found, expected = saved_weights(saved), copies(single)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5, msg=name)
    single.save(tmp_path / "one" / "actor")
    for role in ("actor", "critic"):  # AdamW's first moments are means of gradients
        moments, means = (optimizer_tensors(tmp_path / one / role) for one in ("saved", "one"))
        for name, moment in means.items():
            scale = max(float(moment.abs().max()), 1e-8)
            torch.testing.assert_close(
                moments[name] / scale, moment / scale, atol=1e-4, rtol=0, msg=name
            )
    again = tmp_path / "again" / "actor"
    cut = settings | {"fsdp_config": {**FLOAT32, "tensor_parallel_size": other}}
    with trainer(folder, num_others, frozen=FROZEN, **cut) as ranks:
        ranks[0].command(f"load {saved}")
        ranks[0].command(f"save {again}")
    assert are_equal(saved, again)
    single.load(saved)
    assert published == wire_digest(single)


@pytest.mark.parametrize(
    ("family", "changes", "size", "why"),
    [
        ("llama", {}, 4, "=4 does not divide the 2 key-value heads of the llama model; give 2"),
        ("qwen3", {"intermediate_size": 45}, 2, "=2 does not divide the 45 columns .*; give 1"),
        (
            "llama",
            {"vocab_size": 9, "num_attention_heads": 4, "num_key_value_heads": 4},
            4,
            "=4: 9 rows of the vocabulary .* leave none for the last rank; give 3",
        ),
        ("gpt_neox", {}, 2, "=2: the trainer cuts .* none of a gpt_neox model; set it to 1"),
    ],
)
def test_a_model_that_ranks_cannot_cut_is_refused_with_the_sizes_that_can(
    family: str, changes: dict[str, int], size: int, why: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", family, **changes)
    loaded = load_policy(ModelConfig(path=str(folder)), ActorFsdpConfig(), 28)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size{why}"):
        check_cuttable(loaded.model, size)


def test_sequences_are_shared_by_the_heads_that_a_cut_leaves() -> None:
    config = make_model("llama").config  # 4 heads, 2 of them for keys
    check_shareable(2, config, tensor=2)
    left = r"share 2 attention heads and 1 key-value heads that \S*tensor_parallel_size=2 leaves"
    with pytest.raises(ConfigError, match=left):
        check_shareable(4, config, tensor=2)


def test_all_end_where_one_dies_in_a_layer(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    layout: dict[str, Any] = {"fsdp_config": {**FLOAT32, **TWO}}
    # Tokens are gathered five times a pass of the two layers, and the check of packing has 29 of
    # these: this one is in the first train batch.
    with trainer(folder, 4, dies_in_exchange=35, **layout) as ranks:
        ranks[0].tell("train 1")
        for rank in ranks[:-1]:
            error = rank.answer()
            assert error.startswith("PeerError: "), error
            assert "trainer rank 3 (" in error, "others may have ended since"
            assert "while training step 1" in error
            assert rank.process.wait(ANSWER_S) == 3
