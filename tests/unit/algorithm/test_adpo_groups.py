"""Groups stay whole on ranks and in micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.packing import (
    MicroBatchPlan,
    RowSize,
    assign_rows_to_ranks,
    plan_micro_batches,
)
from sluice.errors import ConfigError

G = 3
group_lengths = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(0, 30), min_size=G, max_size=G)),
    min_size=1,
    max_size=10,
)


def rows_of(groups: list[tuple[int, list[int]]]) -> list[RowSize]:
    """Rows interleaved over groups, so that a group is no run."""
    return [
        RowSize(number, prompt, lengths[row])
        for row in range(G)
        for number, (prompt, lengths) in enumerate(groups)
    ]


def tokens_of(groups: list[tuple[int, list[int]]]) -> list[int]:
    return [prompt + sum(lengths) for prompt, lengths in groups]


def groups_in(rows: list[RowSize], plan: MicroBatchPlan) -> set[int]:
    """Groups of a plan, each checked to be complete."""
    indices = plan.row_indices
    groups = {rows[i].group for i in indices}
    assert len(indices) == G * len(groups)
    return groups


@given(group_lengths, st.integers(1, 4), st.integers(1, 150))
def test_every_group_is_whole_in_exactly_one_micro_batch(
    groups: list[tuple[int, list[int]]], num_ranks: int, budget: int
) -> None:
    rows, sizes = rows_of(groups), tokens_of(groups)
    seen: list[int] = []
    for share in assign_rows_to_ranks(rows, num_ranks, keeps_groups=True):
        plans = plan_micro_batches(rows, share, token_budget=budget, keeps_groups=True)
        assert [p.num_tokens for p in plans] == sorted((p.num_tokens for p in plans), reverse=True)
        for plan in plans:
            found = groups_in(rows, plan)
            seen += found
            assert plan.num_tokens == sum(sizes[group] for group in found)
            assert plan.num_tokens <= budget or len(found) == 1
    assert sorted(seen) == list(range(len(groups)))


@given(group_lengths, st.integers(1, 3))
def test_by_rows_micro_batches_hold_as_many_groups_as_fit(
    groups: list[tuple[int, list[int]]], per_micro: int
) -> None:
    rows = rows_of(groups)
    plans = plan_micro_batches(
        rows, range(len(rows)), rows_per_micro=per_micro * G, keeps_groups=True
    )
    assert sum(len(groups_in(rows, plan)) for plan in plans) == len(groups)
    assert len(plans) == -(-len(groups) // per_micro)


def test_groups_fill_a_micro_batch_to_its_budget() -> None:
    rows = rows_of([(4, [2, 2, 2]), (1, [3, 3, 3]), (5, [5, 5, 5]), (10, [10, 10, 10])])
    plans = plan_micro_batches(rows, range(len(rows)), token_budget=20, keeps_groups=True)
    assert [plan.num_tokens for plan in plans] == [40, 20, 20]


def test_ranks_get_equal_shares_of_equal_groups() -> None:
    shares = assign_rows_to_ranks(rows_of([(5, [4, 4, 4])] * 6), 3, keeps_groups=True)
    assert [len(share) for share in shares] == [2 * G] * 3


def test_rows_that_do_not_hold_whole_groups_are_refused() -> None:
    rows = rows_of([(1, [1, 1, 1])])
    with pytest.raises(ConfigError, match="=4 is no multiple of the 3 rows of a prompt"):
        plan_micro_batches(rows, range(3), rows_per_micro=4, keeps_groups=True)
