"""Four ranks that hold two copies of the policy, each in two shards, train and publish like one.

The critic has a mesh of its own: one copy in four shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.learner import learner as learner_module
from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from tests.multiprocess.test_sharded_trainer import FROZEN, assert_like, copies, step, wire_digest
from tests.support.rank_peer import NUM_GROUPS
from tests.support.tiny_policy import freezing, make_config, save_model, with_critic
from tests.support.trainer_ranks import trainer

# Groups of 4 rows over 4 ranks: some have two micro-batches where others have one.
ACTOR: dict[str, Any] = {
    "ppo_mini_batch_size": 2,
    "use_dynamic_bsz": True,
    "ppo_max_token_len_per_gpu": 30,
    "use_kl_loss": True,
    "fsdp_config": {"dtype": "float32", "fsdp_size": 2},
}


def whole_learner(model: Path) -> Learner:
    config = with_critic(make_config(model, NUM_GROUPS, **ACTOR))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner_module, "load_policy", freezing(FROZEN))
        return Learner(config, ParallelContext(), total_steps=10)


def test_two_copies_in_two_shards_train_and_publish_like_one_whole_model(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    single = whole_learner(model)
    with trainer(model, 4, frozen=FROZEN, **ACTOR) as ranks:
        before = copies(single)
        assert_like(ranks[0].command("train 1"), step(single, 1))
        ranks[0].command(f"weights {tmp_path / 'four'}")
        found, expected = load_file(tmp_path / "four"), copies(single)
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5, msg=name)
        assert torch.equal(found[FROZEN], before[FROZEN])
        folder = tmp_path / "saved" / "actor"
        single.save(folder)
        ranks[0].command(f"load {folder}")
        assert ranks[0].command("publish 1")["digest"] == wire_digest(single)
        assert_like(ranks[0].command("train 2"), step(single, 2))
        assert [rank.finish() for rank in ranks] == [0, 0, 0, 0]
