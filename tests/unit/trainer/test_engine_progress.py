"""An engine's progress: by its tokens, and for a stalled engine by its answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.fleet.members import EngineActivity, EngineProgress

STALL_S = 10.0


def activity(tokens: int = 0, turns: int = 1, *, work: bool = True) -> EngineActivity:
    return EngineActivity(tokens, turns, work)


def followed(*signs: tuple[float, EngineActivity]) -> EngineProgress:
    progress = EngineProgress(signs[0][1], signs[0][0])
    for now_s, each in signs[1:]:
        progress = progress.after_heartbeat(each, now_s, STALL_S)
    return progress


def test_an_engine_with_work_that_draws_nothing_is_stalled_after_its_time() -> None:
    assert not followed((0, activity(5)), (10, activity(5, turns=9))).is_stalled
    assert followed((0, activity(5)), (10.1, activity(5, turns=9))).is_stalled


def test_every_token_restarts_the_time() -> None:
    assert not followed((0, activity(5)), (9, activity(6)), (18, activity(6))).is_stalled


def test_an_engine_without_work_is_never_stalled_and_gets_its_whole_time_for_new_work() -> None:
    idle = followed((0, activity(5)), (500, activity(5, work=False)))
    assert not idle.is_stalled
    assert not idle.after_heartbeat(activity(5), 509, STALL_S).is_stalled


def test_a_stalled_engine_comes_back_when_it_draws() -> None:
    assert not followed((0, activity(5)), (11, activity(5)), (12, activity(6))).is_stalled


def test_a_stalled_engine_whose_work_was_taken_comes_back_only_when_its_loop_answers() -> None:
    stalled = followed((0, activity(5, turns=3)), (11, activity(5, turns=3)))
    taken = stalled.after_heartbeat(activity(5, turns=3, work=False), 12, STALL_S)
    assert taken.is_stalled
    assert not taken.after_heartbeat(activity(5, turns=4, work=False), 13, STALL_S).is_stalled


def test_an_engine_that_answers_but_does_not_draw_its_work_stays_out() -> None:
    assert followed(
        (0, activity(5, turns=3)), (11, activity(5)), (12, activity(5, turns=9))
    ).is_stalled


def test_an_engine_that_counts_no_turns_comes_back_when_it_has_no_work() -> None:
    silent = activity(5, turns=0)
    assert not followed((0, silent), (11, silent), (12, activity(5, 0, work=False))).is_stalled


def test_a_suspect_is_out_until_it_answers_and_only_if_it_can() -> None:
    suspect = EngineProgress(activity(5, turns=3, work=False), 0.0).mark_stalled()
    assert suspect.is_stalled
    assert not suspect.after_heartbeat(activity(5, turns=4, work=False), 1.0, STALL_S).is_stalled
    assert not EngineProgress(activity(5, turns=0), 0.0).mark_stalled().is_stalled


@given(
    sampled=st.lists(st.integers(0, 3), max_size=30),
    gap_s=st.floats(0.1, STALL_S, exclude_max=True),
)
def test_an_engine_that_draws_at_every_heartbeat_is_never_stalled(
    sampled: list[int], gap_s: float
) -> None:
    tokens, progress = 0, EngineProgress(activity(), 0.0)
    for number, more in enumerate(sampled, 1):
        tokens += more + 1
        progress = progress.after_heartbeat(activity(tokens), number * gap_s, STALL_S)
        assert not progress.is_stalled
