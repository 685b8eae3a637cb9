"""Checkpoints of ranks in processes: any layout resumes them, and a dead rank spoils none."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.trainer.learner.checkpoint import CheckpointStore
from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from tests.support.rank_peer import BUCKET_BYTES, NUM_GROUPS
from tests.support.saved_states import are_equal, model_tensors
from tests.support.steered_process import ANSWER_S
from tests.support.tiny_policy import make_batch, make_config, save_model
from tests.support.trainer_ranks import trainer

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "two copies of two shards": (4, {"fsdp_size": 2}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "two shards": (2, {}),
    "divided by two ranks, in two copies": (4, {"expert_parallel_size": 2, "fsdp_size": 2}),
}


def settings(layout: dict[str, Any], **actor: Any) -> dict[str, Any]:
    fsdp = {"dtype": "float32", **layout}
    return {"ppo_micro_batch_size_per_gpu": 3, "fsdp_config": fsdp, **actor}


def assert_shared_evenly(actor: Path) -> None:
    """Ranks with a copy of the same piece take turns."""
    sizes = [file.stat().st_size for file in actor.glob("optimizer-*.safetensors")]
    assert max(sizes) < 1.5 * sum(sizes) / len(sizes)


@pytest.mark.parametrize(
    ("family", "layout", "others"),
    [
        ("qwen3", {}, LAYOUTS),
        # Experts cut by two dimensions of the mesh.
        ("qwen3_moe", {"expert_parallel_size": 2}, EXPERT_LAYOUTS),
    ],
    ids=["dense", "experts"],
)
def test_four_ranks_checkpoint_resumes_bit_for_bit_in_any_other_layout(
    family: str,
    layout: dict[str, Any],
    others: dict[str, tuple[int, dict[str, Any]]],
    tmp_path: Path,
) -> None:
    model = save_model(tmp_path / "model", family)
    saved = tmp_path / "four" / "actor"
    with trainer(model, 4, **settings(layout)) as ranks:
        ranks[0].command("train 1")
        # Beside its own parts a rank holds a bucket and the pieces that make it (an expert is two
        # buckets long here), and the numbers by which ranks keep step.
        assert ranks[0].command(f"count {saved}") <= 2 * BUCKET_BYTES + 64
    published, found = model_tensors(saved), load_file(model / "model.safetensors")
    assert published.keys() == found.keys()  # also of experts: a tensor each
    assert {name: t.shape for name, t in published.items()} == {
        n: t.shape for n, t in found.items()
    }
    files = sorted(file.name for file in saved.glob("optimizer*"))
    assert files == [
        *(f"optimizer-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)),
        "optimizer.index.json",
    ]
    assert_shared_evenly(saved)
    for name, (world_size, other) in others.items():
        again = tmp_path / name.replace(" ", "-") / "actor"
        with trainer(model, world_size, **settings(other)) as ranks:
            ranks[0].command(f"load {saved}")
            ranks[0].command(f"save {again}")
        assert are_equal(saved, again)
        assert_shared_evenly(again)
    alone = Learner(
        make_config(model, NUM_GROUPS, **settings({})), ParallelContext(), total_steps=10
    )
    alone.load(saved)
    alone.save(tmp_path / "alone" / "actor")
    assert are_equal(saved, tmp_path / "alone" / "actor")
    loaded = AutoModelForCausalLM.from_pretrained(saved / "huggingface", dtype="auto")
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, dict(alone.named_weights())[name]), name


def test_a_whole_optimizer_file_of_an_earlier_version_resumes_in_shards(tmp_path: Path) -> None:
    model, actor = save_model(tmp_path / "model"), tmp_path / "old" / "actor"
    learner = Learner(
        make_config(model, NUM_GROUPS, **settings({})), ParallelContext(), total_steps=10
    )
    learner.train_step(make_batch(NUM_GROUPS), 1)
    learner.save(actor)
    # What one rank writes is what every version wrote: one file of whole tensors.
    whole = load_file(actor / "optimizer.safetensors")
    state = learner._optimizer.state_tensors()
    assert {n: t.shape for n, t in whole.items()} == {n: t.shape for n, t in state.items()}
    assert all(torch.equal(whole[name], tensor) for name, tensor in state.items())
    with trainer(model, 2, **settings({})) as ranks:
        ranks[0].command(f"load {actor}")
        ranks[0].command(f"save {tmp_path / 'new' / 'actor'}")
    assert are_equal(actor, tmp_path / "new" / "actor")


def wait_for(folder: Path, pattern: str) -> None:
    ends_s = time.monotonic() + ANSWER_S
    while not any(folder.glob(pattern)):
        assert time.monotonic() < ends_s, f"{folder}/{pattern} does not appear"
        time.sleep(0.02)


def test_training_continues_while_a_checkpoint_is_written_and_does_not_change_it(
    tmp_path: Path,
) -> None:
    model, root, held = save_model(tmp_path / "model"), tmp_path / "run", tmp_path / "held"
    held.touch()
    with trainer(model, 2, holds=held, **settings({}, checkpoint={"async_save": True})) as ranks:
        ranks[0].command("train 1")
        assert ranks[0].command(f"begin {root / 'global_step_1'}") == "begun"
        wait_for(root, ".global_step_1.partial/actor/huggingface/*.safetensors")
        ranks[0].command("train 2")
        assert not (root / "global_step_1").exists()
        held.unlink()
        assert ranks[0].command("finish 1") == str(root / "global_step_1")
        assert [rank.finish() for rank in ranks] == [0, 0]
    with trainer(model, 2, **settings({})) as ranks:
        ranks[0].command("train 1")
        ranks[0].command(f"save {tmp_path / 'expected' / 'actor'}")
    assert are_equal(root / "global_step_1" / "actor", tmp_path / "expected" / "actor")
    found = CheckpointStore(root).latest()
    assert found is not None
    assert (found.step, found.progress.low_water) == (1, 1)


def test_a_rank_killed_while_it_writes_leaves_the_former_checkpoint_to_resume_from(
    tmp_path: Path,
) -> None:
    model, root, held = save_model(tmp_path / "model"), tmp_path / "run", tmp_path / "held"
    aside = settings({}, checkpoint={"async_save": True})
    with trainer(model, 2, holds=held, **aside) as ranks:
        ranks[0].command("train 1")
        ranks[0].command(f"begin {root / 'global_step_1'}")
        ranks[0].command("finish 1")
        ranks[0].command("train 2")
        held.touch()
        ranks[0].command(f"begin {root / 'global_step_2'}")
        wait_for(root, ".global_step_2.partial/actor/huggingface/*.safetensors")
        ranks[1].process.kill()
        held.unlink()
        ended = ranks[0].command("finish 2")
        assert ended.startswith(("PeerError", "DeadlineError"))
        assert "writing a checkpoint" in ended or "writing the model's files" in ended
        assert ranks[0].process.wait(ANSWER_S) == 3
        assert ranks[1].process.wait(ANSWER_S) == -signal.SIGKILL
    with trainer(model, 2, **aside) as ranks:
        assert ranks[0].command(f"resume {root}") == 1
        ranks[0].command("train 2")
        ranks[0].command(f"begin {root / 'global_step_2'}")
        ranks[0].command("finish 2")
        assert [rank.finish() for rank in ranks] == [0, 0]
    assert sorted(one.name for one in root.iterdir()) == [
        "global_step_1",
        "global_step_2",
        "latest_checkpointed_iteration.txt",
    ]


@pytest.mark.parametrize(
    ("rank", "refused", "adapters"),
    [
        (0, "model.safetensors.index.json", None),
        (1, "model-00002-of-00002.safetensors", None),
        (1, "huggingface", {"lora_rank": 3}),
        (0, "adapter_model.safetensors", {"lora_rank": 3}),
    ],
)
def test_a_rank_that_cannot_make_its_file_ends_the_save_of_all_and_training_may_continue(
    rank: int, refused: str, adapters: dict[str, Any] | None, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model")
    refuses = (rank, refused)
    with trainer(model, 2, adapters=adapters, refuses=refuses, **settings({})) as ranks:
        ranks[0].command("train 1")
        error = ranks[0].command(f"save {tmp_path / 'actor'}")["error"]
        assert refused in error if rank == 0 else error.startswith("trainer rank 1 could not write")
        assert "actor/grad_norm" in ranks[0].command("train 2")
        assert [one.finish() for one in ranks] == [0, 0]
