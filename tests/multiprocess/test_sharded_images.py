"""Ranks that share a vision-language model train on images like one that has all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import DataParallel
from tests.multiprocess.test_sharded_trainer import assert_like, copies
from tests.support.rank_peer import NUM_GROUPS, batch_of
from tests.support.tiny_policy import make_config
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


@pytest.mark.parametrize(
    ("family", "world_size", "layout"),
    [
        ("qwen2_5_vl", 2, {}),
        # A pair that shares tokens divides one or two images, or none.
        ("qwen2_vl", 4, {"fsdp_size": 4, "ulysses_sequence_parallel_size": 2}),
        ("qwen3_vl", 2, {"fsdp_size": 1, "ulysses_sequence_parallel_size": 2}),
        (
            "qwen3_vl_moe",
            4,
            {"expert_parallel_size": 2, "fsdp_size": 4, "ulysses_sequence_parallel_size": 2},
        ),
    ],
)
def test_they_train_like_one_whatever_images_a_ranks_rows_have(
    family: str, world_size: int, layout: dict[str, int], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    save_model(family, model)
    single = Learner(make_config(model, NUM_GROUPS, **ACTOR), DataParallel(), total_steps=10)
    before = copies(single)
    divided = ACTOR["fsdp_config"] | layout
    with trainer(model, world_size, **(ACTOR | {"fsdp_config": divided})) as ranks:
        for number in (1, 2):
            expected = single.train_step(batch_of(model, number), number)
            assert_like(ranks[0].command(f"train {number}"), expected)
        ranks[0].command(f"weights {tmp_path / 'two'}")
        found = load_file(tmp_path / "two")
        assert found.keys() == before.keys()
        for name, weight in copies(single).items():
            torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5, msg=name)
            assert not torch.equal(weight, before[name]), name
        assert [rank.finish() for rank in ranks] == [0] * world_size
