"""Where a batch's tokens fall: as the learner cuts it, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.trainer.learner.batch.mini_batch import BatchCut, Share, split_batch
from services.trainer.metrics.step_metrics import RankCut, balance_metrics, rank_cut, rank_rows
from tests.support.tiny_policy import make_batch, make_config

STEP = 3


@pytest.mark.parametrize("whole_groups", [False, True])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_rows_are_counted_for_the_rank_that_trains_them(
    num_ranks: int, seed: int | None, *, whole_groups: bool
) -> None:
    batch, groups = make_batch(), 3
    responses = [r.num_tokens for group in batch.groups for r in group.rollouts]
    rows = rank_rows(batch, STEP, RankCut(groups, num_ranks, seed, whole_groups))
    assert sorted(row for own in rows for row in own) == list(range(len(responses)))
    cut = BatchCut(groups, 64, None, seed, whole_groups)
    for rank, own in enumerate(rows):
        share = Share(rank, num_ranks)
        mini_batches = split_batch(batch.groups, cut, share, step=STEP, device=torch.device("cpu"))
        trained = sum(
            micro_batch.behavior_logprobs.numel()
            for mini_batch in mini_batches
            for micro_batch in mini_batch.micro_batches
        )
        assert sum(responses[row] for row in own) == trained


def test_the_cut_is_the_configured_one() -> None:
    adpo = {"policy_loss": {"loss_mode": "adpo"}}
    config = make_config(Path("unused"), shuffle=True, data_loader_seed=7, **adpo)
    assert rank_cut(config, 2) == RankCut(3, 2, 7, whole_groups=True)
    assert rank_cut(make_config(Path("unused")), 1) == RankCut(3, 1, None)


def test_one_rank_has_everything() -> None:
    batch = make_batch()
    found = balance_metrics(batch, STEP, rank_cut(make_config(Path("unused")), 1))
    total = sum(
        group.prompt_token_ids.size + rollout.num_tokens
        for group in batch.groups
        for rollout in group.rollouts
    )
    assert found.pop("global_seqlen/minmax_diff") == 0
    assert set(found) == {
        f"global_seqlen/{name}" for name in ("min", "max", "balanced_min", "balanced_max", "mean")
    }
    assert set(found.values()) == {float(total)}
