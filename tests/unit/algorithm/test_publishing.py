"""When a transfer may run beside a step, and how many replicas swap at once."""

from __future__ import annotations

import math

import pytest

from sluice.algorithm.publishing import MOST_TURNS, may_overlap, swaps_at_once


@pytest.mark.parametrize(("staleness", "overlaps"), [(0, False), (1, False), (2, True), (4, True)])
def test_a_transfer_overlaps_where_groups_that_start_meanwhile_find_a_batch(
    staleness: int, overlaps: bool
) -> None:
    assert may_overlap(staleness) is overlaps


@pytest.mark.parametrize("replicas", [1, 2, 8, 64])
def test_all_replicas_swap_together_where_no_group_runs_meanwhile(replicas: int) -> None:
    assert swaps_at_once(replicas, max_staleness=0) == replicas


@pytest.mark.parametrize("replicas", range(1, 9))
def test_up_to_eight_replicas_swap_one_after_another(replicas: int) -> None:
    assert swaps_at_once(replicas, max_staleness=1) == 1


@pytest.mark.parametrize("replicas", [9, 16, 17, 100, 512])
def test_a_larger_fleet_has_at_most_eight_turns(replicas: int) -> None:
    at_once = swaps_at_once(replicas, max_staleness=2)
    assert math.ceil(replicas / at_once) <= MOST_TURNS
    assert at_once <= math.ceil(replicas / MOST_TURNS)
