"""Ranks that divide the experts of each layer: gradients of transformers' own modules, training
like one rank, and an end where one of them dies.
"""

from __future__ import annotations

import math
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import DataParallel
from tests.multiprocess.test_sharded_trainer import ACTOR, assert_like, copies
from tests.multiprocess.test_trainer_ranks import ANSWER_S, Rank, trainer
from tests.support.gradient_peer import loss_of, make_rows
from tests.support.rank_peer import NUM_EXPERTS, NUM_GROUPS
from tests.support.tiny_policy import make_batch, make_config, routed, save_model

Weights = dict[str, torch.Tensor]


def transformers_gradients(folder: Path) -> Weights:
    """Of each row alone, by the family's own modules."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for row in make_rows():
        ids = torch.tensor([[*row.prompt_token_ids.tolist(), *row.token_ids.tolist()]])
        start = row.prompt_token_ids.size
        logprobs = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
        labels = ids[0, start:]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        loss_of(logprobs.gather(1, labels[:, None])[:, 0], entropy, labels).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def rank_gradients(
    folder: Path, file: Path, world_size: int, *, recomputes: bool, **layout: int
) -> tuple[Weights, list[dict[str, float]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = {
        "model": str(folder),
        "file": str(file),
        "layout": layout,
        "recomputes": recomputes,
    }
    with ExitStack() as stack:
        ranks = [
            Rank(rank, world_size, port, arguments, "tests.support.gradient_peer")
            for rank in range(world_size)
        ]
        for rank in ranks:
            stack.callback(rank.end)
        answers = [rank.answer() for rank in ranks]
    return load_file(file), answers


@pytest.mark.parametrize(
    ("world_size", "experts", "sharing", "fsdp_size", "recomputes", "num_experts"),
    [
        (2, 2, 1, -1, False, 8),
        (4, 4, 1, -1, True, 8),
        (4, 2, 1, -1, False, 8),
        (4, 2, 2, -1, True, 8),
        (4, 2, 1, 2, True, 8),  # two copies
        (4, 2, 4, -1, False, 6),  # three experts a rank, each shared by two ranks
    ],
)
def test_gradients_are_those_of_transformers_whatever_the_layout(
    world_size: int,
    experts: int,
    sharing: int,
    fsdp_size: int,
    recomputes: bool,
    num_experts: int,
    tmp_path: Path,
) -> None:
    changes = {"num_experts": num_experts, "num_key_value_heads": 4, "norm_topk_prob": recomputes}
    folder = save_model(tmp_path / "model", "qwen3_moe", **changes)
    found, answers = rank_gradients(
        folder,
        tmp_path / "gradients",
        world_size,
        recomputes=recomputes,
        fsdp_size=fsdp_size,
        ulysses_sequence_parallel_size=sharing,
        expert_parallel_size=experts,
    )
    expected = transformers_gradients(folder)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-5, name
    norm = math.sqrt(sum(float(one.double().square().sum()) for one in expected.values()))
    copy = sum(one.numel() for one in expected.values()) / (
        fsdp_size if fsdp_size > 0 else world_size
    )
    for answer in answers:
        assert answer["norm"] == pytest.approx(norm, rel=1e-5)
        assert answer["held"] == pytest.approx(copy, rel=0.05)


R2: dict[str, Any] = {"router_replay": {"mode": "R2"}, "ppo_epochs": 2}
R3: dict[str, Any] = {"router_replay": {"mode": "R3"}, "ppo_epochs": 2}


@pytest.mark.parametrize(
    ("world_size", "layout", "recomputes", "changes"),
    [
        (2, {"expert_parallel_size": 2}, False, {}),
        (4, {"expert_parallel_size": 2, "fsdp_size": 2}, True, R2),
        (4, {"expert_parallel_size": 4, "ulysses_sequence_parallel_size": 2}, False, R3),
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
    single = Learner(make_config(folder, NUM_GROUPS, **settings), DataParallel(), total_steps=10)
    train = "routed" if changes is R3 else "train"

    def alone(number: int) -> dict[str, float]:
        batch = make_batch(NUM_GROUPS, seed=number)
        return single.train_step(routed(batch, NUM_EXPERTS) if changes is R3 else batch, number)

    divided = settings | {"fsdp_config": {"dtype": "float32", **layout}}
    with trainer(folder, world_size, recomputes=recomputes, **divided) as ranks:
        for number in (1, 2, 3):
            found, expected = ranks[0].command(f"{train} {number}"), alone(number)
            assert_like(found, expected)
            assert found["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], abs=1e-5)
        saved = tmp_path / "saved" / "actor"
        ranks[0].command(f"save {saved}")
        after = ranks[0].command(f"{train} 4")
        ranks[0].command(f"load {saved}")
        again = ranks[0].command(f"{train} 4")
        assert again["actor/grad_norm"] == after["actor/grad_norm"]
        ranks[0].command(f"weights {tmp_path / 'weights'}")
        assert [rank.finish() for rank in ranks] == [0] * world_size
    single.load(saved)
    assert_like(alone(4), after)
    weights = load_file(tmp_path / "weights")
    for name, weight in copies(single).items():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=1e-5, msg=name)


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
