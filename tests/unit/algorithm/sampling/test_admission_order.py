"""The order of starts: what takes long starts early in a version's time, and nobody waits long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.sampling.admission import AdmissionOrder, FinishForecast

VERSION = 7


def _line(*expected_tokens: float, version: int = VERSION) -> AdmissionOrder:
    order = AdmissionOrder()
    for sequence, tokens in enumerate(expected_tokens):
        order.add(sequence, tokens, version)
    return order


def _forecast(max_staleness: int = 1) -> FinishForecast:
    """Announcements every 100 s, the last at 200 s; a group of 50 mean tokens takes 25 s."""
    forecast = FinishForecast(max_staleness)
    for now_s in (0.0, 100.0, 200.0):
        forecast.note_announced(now_s)
    forecast.note_ended("seen", mean_tokens=50.0, seconds=25.0)
    return forecast


def test_the_longest_that_ends_in_time_starts_first() -> None:
    assert _line(30.0, 90.0, 60.0).take(VERSION, tokens_in_time=70.0) == 2


def test_a_group_that_just_ends_in_time_is_in_time() -> None:
    assert _line(30.0, 70.0).take(VERSION, tokens_in_time=70.0) == 1


def test_where_none_ends_in_time_the_shortest_starts() -> None:
    assert _line(50.0, 30.0, 90.0).take(VERSION, tokens_in_time=-5.0) == 1


def test_of_equally_long_ones_the_first_in_line_starts() -> None:
    assert _line(30.0, 30.0, 30.0).take(VERSION, tokens_in_time=70.0) == 0


def test_without_a_forecast_the_order_is_that_of_the_line() -> None:
    assert _line(90.0, 30.0).take(VERSION, tokens_in_time=None) == 0


def test_who_was_passed_by_for_two_versions_goes_first() -> None:
    assert _line(90.0, 30.0).take(VERSION + 1, tokens_in_time=40.0) == 1
    assert _line(90.0, 30.0).take(VERSION + 2, tokens_in_time=40.0) == 0


def test_after_a_return_to_an_older_version_nobody_is_passed_by_for_longer() -> None:
    order = _line(90.0, 30.0, 30.0, 30.0, version=20)
    assert [order.take(5 + number, tokens_in_time=40.0) for number in range(3)] == [1, 2, 0]


def test_a_prompt_that_starts_leaves_the_line() -> None:
    order = _line(30.0, 90.0, 90.0)
    assert [order.take(VERSION, 100.0) for _ in range(3)] == [1, 2, 0]
    assert len(order) == 0


def test_a_cleared_line_is_empty() -> None:
    order = _line(30.0, 90.0)
    order.clear()
    assert len(order) == 0
    order.add(5, 10.0, VERSION)
    assert order.take(VERSION, 100.0) == 5


@given(
    st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30),
    st.lists(st.floats(-10.0, 120.0), min_size=200, max_size=200),
)
def test_everyone_in_line_starts_once_and_none_is_passed_by_for_more_than_two_versions(
    lengths: list[float], limits: list[float]
) -> None:
    order, started, since = AdmissionOrder(), list[int](), dict[int, int]()
    waiting = list(enumerate(lengths))
    for number, limit in enumerate(limits):
        version = number // 3
        while waiting and len(order) < 4:
            sequence, tokens = waiting.pop(0)
            order.add(sequence, tokens, version)
            since[sequence] = version
        if not len(order):
            break
        overdue = [sequence for sequence, came in since.items() if version - came >= 2]
        chosen = order.take(version, limit)
        assert not overdue or chosen == overdue[0]
        del since[chosen]
        started.append(chosen)
    assert sorted(started) == list(range(len(lengths)))


def test_time_left_is_given_in_mean_tokens() -> None:
    # Started under the version of 200 s with S = 1: in time until 300 s, at 2 tokens a second.
    assert _forecast().tokens_in_time(260.0) == pytest.approx(80.0)
    assert _forecast(max_staleness=2).tokens_in_time(260.0) == pytest.approx(280.0)


def test_nothing_is_forecast_before_two_announcements_and_a_group() -> None:
    forecast = FinishForecast(1)
    forecast.note_announced(0.0)
    forecast.note_ended("seen", mean_tokens=50.0, seconds=25.0)
    assert forecast.tokens_in_time(1.0) is None
    forecast.note_announced(100.0)
    assert forecast.tokens_in_time(101.0) is not None
    unseen = FinishForecast(1)
    unseen.note_announced(0.0)
    unseen.note_announced(1.0)
    assert unseen.tokens_in_time(2.0) is None


def test_a_prompts_length_is_that_of_its_last_attempt_else_that_of_all() -> None:
    forecast = _forecast()
    forecast.note_ended("seen", mean_tokens=70.0, seconds=25.0)
    assert forecast.tokens("seen") == 70.0
    assert 50.0 < forecast.tokens("unseen") < 70.0


def test_a_group_without_tokens_teaches_nothing() -> None:
    forecast = _forecast()
    forecast.note_ended("empty", mean_tokens=0.0, seconds=25.0)
    assert forecast.tokens("empty") == 50.0


def test_only_so_many_lengths_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.algorithm.sampling.admission.KNOWN_LENGTHS", 2)
    forecast = FinishForecast(1)
    for key, tokens in (("a", 10.0), ("b", 20.0), ("a", 10.0), ("c", 30.0)):
        forecast.note_ended(key, mean_tokens=tokens, seconds=1.0)
    assert forecast.tokens("a") == 10.0
    assert forecast.tokens("c") == 30.0
    assert forecast.tokens("b") not in (20.0, 10.0, 30.0)
