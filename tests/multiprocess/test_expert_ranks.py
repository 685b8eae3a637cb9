"""Ranks that divide the experts of each layer: gradients of transformers' own modules, training
like one rank, and an end where one of them dies.
"""

from __future__ import annotations

import json
import math
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import DataParallel
from sluice.errors import ConfigError
from tests.multiprocess.test_sharded_trainer import ACTOR, assert_like, copies, step
from tests.multiprocess.test_trainer_ranks import ANSWER_S, LONG_S, Rank, trainer
from tests.support.gradient_peer import loss_of, make_rows
from tests.support.rank_peer import NUM_GROUPS
from tests.support.tiny_policy import make_config, save_model

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
    copy = sum(one.numel() for one in expected.values()) / (fsdp_size if fsdp_size > 0 else world_size)
    for answer in answers:
        assert answer["norm"] == pytest.approx(norm, rel=1e-5)
        assert answer["held"] == pytest.approx(copy, rel=0.05)
