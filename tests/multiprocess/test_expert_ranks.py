"""Ranks that divide the experts of each layer train like one, and end where one of them dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from tests.multiprocess.test_sharded_trainer import ACTOR, assert_like, copies
from tests.support.rank_peer import NUM_EXPERTS, NUM_GROUPS, saved_weights
from tests.support.steered_process import ANSWER_S
from tests.support.tiny_policy import make_batch, make_config, routed, save_model
from tests.support.trainer_ranks import trainer

R2: dict[str, Any] = {"router_replay": {"mode": "R2"}, "ppo_epochs": 2}
R3: dict[str, Any] = {"router_replay": {"mode": "R3"}}


@pytest.mark.parametrize(
    ("world_size", "layout", "recomputes", "changes"),
    [
        (4, {"expert_parallel_size": 4, "ulysses_sequence_parallel_size": 2}, False, R3),
        (4, {"pipeline_parallel_size": 2, "expert_parallel_size": 2}, True, R2),
        (4, {"expert_parallel_size": 2, "tensor_parallel_size": 2}, True, R3),
    ],
)
def test_they_train_save_and_resume_like_one(
    world_size: int,
    layout: dict[str, int],
    recomputes: bool,
    changes: dict[str, Any],
    tmp_path: Path,
) -> None:
    folder = save_model(tmp_path / "model", "qwen3_moe")
    settings = ACTOR | changes | {"fsdp_config": {"dtype": "float32"}}
    single = Learner(make_config(folder, NUM_GROUPS, **settings), ParallelContext(), total_steps=10)
    train = "routed" if changes is R3 else "train"

    def alone(number: int) -> dict[str, float]:
        batch = make_batch(NUM_GROUPS, seed=number)
        return single.train_step(
            routed(batch, NUM_EXPERTS, without=2) if changes is R3 else batch, number
        )

    divided = settings | {"fsdp_config": {"dtype": "float32", **layout}}
    with trainer(folder, world_size, recomputes=recomputes, **divided) as ranks:
        found, expected = ranks[0].command(f"{train} 1"), alone(1)
        assert_like(found, expected)
        assert found["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], abs=1e-5)
        saved, later = tmp_path / "saved" / "actor", tmp_path / "later" / "actor"
        ranks[0].command(f"save {saved}")
        weights = saved_weights(saved)
        for name, weight in copies(single).items():
            torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=1e-5, msg=name)
        # The ranks have not made step 2: what they continue with is what they read.
        single.load(saved)
        alone(2)
        single.save(later)
        ranks[0].command(f"load {later}")
        assert_like(ranks[0].command(f"{train} 3"), alone(3))
        assert [rank.finish() for rank in ranks] == [0] * world_size


def test_all_end_where_one_dies_in_an_exchange_of_tokens(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen3_moe")
    layout: dict[str, Any] = {"fsdp_config": {"dtype": "float32", "expert_parallel_size": 2}}
    # Each layer of a pass has two exchanges: this is in the first train batch.
    with trainer(folder, 4, dies_in_exchange=30, **layout) as ranks:
        ranks[0].tell("train 1")
        for rank in ranks[:-1]:
            error = rank.answer()
            assert error.startswith("PeerError: "), error
            assert "trainer rank 3 (" in error, "others may have ended since"
            assert "while training step 1" in error
            assert rank.process.wait(ANSWER_S) == 3
