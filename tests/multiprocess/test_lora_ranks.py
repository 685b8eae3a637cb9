"""Ranks that share a model with adapters train, save and publish like one that holds it whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from tests.multiprocess.test_sharded_trainer import assert_like, step
from tests.support.rank_peer import NUM_GROUPS
from tests.support.saved_states import optimizer_tensors
from tests.support.streamed_weights import streamed
from tests.support.tiny_policy import adapting, make_config, save_model
from tests.support.trainer_ranks import trainer
from tests.support.weight_digest import plain_digest

ADAPTERS = {"lora_rank": 3, "lora_alpha": 6.0}
ACTOR: dict[str, Any] = {
    "ppo_micro_batch_size_per_gpu": 3,
    "ppo_mini_batch_size": 2,
    "use_kl_loss": True,
    "entropy_coeff": 0.01,
}


def adapters(actor: Path) -> dict[str, torch.Tensor]:
    return load_file(actor / "lora_adapter" / "adapter_model.safetensors")


def make_learner(folder: Path, **actor: Any) -> Learner:
    config = adapting(make_config(folder, NUM_GROUPS, **actor), **ADAPTERS)
    return Learner(config, ParallelContext(), total_steps=10)


@pytest.mark.parametrize(
    ("family", "world_size", "sizes", "offloads"),
    [
        ("qwen3", 2, {}, True),
        ("qwen3_moe", 4, {"ulysses_sequence_parallel_size": 2, "expert_parallel_size": 2}, False),
        ("qwen3_moe", 4, {"tensor_parallel_size": 2, "expert_parallel_size": 2}, True),
    ],
)
def test_any_layout_trains_and_saves_adapters_as_one_rank_does(
    family: str, world_size: int, sizes: dict[str, int], offloads: bool, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", family)
    layout = {"dtype": "float32", "optimizer_offload": offloads, **sizes}
    keys = {"enable_gradient_checkpointing": offloads, "enable_activation_offload": offloads}
    single = make_learner(folder, **ACTOR)
    settings = ACTOR | {"fsdp_config": layout}
    with trainer(folder, world_size, adapters=ADAPTERS | keys, **settings) as ranks:
        assert_like(ranks[0].command("train 1"), step(single, 1))
        ranks[0].command(f"save {tmp_path / 'many' / 'actor'}")
        single.save(tmp_path / "one" / "actor")
        ranks[0].command(f"load {tmp_path / 'one' / 'actor'}")
        again = ranks[0].command("train 2")
    for read in (adapters, optimizer_tensors):
        found, expected = (read(tmp_path / name / "actor") for name in ("many", "one"))
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4, msg=name)
    assert_like(again, step(single, 2))


def test_after_the_first_version_only_adapters_travel(tmp_path: Path) -> None:
    widths = {"intermediate_size": 256, "moe_intermediate_size": 256}
    folder = save_model(tmp_path / "model", "qwen3_moe", hidden_size=128, **widths)
    single = make_learner(folder)
    layout = {"dtype": "float32", "expert_parallel_size": 2}
    with trainer(folder, 2, adapters=ADAPTERS, fsdp_config=layout) as ranks:
        for version in (1, 2):
            step(single, version)
            single.save(tmp_path / f"{version}" / "actor")
            ranks[0].command(f"load {tmp_path / f'{version}' / 'actor'}")
            published = ranks[0].command(f"publish {version}")
            wire = {n: w.bfloat16() for n, w in streamed(single).items()}
            # The proof covers the frozen weights too.
            assert published["digest"] == plain_digest(wire)
            adapters = sum(w.nbytes for name, w in wire.items() if ".lora_" in name)
            if version == 1:
                assert published["sent"] == published["all"]
            else:
                assert published["sent"] < 1.2 * adapters < 0.1 * published["all"]
