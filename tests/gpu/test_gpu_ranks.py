"""Ranks on GPUs of their own that divide a model in some way train and save like one, over NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from tests.support.accelerator import accelerator
from tests.support.rank_peer import NUM_GROUPS
from tests.support.tiny_policy import make_batch, make_config, on_device, save_model
from tests.support.trainer_ranks import end, trainer

START_S, DEADLINE_S, GRACE_S = 120.0, 30.0, 30.0
"""A rank's load and NCCL's communicators; a command; the end of a process after it."""


def full(weight: torch.Tensor) -> torch.Tensor:
    """All of a weight, on the CPU."""
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).cpu()


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        pytest.param(2, {}, marks=pytest.mark.devices(2), id="two ranks, shards"),
        pytest.param(
            2,
            {"expert_parallel_size": 2, "param_offload": True, "optimizer_offload": True},
            marks=pytest.mark.devices(2),
            id="two ranks, experts, offload",
        ),
        pytest.param(
            4,
            {"expert_parallel_size": 2, "fsdp_size": 2, "ulysses_sequence_parallel_size": 2},
            marks=pytest.mark.devices(4),
            id="four ranks, experts, sequences and two copies",
        ),
        pytest.param(
            2,
            {"ulysses_sequence_parallel_size": 2},
            marks=pytest.mark.devices(2),
            id="two ranks, sequences",
        ),
        pytest.param(
            2, {"tensor_parallel_size": 2}, marks=pytest.mark.devices(2), id="two ranks, tensor"
        ),
        pytest.param(
            2, {"pipeline_parallel_size": 2}, marks=pytest.mark.devices(2), id="two ranks, stages"
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_train_like_one(
    world_size: int, layout: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", "qwen3_moe")
    precision: dict[str, Any] = {"dtype": dtype, "model_dtype": "float32"}
    exact = dtype == "float32"
    # A reference, sharded as the policy is, takes turns with it on the device.
    settings: dict[str, Any] = {"use_kl_loss": exact}
    names = ["actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/ppo_kl"]
    names += ["actor/kl_loss"] if exact else []
    alone = make_config(folder, NUM_GROUPS, fsdp_config=precision, **settings)
    single = Learner(
        on_device(alone, accelerator()), ParallelContext(accelerator()), total_steps=10
    )
    settings["fsdp_config"] = precision | layout
    with trainer(folder, world_size, START_S, device=accelerator(), **settings) as ranks:
        for number in (1, 2, 3):
            found = ranks[0].command(f"train {number}")
            expected = single.train_step(make_batch(NUM_GROUPS, seed=number), number)
            for name in names:
                near = pytest.approx(
                    expected[name], rel=1e-3 if exact else 0.1, abs=1e-4 if exact else 2e-2
                )
                assert found[name] == near, f"{name} after step {number}"
        # Rows that travel from rank to rank into one file of each.
        ranks[0].command(f"weights {tmp_path / 'weights.safetensors'}")
        end(ranks)
    if exact:  # AdamW takes a step of full length where a gradient is hardly more than rounding
        saved = load_file(tmp_path / "weights.safetensors")
        for name, weight in single.named_weights():
            assert float((saved[name] - full(weight)).abs().mean()) < 1e-4, name


@pytest.mark.devices(2)
def test_all_end_in_time_and_name_the_rank_that_is_killed_in_an_exchange_of_tokens(
    tmp_path: Path,
) -> None:
    folder = save_model(tmp_path / "model", "qwen3_moe")
    layout: dict[str, Any] = {"fsdp_config": {"dtype": "float32", "expert_parallel_size": 2}}
    # Each layer of a pass has two exchanges: this is in the first train batch.
    with trainer(
        folder, 2, DEADLINE_S, device=accelerator(), dies_in_exchange=30, **layout
    ) as ranks:
        ranks[0].tell("train 1")
        error = ranks[0].answer(DEADLINE_S + GRACE_S)
        assert error.startswith(("PeerError: ", "DeadlineError: ")), error
        assert "trainer rank 1" in error
        assert "while training step 1" in error
        assert ranks[0].process.wait(GRACE_S) == 3
