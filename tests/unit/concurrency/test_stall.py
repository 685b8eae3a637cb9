"""When work that stands still is reported and given up; all time is made up."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from sluice.concurrency.watchdog import StallJudge, StallVerdict, WorkState

INTERVAL_S = 1.0
FINE, STALLED, HOPELESS = StallVerdict.FINE, StallVerdict.STALLED, StallVerdict.HOPELESS


class Watched:
    """A process seen every second, and what was found each time."""

    def __init__(self, stall_s: float | None = 5.0, give_up_s: float | None = 20.0) -> None:
        self.judge = StallJudge(stall_s, give_up_s, INTERVAL_S)
        self.now_s, self.verdicts = 0.0, list[StallVerdict]()

    def see(self, *work_states: WorkState) -> Watched:
        for work_state in work_states:
            self.judge.beat(work_state)
            self.look(1)
        return self

    def look(self, times: int, apart_s: float = INTERVAL_S) -> Watched:
        for _ in range(times):
            self.now_s += apart_s
            self.verdicts.append(self.judge.check(self.now_s))
        return self


def times(count: int, *, progress: object = 0, **more: object) -> Iterable[WorkState]:
    return [WorkState(progress, **more)] * count  # type: ignore[arg-type]


def test_a_stall_is_reported_once_and_given_up_in_the_end() -> None:
    verdicts = Watched().see(*times(21)).verdicts
    assert verdicts.count(STALLED) == 1
    assert verdicts.index(STALLED) == 5
    assert verdicts.index(HOPELESS) == 20


def test_what_moves_is_never_reported() -> None:
    watched = Watched().see(*(WorkState(second // 4) for second in range(100)))
    assert set(watched.verdicts) == {FINE}


def test_every_stall_is_reported() -> None:
    watched = Watched().see(*times(8), *times(8, progress=1), *times(8, progress=2))
    assert watched.verdicts.count(STALLED) == 3


def test_rest_is_no_stall_and_what_stood_still_before_does_not_count_after() -> None:
    rest = times(50, has_work=False)
    watched = Watched().see(*times(4), *rest, *times(4))
    assert set(watched.verdicts) == {FINE}
    assert watched.judge.no_progress_at_work_s is not None
    assert Watched().see(*rest).judge.no_progress_at_work_s is None


def test_a_wait_with_a_deadline_of_its_own_is_reported_but_left_to_it() -> None:
    watched = Watched().see(*times(29, patience_s=25.0))
    assert STALLED in watched.verdicts
    assert HOPELESS not in watched.verdicts
    assert HOPELESS in watched.see(*times(5, patience_s=25.0)).verdicts


def test_an_event_loop_that_is_blocked_is_given_up_whatever_it_saw_last() -> None:
    for last in (WorkState(0, has_work=False), WorkState(0, patience_s=1000.0)):
        watched = Watched().see(last).look(21)
        assert watched.judge.blocked_s > 0
        assert STALLED in watched.verdicts
        assert HOPELESS in watched.verdicts


def test_an_event_loop_that_runs_is_not_called_blocked() -> None:
    assert Watched().see(*times(50)).judge.blocked_s == 0.0


def test_a_process_that_was_stopped_is_not_blamed_for_that_time() -> None:
    watched = Watched().see(*times(1)).look(1, apart_s=3600.0).see(*times(1))
    assert set(watched.verdicts) == {FINE}


def test_before_the_first_sighting_nothing_is_judged() -> None:
    assert set(Watched().look(100).verdicts) == {FINE}


def test_limits_that_are_off_do_nothing() -> None:
    assert set(Watched(None, None).see(*times(100)).verdicts) == {FINE}
    assert HOPELESS not in Watched(5.0, None).see(*times(100)).verdicts
    assert STALLED not in Watched(None, 20.0).see(*times(20)).verdicts


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60))
def test_nothing_is_given_up_that_moved_or_rested_within_the_limit(
    seen: list[tuple[int, bool]],
) -> None:
    watched = Watched(5.0, 10.0).see(*(WorkState(value, has_work=work) for value, work in seen))
    for index, verdict in enumerate(watched.verdicts):
        last = seen[max(0, index - 10) : index + 1]
        stood_still = all(work and value == last[0][0] for value, work in last)
        if verdict is HOPELESS:
            assert stood_still
            assert index >= 10
