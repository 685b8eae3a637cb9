"""Ranks and micro-batches: every row once, balanced, within the budget."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.algorithm.packing import (
    GroupPiece,
    MicroBatchPlan,
    RowSize,
    assign_rows_to_ranks,
    balanced_partition,
    piece_tokens,
    piece_workload,
    plan_micro_batches,
    plan_minibatches,
    whole_groups,
)


@st.composite
def mini_batches(draw: st.DrawFn) -> list[RowSize]:
    rows: list[RowSize] = []
    for group in range(draw(st.integers(1, 8))):
        prompt = draw(st.integers(1, 60))
        responses = draw(st.lists(st.integers(0, 80), min_size=1, max_size=6))
        rows += [RowSize(group, prompt, response) for response in responses]
    return draw(st.permutations(rows))


def rows_of(plans: tuple[MicroBatchPlan, ...]) -> list[int]:
    return sorted(index for plan in plans for index in plan.row_indices)


def test_mini_batches_are_consecutive() -> None:
    assert plan_minibatches(64, 32) == (range(32), range(32, 64))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 6))
def test_partitions_hold_every_item_once(weights: list[int], num_parts: int) -> None:
    parts = balanced_partition(weights, num_parts)
    assert sorted(i for part in parts for i in part) == list(range(len(weights)))
    assert len(parts) == num_parts
    sums = [sum(weights[i] for i in part) for part in parts]
    assert max(sums) == sums[0]
    assert max(sums) - min(sums) <= max(weights)


def test_no_items_make_empty_parts() -> None:
    assert balanced_partition([], 3) == ((), (), ())


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_a_piece_of_one_row_costs_what_its_sequence_costs(prompt: int, response: int) -> None:
    rows = [RowSize(0, prompt, response)]
    assert (
        piece_workload(rows, GroupPiece(0, (0,)))
        == 24_576 * (prompt + response) + (prompt + response) ** 2
    )


@given(mini_batches())
def test_sharing_a_prompt_never_costs_more_than_repeating_it(rows: list[RowSize]) -> None:
    for piece in whole_groups(rows, range(len(rows))):
        alone = sum(piece_workload(rows, GroupPiece(0, (i,))) for i in piece.row_indices)
        assert piece_workload(rows, piece) <= alone


@settings(deadline=None)
@given(mini_batches(), st.integers(1, 5))
def test_ranks_share_all_rows_and_agree_on_who_has_which(
    rows: list[RowSize], num_ranks: int
) -> None:
    ranks = assign_rows_to_ranks(rows, num_ranks)
    assert len(ranks) == num_ranks
    assert sorted(index for rank in ranks for index in rank) == list(range(len(rows)))
    assert ranks == assign_rows_to_ranks(list(rows), num_ranks)
    if len(rows) >= num_ranks:
        assert all(ranks)


def test_one_rank_gets_everything() -> None:
    rows = [RowSize(group, 10, 5) for group in (1, 0, 1)]
    assert assign_rows_to_ranks(rows, 1) == ((0, 1, 2),)


def test_groups_stay_whole_when_they_balance() -> None:
    rows = [RowSize(group, 30, 40) for group in range(8) for _ in range(4)]
    for rank in assign_rows_to_ranks(rows, 2):
        assert len({rows[i].group for i in rank}) == 4
        assert len(rank) == 16


def test_a_group_too_large_for_its_rank_is_split() -> None:
    rows = [RowSize(0, 10, 100)] * 8 + [RowSize(1, 10, 1)]
    loads = [sum(rows[i].response_tokens for i in rank) for rank in assign_rows_to_ranks(rows, 2)]
    assert sorted(loads) == [400, 401]


def test_whole_groups_that_do_not_divide_evenly_are_split_no_more_than_needed() -> None:
    rows = [RowSize(group, 10, 100) for group in range(3) for _ in range(4)]
    ranks = assign_rows_to_ranks(rows, 2)
    assert [len(rank) for rank in ranks] == [6, 6]
    assert sum(len({rows[i].group for i in rank}) for rank in ranks) == 4


def test_no_rank_stays_empty_beside_a_row_that_cannot_be_split() -> None:
    rows = [RowSize(0, 10, 5000), RowSize(1, 10, 5), RowSize(1, 10, 5)]
    assert assign_rows_to_ranks(rows, 3) == ((0,), (1,), (2,))


def test_fewer_groups_than_ranks_are_spread_over_all_ranks() -> None:
    rows = [RowSize(group, 10, 50) for group in range(2) for _ in range(8)]
    assert [len(rank) for rank in assign_rows_to_ranks(rows, 4)] == [4, 4, 4, 4]


def test_more_ranks_than_rows_leave_ranks_empty() -> None:
    ranks = assign_rows_to_ranks([RowSize(0, 4, 4), RowSize(1, 4, 4)], 3)
    assert sorted(len(rank) for rank in ranks) == [0, 1, 1]


@given(mini_batches(), st.integers(1, 400))
def test_every_row_is_in_one_micro_batch_within_the_budget_or_alone(
    rows: list[RowSize], budget: int
) -> None:
    share = list(range(0, len(rows), 2))
    plans = plan_micro_batches(rows, share, token_budget=budget)
    assert rows_of(plans) == share
    for plan in plans:
        assert plan.num_tokens == sum(piece_tokens(rows, piece) for piece in plan.pieces)
        assert plan.num_tokens <= budget or len(plan.row_indices) == 1
        assert all(rows[i].group == piece.group for piece in plan.pieces for i in piece.row_indices)
    assert list(plans) == sorted(plans, key=lambda plan: -plan.num_tokens)


@given(mini_batches(), st.integers(1, 12))
def test_micro_batches_by_rows_hold_that_many(rows: list[RowSize], rows_per_micro: int) -> None:
    plans = plan_micro_batches(rows, range(len(rows)), rows_per_micro=rows_per_micro)
    assert rows_of(plans) == list(range(len(rows)))
    sizes = [len(plan.row_indices) for plan in plans]
    assert all(size == rows_per_micro for size in sizes[:-1])
    assert 1 <= sizes[-1] <= rows_per_micro


def test_a_prompt_is_counted_once_for_all_rows_of_its_group() -> None:
    rows = [RowSize(0, 100, 10) for _ in range(4)]
    (plan,) = plan_micro_batches(rows, range(4), token_budget=140)
    assert plan == MicroBatchPlan((GroupPiece(0, (0, 1, 2, 3)),), 140)


def test_a_group_beyond_the_budget_is_cut_into_pieces() -> None:
    rows = [RowSize(0, 100, 10) for _ in range(4)]
    plans = plan_micro_batches(rows, range(4), token_budget=120)
    assert [plan.row_indices for plan in plans] == [(0, 1), (2, 3)]


def test_a_row_longer_than_the_budget_is_not_dropped() -> None:
    rows = [RowSize(0, 10, 500), RowSize(0, 10, 5)]
    plans = plan_micro_batches(rows, range(2), token_budget=50)
    assert [plan.row_indices for plan in plans] == [(0,), (1,)]


def test_a_rank_without_rows_has_no_micro_batches() -> None:
    assert plan_micro_batches([RowSize(0, 1, 1)], [], token_budget=10) == ()
