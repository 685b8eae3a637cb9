"""Prompts that a full service refused: when each is sent again, and when it is given up."""

from __future__ import annotations

import pytest

from sluice.client import PromptEvent, RetryPolicy
from sluice.client.submission import RefusedPrompts
from tests.support.clock import Clock

POLICY = RetryPolicy(first_s=1.0, max_s=4.0, patience_s=60.0)


def refusal(prompt_id: str) -> PromptEvent:
    return PromptEvent(prompt_id, "refused", None, (), f"no capacity for {prompt_id}", True)


def holding(
    names: str, *, policy: RetryPolicy = POLICY, gives_up: bool = False
) -> tuple[RefusedPrompts, Clock]:
    clock = Clock(100.0)
    held = RefusedPrompts(policy, gives_up=gives_up, clock=clock)
    for name in names:
        assert not held.hold(refusal(name))
    return held, clock


def due(held: RefusedPrompts) -> str:
    """All that are due at this time."""
    found = ""
    while (name := held.take_due()) is not None:
        found += name
    return found


def test_nothing_is_due_before_the_pause_has_ended_and_then_one() -> None:
    held, clock = holding("abc")
    assert due(held) == ""
    wait_s = held.wait_s()
    assert wait_s is not None
    assert 0.5 <= wait_s <= 1.0
    clock.now_s += 1.0
    assert due(held) == "a"


def test_a_prompt_that_is_done_with_is_held_no_longer() -> None:
    held, _ = holding("ab")
    held.drop("a")
    held.note_progress()
    held.note_progress()
    assert due(held) == "b"


def test_each_outcome_lets_one_follow() -> None:
    held, _ = holding("abc")
    held.note_progress()
    held.note_progress()
    assert due(held) == "ab"


def test_capacity_without_a_held_prompt_is_not_kept_for_later() -> None:
    held, _ = holding("")
    held.note_progress()
    assert due(held) == ""
    held.hold(refusal("a"))
    assert due(held) == ""
    held.note_progress()
    held.note_progress()
    assert due(held) == "a"
    held.hold(refusal("b"))
    assert due(held) == ""


def test_capacity_found_after_a_pause_is_used_at_once() -> None:
    held, clock = holding("abcdefg")
    clock.now_s += 1.0
    assert due(held) == "a"
    for following in "bcd":
        held.note_progress()
        assert due(held) == following


def test_pauses_double_up_to_the_longest_and_what_is_sent_in_vain_is_one_a_pause() -> None:
    held, clock = holding("ab")
    sent = 0
    for _ in range(1000):  # 100 s, with pauses of at least half of 1, 2, 4, 4, ... s
        clock.now_s += 0.1
        for name in due(held):
            sent += 1
            held.hold(refusal(name))
    assert 25 <= sent <= 52


def test_a_policy_without_pauses_makes_no_loop() -> None:
    held, clock = holding("a", policy=RetryPolicy(first_s=0.0, max_s=0.0))
    assert due(held) == ""
    clock.now_s += 0.02
    assert due(held) == ""
    clock.now_s += 0.05
    assert due(held) == "a"


def test_prompts_are_given_up_together_when_nothing_got_on_for_the_patience() -> None:
    held, clock = holding("ab", gives_up=True)
    clock.now_s += 50.0
    assert due(held) == "a"
    assert not held.hold(refusal("a"))
    held.note_progress()  # patience starts again
    assert due(held) == "b"
    clock.now_s += 50.0
    assert not held.hold(refusal("b"))
    clock.now_s += 60.0
    assert due(held) == "a"
    assert [given_up.detail for given_up in held.hold(refusal("a"))] == [
        "no capacity for b",
        "no capacity for a",
    ]
    assert len(held) == 0
    assert list(held.hold(refusal("c"))) == [refusal("c")]  # those that follow wait no more


def test_patience_starts_again_when_all_are_sent_again_for_another_reason() -> None:
    held, clock = holding("a", gives_up=True)
    clock.now_s += 59.0
    held.forget()
    clock.now_s += 59.0
    assert not held.hold(refusal("a"))
    clock.now_s += 60.0
    assert list(held.hold(refusal("a"))) == [refusal("a")]


def test_prompts_whose_outcomes_are_waited_for_are_never_given_up() -> None:
    held, clock = holding("a")
    clock.now_s += 3600.0
    assert due(held) == "a"
    assert not held.hold(refusal("a"))


def test_without_patience_a_refusal_is_one() -> None:
    clock = Clock(100.0)
    held = RefusedPrompts(RetryPolicy(patience_s=0.0), gives_up=False, clock=clock)
    assert list(held.hold(refusal("a"))) == [refusal("a")]


def test_a_wait_is_warned_of_at_first_and_then_every_ten_minutes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held, clock = holding("ab")
    begin_s, warned_at = clock.now_s, []
    for _ in range(3600):
        clock.now_s += 1.0
        caplog.clear()
        for name in due(held):
            held.hold(refusal(name))
        warned_at += [clock.now_s - begin_s] * len(caplog.records)
    # At 0, too. It takes up to 4 s until one is sent again.
    pauses_s = [after - before for before, after in zip([0.0, *warned_at], warned_at, strict=False)]
    assert len(warned_at) == 5
    assert all(600 <= pause_s <= 605 for pause_s in pauses_s)


def test_a_warning_tells_how_many_wait_how_long_and_why(caplog: pytest.LogCaptureFixture) -> None:
    held, clock = holding("ab")
    assert "capacity: 1; no progress for 0 s; the service: no capacity for a" in caplog.text
    clock.now_s += 640.0
    held.hold(PromptEvent("c", "refused", None, (), "full\n\x1b[2J", True))
    assert "capacity: 3; no progress for 640 s; the service: full  [2J" in caplog.text
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_a_prompt_given_up_is_an_event_and_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    RefusedPrompts(RetryPolicy(patience_s=0.0), gives_up=True).hold(refusal("a"))
    assert not caplog.records
