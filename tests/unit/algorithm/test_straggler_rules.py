"""When a stream is stalled or slow, and when a group is over."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.groups.stragglers import (
    MIN_ARRIVALS,
    PARTIALS_PER_S,
    RateTable,
    StragglerRules,
    StreamPace,
    partial_interval_ms,
)

RULES = StragglerRules(stall_timeout_s=30, slow_factor=4, group_deadline_s=100)


def begun(*samples: int, at: float = 0.0) -> StreamPace:
    pace = StreamPace(set(samples), at)
    pace.note_accepted(at)
    return pace


def test_a_stream_is_stalled_when_nothing_came_since_its_last_token() -> None:
    pace = StreamPace({0, 1}, 5.0)
    assert RULES.stalled_at(pace) == 35
    pace.note_accepted(6.0)
    assert RULES.stalled_at(pace) == 36
    pace.note_tokens({0: 3}, (), 20.0)
    assert RULES.stalled_at(pace) == 50
    assert StragglerRules().stalled_at(pace) is None


def test_time_whose_messages_lie_unread_is_no_silence() -> None:
    pace = StreamPace({0, 1}, 5.0)
    assert not RULES.is_stalled(pace, 34.9)  # however late it is now
    assert RULES.is_stalled(pace, 35.0)
    pace.note_tokens({0: 3}, (), 50.0)
    assert not RULES.is_stalled(pace, 79.9)
    assert not StragglerRules().is_stalled(pace, float("inf"))


def test_samples_that_wait_for_a_slot_are_not_stalled_while_the_engine_draws_tokens() -> None:
    pace = begun(0, 1)
    pace.note_tokens({0: 3}, (), 10.0)
    for seconds, sampled in ((20.0, 500), (40.0, 900)):  # sample 1 still waits
        pace.note_engine_tokens(sampled, seconds)
        assert RULES.stalled_at(pace) == seconds + 30
    pace.note_engine_tokens(900, 60.0)  # the engine stands still
    assert RULES.stalled_at(pace) == 70


def test_an_engine_that_works_for_others_is_no_sign_of_life_for_samples_with_a_slot() -> None:
    pace = begun(0, 1)
    pace.note_tokens({0: 3, 1: 3}, (), 10.0)
    pace.note_engine_tokens(500, 39.0)
    assert RULES.stalled_at(pace) == 40


def test_a_rate_is_tokens_a_second_and_running_sample_since_the_first_tokens() -> None:
    pace = begun(0, 1)
    pace.note_tokens({0: 50, 1: 50}, (), 20.0)  # whatever it waited for before
    for arrival in range(1, MIN_ARRIVALS):
        pace.note_tokens({0: 10, 1: 10}, (), 20.0 + arrival)
        assert pace.rate(20.0 + arrival) is None
    pace.note_tokens({0: 10, 1: 10}, (), 20.0 + MIN_ARRIVALS)
    assert pace.rate(20.0 + MIN_ARRIVALS) == pytest.approx(10)
    # Of 4 s of silence 1 s is usual.
    assert pace.rate(20.0 + 2 * MIN_ARRIVALS) == pytest.approx(80 / 14)


def test_samples_that_end_between_two_reports_of_the_others_make_no_stream_slow() -> None:
    pace, rate = begun(*range(16)), 50
    for report_s in (5.0, 10.0):
        pace.note_tokens(dict.fromkeys(range(16), 5 * rate), (), report_s)
    for number in range(MIN_ARRIVALS):  # each brings its own last tokens alone
        ended_s = 11.0 + number / 4
        pace.note_tokens({number: int((ended_s - 10) * rate)}, (number,), ended_s)
        assert pace.rate(ended_s) in (None, pytest.approx(rate, rel=0.02))
    assert pace.rate(14.9) == pytest.approx(rate, rel=0.02)
    assert RULES.is_slow(pace.rate(40.0), rate), "the others stand still"


def test_samples_that_start_later_or_have_ended_do_not_lower_a_rate() -> None:
    pace = begun(0, 1, 2)
    pace.note_tokens({0: 1}, (), 0.0)
    pace.note_tokens({0: 10, 1: 7}, (), 1.0)
    pace.note_tokens({0: 10, 1: 10}, (0,), 2.0)
    for seconds in range(3, 3 + MIN_ARRIVALS):
        pace.note_tokens({1: 10}, (), float(seconds))
    assert pace.rate(2.0 + MIN_ARRIVALS) == pytest.approx(10)


def test_samples_that_end_before_any_rate_is_known_tell_a_least_one() -> None:
    pace = begun(0, 1)
    assert pace.min_rate() is None
    pace.note_tokens({0: 10}, (0,), 2.0)
    pace.note_tokens({1: 20}, (1,), 3.0)
    assert pace.rate(3.0) is None
    assert pace.min_rate() == pytest.approx(30 / 5)


@pytest.mark.parametrize(
    ("rate", "others", "is_slow"),
    [(10, 41, True), (10, 40, False), (None, 41, False), (10, None, False)],
)
def test_slow_is_slower_than_the_others_by_more_than_the_factor(
    rate: float | None, others: float | None, is_slow: bool
) -> None:
    assert RULES.is_slow(rate, others) is is_slow
    assert not StragglerRules().is_slow(rate, others)


rates = st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0.1, 1e6)), max_size=20)


@given(rates, st.sampled_from("abcdefg"))
def test_the_median_is_that_of_all_other_replicas(
    notes: list[tuple[str, float]], replica: str
) -> None:
    table, known = RateTable(), dict[str, float]()
    for name, rate in notes:
        table.note(name, rate)
        known[name] = 0.2 * rate + 0.8 * known[name] if name in known else rate
    others = [rate for name, rate in known.items() if name != replica]
    expected = statistics.median(others) if others else None
    assert table.median_of_others(replica) == pytest.approx(expected)
    table.retain("abc")
    left = [rate for name, rate in known.items() if name != replica and name in "abc"]
    assert table.median_of_others(replica) == pytest.approx(
        statistics.median(left) if left else None
    )


def test_a_group_is_over_by_its_time_since_it_started_or_by_its_tokens() -> None:
    assert RULES.over_at(None) is None
    assert RULES.over_at(7.0) == 107
    assert not RULES.is_spent(10**9)
    bounded = StragglerRules(group_token_budget=100)
    assert (bounded.is_spent(99), bounded.is_spent(100)) == (False, True)
    assert bounded.over_at(7.0) is None


def test_the_sample_that_is_silent_for_longest_is_named_though_others_get_tokens() -> None:
    pace = begun(0, 1, 2)
    assert pace.quietest(1.0) is None
    pace.note_tokens({0: 1, 1: 1}, (), 1.0)
    pace.note_tokens({1: 1}, (), 5.0)
    assert pace.quietest(7.0) == (0, 6.0)
    pace.note_tokens({0: 1}, (0,), 8.0)
    assert pace.quietest(9.0) == (1, 4.0)


def test_partial_tokens_of_a_large_fleet_come_less_often_but_never_so_late_as_a_stall() -> None:
    assert partial_interval_ms(500, 512, 7500) == partial_interval_ms(500, 5000, 7500) == 500
    slots = 54_000
    interval_ms = partial_interval_ms(500, slots, 7500)
    assert 1000 * slots / interval_ms <= PARTIALS_PER_S
    assert partial_interval_ms(500, 200_000, 7500) == 7500
    assert partial_interval_ms(9000, 200_000, 7500) == 9000
    assert partial_interval_ms(0, 200_000, 7500) == 0
