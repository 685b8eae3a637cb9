"""When a transfer may run beside a step, how many replicas swap at once, and how many are held."""

from __future__ import annotations

import math

import pytest

from sluice.algorithm.publishing import (
    MAX_TURNS,
    may_overlap,
    num_held_for_validation,
    swaps_at_once,
)


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
    assert math.ceil(replicas / at_once) <= MAX_TURNS
    assert at_once <= math.ceil(replicas / MAX_TURNS)


@pytest.mark.parametrize(
    ("replicas", "held"), [(0, 0), (1, 0), (2, 1), (4, 1), (5, 2), (8, 2), (9, 3), (512, 128)]
)
def test_a_quarter_of_an_asynchronous_fleet_keeps_a_validated_version(
    replicas: int, held: int
) -> None:
    assert num_held_for_validation(replicas, max_staleness=1) == held
    assert held < max(replicas, 1)


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_a_synchronous_fleet_keeps_no_version(replicas: int) -> None:
    assert num_held_for_validation(replicas, max_staleness=0) == 0
