"""How many groups to start."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.algorithm.sampling.admission import YieldEstimate, groups_to_admit, kept_upper_bound

counts = st.integers(0, 300)


def estimate_after(kept: int, filtered: int) -> YieldEstimate:
    """Kept and filtered groups spread evenly."""
    estimate = YieldEstimate()
    total = kept + filtered
    for index in range(total):
        kept_now = (index + 1) * kept // total - index * kept // total
        estimate = estimate.observe(kept_now == 1)
    return estimate


def admit(**changes: int | bool | YieldEstimate) -> int:
    arguments: dict[str, object] = {
        "train_batch_size": 64,
        "max_staleness": 0,
        "num_in_flight": 0,
        "num_kept": 0,
        "num_in_training": 0,
        "estimate": YieldEstimate(),
        "max_in_flight": 10_000,
    }
    return groups_to_admit(**{**arguments, **changes})  # type: ignore[arg-type]


def test_on_policy_admission_fills_the_batch_and_no_more() -> None:
    assert admit() == 64
    assert admit(num_in_flight=10, num_kept=20) == 34
    assert admit(num_in_flight=44, num_kept=20) == 0


def test_on_policy_admission_stops_while_the_trainer_holds_a_batch() -> None:
    assert admit(num_in_training=64) == 0


def test_on_policy_admission_ignores_the_yield() -> None:
    assert admit(estimate=estimate_after(10, 190)) == 64


def test_a_batch_filled_on_average_has_as_many_groups_running_as_are_expected_to_fill_it() -> None:
    half = YieldEstimate(prior_yield=0.5)
    assert admit(estimate=half, fills_on_average=True) == 128
    assert admit(estimate=half, fills_on_average=True, num_kept=20, num_in_flight=80) == 8
    assert admit(estimate=half, fills_on_average=True, num_kept=63) == 2
    assert admit(estimate=half, fills_on_average=True, max_in_flight=100) == 100
    assert admit(estimate=half, fills_on_average=True, num_kept=64) == 0
    assert admit(estimate=half, fills_on_average=True, num_in_training=64) == 0
    assert admit(fills_on_average=True) == 64  # nothing seen yet


def test_what_runs_ahead_is_bounded_with_care_however_batches_on_policy_are_filled() -> None:
    seen = estimate_after(50, 50)
    careful = admit(estimate=seen, max_staleness=1)
    assert admit(estimate=seen, max_staleness=1, fills_on_average=True) == careful < 256


def test_an_unseen_yield_is_taken_as_one() -> None:
    assert admit(max_staleness=1) == 128
    assert admit(max_staleness=1, num_in_training=64) == 64


def test_a_low_yield_admits_more_when_staleness_is_allowed() -> None:
    low, half = estimate_after(40, 160), estimate_after(100, 100)
    assert admit(max_staleness=1, estimate=low) > admit(max_staleness=1, estimate=half) > 128


def test_groups_wanted_ahead_of_a_batch_start_by_their_mean_yield() -> None:
    half = estimate_after(500, 500)  # a mean of 0.53: the prior still weighs
    wanted = 64 + 16
    assert admit(max_staleness=1, num_ahead=16) == wanted
    alone = admit(max_staleness=1, num_ahead=16, estimate=half)
    assert (alone - 1) * half.mean < wanted <= alone * half.mean
    assert admit(max_staleness=1, num_ahead=16, estimate=half, num_in_flight=alone - 5) == 5


def test_where_all_places_are_wanted_the_careful_bound_decides() -> None:
    low = estimate_after(40, 160)
    assert admit(max_staleness=1, num_ahead=64, estimate=low) == admit(
        max_staleness=1, estimate=low
    )


def test_nothing_starts_while_as_many_are_ahead_as_are_wanted() -> None:
    assert admit(max_staleness=1, num_ahead=16, num_in_training=64, num_kept=16) == 0
    assert admit(max_staleness=1, num_ahead=16, num_in_training=64, num_kept=10) == 6


def test_the_fleet_bounds_admission() -> None:
    assert admit(max_in_flight=24) == 24
    assert admit(max_staleness=3, max_in_flight=24, num_in_flight=20) == 4
    assert admit(max_in_flight=0) == 0


def test_estimates_are_values() -> None:
    before = YieldEstimate()
    after = before.observe(False)
    assert before.mean == 1.0
    assert after.mean == pytest.approx(8 / 9)


def test_the_estimate_follows_a_yield_that_falls() -> None:
    estimate = estimate_after(200, 0)
    for index in range(200):
        estimate = estimate.observe(index % 4 == 0)
    assert 0.2 < estimate.mean < 0.4
    assert estimate.mean < estimate.upper() < 1.0


@given(
    st.integers(1, 64),
    st.integers(0, 4),
    counts,
    counts,
    counts,
    counts,
    st.none() | st.integers(1, 256),
    st.lists(st.booleans()),
)
def test_admission_is_the_largest_number_within_all_bounds(
    batch: int,
    max_staleness: int,
    in_flight: int,
    kept: int,
    in_training: int,
    limit: int,
    ahead: int | None,
    seen: list[bool],
) -> None:
    ahead = ahead if max_staleness else None
    estimate = YieldEstimate()
    for was_kept in seen:
        estimate = estimate.observe(was_kept)
    admitted = admit(
        train_batch_size=batch,
        max_staleness=max_staleness,
        num_in_flight=in_flight,
        num_kept=kept,
        num_in_training=in_training,
        estimate=estimate,
        max_in_flight=limit,
        num_ahead=ahead,
    )
    capacity = (max_staleness + 1) * batch - in_training - kept

    def fits(number: int) -> bool:
        total = in_flight + number
        bound = float(total) if max_staleness == 0 else kept_upper_bound(total, estimate)
        # One group more may start than the mean allows: the one that reaches what is wanted.
        wanted = math.inf if ahead is None else batch + ahead - in_training - kept
        return bound <= capacity and total <= limit and (total - 1) * estimate.mean < wanted

    assert admitted >= 0
    assert admitted == 0 or fits(admitted)
    assert not fits(admitted + 1)


@given(st.lists(st.booleans(), min_size=1), st.integers(1, 500))
def test_the_bound_grows_with_groups_and_never_exceeds_them(seen: list[bool], num: int) -> None:
    estimate = YieldEstimate()
    for was_kept in seen:
        estimate = estimate.observe(was_kept)
    assert 0.0 < kept_upper_bound(num, estimate) <= num
    assert kept_upper_bound(num, estimate) <= kept_upper_bound(num + 1, estimate)


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(0, 2**32), st.integers(1, 30))
def test_on_policy_issues_the_same_prompts_whatever_the_timing(
    batch: int, seed: int, slots: int
) -> None:
    rng = random.Random(seed)
    is_kept = [rng.random() < 0.4 for _ in range(5000)]
    shortest = next(n for n in range(5000) if sum(is_kept[:n]) == batch)
    in_flight: list[int] = []
    issued = kept = 0
    while kept < batch:
        for _ in range(
            admit(
                train_batch_size=batch,
                num_in_flight=len(in_flight),
                num_kept=kept,
                max_in_flight=slots,
            )
        ):
            in_flight.append(issued)
            issued += 1
        kept += is_kept[in_flight.pop(rng.randrange(len(in_flight)))]
    assert (issued, in_flight) == (shortest, [])
