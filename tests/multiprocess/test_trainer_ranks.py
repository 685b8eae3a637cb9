"""Trainer ranks in processes of their own: two train like one, and none waits forever."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from tests.support.patience import in_time
from tests.support.rank_peer import NUM_GROUPS
from tests.support.steered_process import ANSWER_S
from tests.support.tiny_policy import make_batch, make_config, save_model
from tests.support.trainer_ranks import trainer

Metrics = dict[str, float]
Weights = dict[str, torch.Tensor]

SHORT_S = 6.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def train_one(model: Path, steps: int, **actor: object) -> tuple[list[Metrics], Weights]:
    """In this process."""
    learner = Learner(make_config(model, NUM_GROUPS, **actor), ParallelContext(), total_steps=10)
    metrics = [learner.train_step(make_batch(NUM_GROUPS, seed=s), s) for s in range(1, steps + 1)]
    return metrics, dict(learner.named_weights())


def train_two(
    model: Path, steps: int, weights: Path, **actor: Any
) -> tuple[list[Metrics], Weights]:
    with trainer(model, 2, **actor) as ranks:
        metrics = [ranks[0].command(f"train {step}") for step in range(1, steps + 1)]
        ranks[0].command(f"weights {weights}")
        assert [rank.finish() for rank in ranks] == [0, 0]
    return metrics, load_file(weights)


@pytest.mark.parametrize(
    "actor",
    [
        {"ppo_micro_batch_size_per_gpu": 3},
        {
            "use_dynamic_bsz": True,
            "ppo_max_token_len_per_gpu": 70,
            "entropy_coeff": 0.01,
            "fsdp_config": {"dtype": "float32", "fsdp_size": 1},
        },
        # One group a mini-batch: its rows are split between the ranks.
        {"ppo_mini_batch_size": 1, "loss_agg_mode": "seq-mean-token-mean"},
    ],
    ids=["by rows", "by tokens, each with the whole model", "a group split"],
)
def test_two_ranks_train_like_one(model: Path, tmp_path: Path, actor: dict[str, Any]) -> None:
    one, expected = train_one(model, 2, **actor)
    two, found = train_two(model, 2, tmp_path / "two", **actor)
    for ours, theirs in zip(two, one, strict=True):
        for name in theirs.keys() - {
            name for name in theirs if name.startswith(("timing", "perf", "global_seqlen"))
        }:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5, msg=name)


def test_both_ranks_go_back_to_what_was_saved(model: Path, tmp_path: Path) -> None:
    with trainer(model, 2) as ranks:
        ranks[0].command("train 1")
        ranks[0].command(f"save {tmp_path / 'actor'}")
        expected = ranks[0].command("train 2")
        ranks[0].command(f"load {tmp_path / 'actor'}")
        found = ranks[0].command("train 2")
        assert [rank.finish() for rank in ranks] == [0, 0]
    for name in ("actor/pg_loss", "actor/ppo_kl", "actor/grad_norm"):
        assert found[name] == expected[name]


def test_ranks_stay_while_rank_0_has_no_command_for_longer_than_the_deadline(model: Path) -> None:
    def attempt(timeout_s: float) -> None:
        with trainer(model, 2, timeout_s=timeout_s) as ranks:
            ranks[0].command("train 1")
            with pytest.raises(subprocess.TimeoutExpired):
                ranks[1].process.wait(1.3 * timeout_s)
            assert "actor/pg_loss" in ranks[0].command("train 2")
            assert [rank.finish() for rank in ranks] == [0, 0]

    in_time(attempt, SHORT_S)


def test_a_killed_rank_ends_the_next_step_with_an_error(model: Path) -> None:
    with trainer(model, 2) as ranks:
        ranks[0].command("train 1")
        ranks[1].process.kill()
        ranks[1].process.wait(ANSWER_S)
        error = ranks[0].command("train 2")
        # Where the connection breaks while rank 0 writes to it, Gloo fails what it waits to receive
        # but not what it waits to send, which ends at its deadline.
        assert error.startswith(("PeerError: trainer rank", "DeadlineError: trainer rank")), error
        assert "trainer rank 1 (" in error
        assert "seen from rank 0 of 2" in error
        assert ranks[0].process.wait(ANSWER_S) == 3


def test_a_killed_rank_0_ends_the_others(model: Path) -> None:
    with trainer(model, 2) as ranks:
        ranks[0].process.kill()
        error = ranks[1].answer()
        assert error.startswith("PeerError: trainer rank 0 (")
        assert "seen from rank 1 of 2: failed while" in error
        assert "waiting for rank 0's next command" in error
        assert ranks[1].process.wait(ANSWER_S) == 3


def test_a_stalled_rank_runs_into_the_deadline_of_the_phase(model: Path) -> None:
    def attempt(timeout_s: float) -> None:
        with trainer(model, 2, timeout_s=timeout_s) as ranks:
            assert "actor/pg_loss" in ranks[0].command("train 1")
            ranks[1].process.send_signal(signal.SIGSTOP)
            error = ranks[0].command("train 2")
            assert error.startswith(("DeadlineError: ", "PeerError: "))
            assert f"no answer within {timeout_s:g} s while" in error
            assert ranks[0].process.wait(ANSWER_S) == 3

    in_time(attempt, SHORT_S)


def test_a_silent_rank_0_runs_into_the_others_deadline(model: Path) -> None:
    def attempt(timeout_s: float) -> None:
        with trainer(model, 2, timeout_s=timeout_s) as ranks:
            ranks[0].process.send_signal(signal.SIGSTOP)
            error = ranks[1].answer()
            stopped = "DeadlineError: trainer rank 0 (stopped by a signal), seen from"
            assert error.startswith(stopped), error
            assert "rank 1 of 2: no answer" in error
            assert "waiting for rank 0's next command" in error
            assert ranks[1].process.wait(ANSWER_S) == 3

    in_time(attempt, SHORT_S)
