"""How many processes a scorer may start follows the number that its user has."""

from __future__ import annotations

import resource

import pytest

from services.reward.grading.limits import (
    COUNTED_EVERY_S,
    MAX_MORE_PROCESSES,
    MAX_MORE_PROCESSES_EVER,
    ProcessLimit,
)

Limits = list[tuple[int, int]]
FREE = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """All that were set, the one at the beginning first."""
    found = [(FREE, FREE)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: found.append(limit))
    return found


def test_the_soft_limit_follows_the_users_threads_and_the_hard_one_stays(limits: Limits) -> None:
    counts, times = iter([300, 9000]), iter([0.0, COUNTED_EVERY_S, COUNTED_EVERY_S])
    limit = ProcessLimit(lambda: next(counts), lambda: next(times))
    limit.renew()
    hard = 300 + MAX_MORE_PROCESSES_EVER
    assert limits[1:] == [(300 + MAX_MORE_PROCESSES, hard), (9000 + MAX_MORE_PROCESSES, hard)]


def test_requests_in_quick_succession_do_not_count_again(limits: Limits) -> None:
    counts = iter([300])
    limit = ProcessLimit(lambda: next(counts), lambda: 7.0)
    for _ in range(5):
        limit.renew()
    assert len(limits) == 2


def test_a_hard_limit_of_the_system_is_kept(limits: Limits) -> None:
    limits[0] = (500, 800)
    ProcessLimit(lambda: 300)
    assert limits[-1] == (800, 800)


def test_nothing_is_limited_where_nothing_can_be_counted(limits: Limits) -> None:
    ProcessLimit(lambda: 0).renew()
    assert limits == [(FREE, FREE)]
