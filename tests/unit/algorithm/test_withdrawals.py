"""Groups that are withdrawn too often claim a place, a few at a time."""

from __future__ import annotations

from sluice.algorithm.groups.staleness import RESERVE_AFTER, RESERVED_SHARE, Preemptions

BATCH = 32


def due(count: int) -> Preemptions:
    """So many prompts have been withdrawn often enough to claim a place."""
    found = Preemptions(BATCH)
    for number in range(count):
        for _ in range(RESERVE_AFTER):
            assert not found.reserves_slot(f"p{number}")
            found.preempted(f"p{number}")
    return found


def test_a_group_claims_its_place_only_after_it_was_withdrawn_often_enough() -> None:
    found = due(1)
    assert found.reserves_slot("p0")
    assert not found.reserves_slot("another")


def test_few_hold_claims_at_a_time_and_the_next_follows_when_one_has_ended() -> None:
    most = int(RESERVED_SHARE * BATCH)
    found = due(most + 1)
    assert [found.reserves_slot(f"p{number}") for number in range(most + 1)] == [True] * most + [
        False
    ]
    found.ended("p0")
    assert found.reserves_slot(f"p{most}")


def test_a_prompt_that_has_ended_begins_anew_when_it_comes_again() -> None:
    found = due(1)
    found.ended("p0")
    assert not found.reserves_slot("p0")


def test_nothing_is_known_of_withdrawals_after_another_trainer_has_begun() -> None:
    found = due(1)
    found.forget()
    assert not found.reserves_slot("p0")


def test_a_claim_that_was_withdrawn_all_the_same_holds_nobody_up_and_is_made_again() -> None:
    found = Preemptions(1)  # one claim at a time
    for name in ("a", "b"):
        for _ in range(RESERVE_AFTER):
            found.preempted(name)
    assert found.reserves_slot("a")
    found.preempted("a")
    assert found.reserves_slot("b")
    found.ended("b")
    assert found.reserves_slot("a")
