"""Trainer ranks that take their samples of a batch, over gRPC, and what one broken stream does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.batch_server import BatchServer, ServedBatch, serving
from tests.support.patience import in_time
from tests.support.trainer_ranks import Rank, ranks_of

BATCH = ServedBatch(groups=4, samples=4, tokens=20_000, prompt_tokens=50, vary=True)


@contextmanager
def world(
    served: ServedBatch, world_size: int = 3, stall_s: float = 300.0, timeout_s: float = 100.0
) -> Iterator[tuple[BatchServer, list[Rank]]]:
    with serving(served) as server:
        given = {
            "address": server.address,
            "stall_s": stall_s,
            "mini_batch_groups": 2,
            "timeout_s": timeout_s,
        }
        with ranks_of("tests.support.sample_peer", world_size, given) as ranks:
            assert [rank.answer() for rank in ranks] == ["ready"] * world_size
            yield server, ranks


def took(ranks: list[Rank]) -> list[Any]:
    ranks[0].tell("take 1")
    return [rank.answer() for rank in ranks]


def check(found: list[Any], served: ServedBatch) -> None:
    """Every sample came to one rank, whole."""
    batch = served.make()
    rows = [rollout for group in batch.groups for rollout in group.rollouts]
    assert sorted(row for one in found for row in one["own"]) == list(range(len(rows)))
    for one in found:
        assert one["came"] == [row for row in one["own"] if rows[row].num_tokens]
        for row, (tokens, logprobs) in zip(one["came"], one["sums"], strict=True):
            assert tokens == int(rows[row].token_ids.sum())
            assert logprobs == pytest.approx(float(rows[row].behavior_logprobs.sum()))


def test_each_rank_takes_its_own_samples_and_few_bytes_more() -> None:
    with world(BATCH) as (server, ranks):
        found = took(ranks)
        check(found, BATCH)
        assert max(one["bytes"] / one["row_bytes"] for one in found) < 1.2
        assert server.counts() == {"TakeBatch": 1, "TakeSamples": 3}
        assert [rank.finish() for rank in ranks] == [0, 0, 0]


@pytest.mark.parametrize("after", [0, 3])
def test_a_stream_that_breaks_in_the_middle_makes_all_ranks_take_the_same_batch_again(
    after: int,
) -> None:
    served = replace(BATCH, breaks_after=after)
    with world(served) as (server, ranks):
        check(took(ranks), served)
        assert server.counts() == {"TakeBatch": 2, "TakeSamples": 6}
        assert [rank.finish() for rank in ranks] == [0, 0, 0]


def test_a_reward_service_that_falls_silent_in_the_middle_ends_the_run_with_peer_and_phase() -> (
    None
):
    with world(replace(BATCH, hangs_after=2), stall_s=1.0) as (_, ranks):
        answers = took(ranks)
    phase = "taking samples of step 1"
    named = [answer for answer in answers if answer.startswith("DeadlineError: reward service")]
    assert named
    assert all(phase in answer for answer in answers)


def test_ranks_wait_for_one_whose_samples_still_come_after_their_deadline() -> None:
    def attempt(timeout_s: float) -> None:
        # At least eight messages, the last after the deadline.
        served = replace(BATCH, pause_s=timeout_s / 5)
        with world(served, world_size=2, timeout_s=timeout_s) as (server, ranks):
            check(took(ranks), served)
            assert server.counts() == {"TakeBatch": 1, "TakeSamples": 2}
            assert [rank.finish() for rank in ranks] == [0, 0]

    in_time(attempt, 8.0)


def test_the_sums_tell_samples_apart() -> None:
    rows = [one for group in BATCH.make().groups for one in group.rollouts]
    sums = [int(one.token_ids.astype(np.int64).sum()) for one in rows if one.num_tokens]
    assert len(set(sums)) == len(sums)
