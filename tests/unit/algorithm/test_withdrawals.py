"""Groups that are withdrawn too often claim a place, a few at a time."""

from __future__ import annotations

from sluice.algorithm.withdrawals import CLAIM_AFTER, CLAIMED_SHARE, Withdrawals

BATCH = 32


def due(count: int) -> Withdrawals:
    """So many prompts have been withdrawn often enough to claim a place."""
    found = Withdrawals(BATCH)
    for number in range(count):
        for _ in range(CLAIM_AFTER):
            assert not found.grants_claim(f"p{number}")
            found.withdrawn(f"p{number}")
    return found


def test_a_group_claims_its_place_only_after_it_was_withdrawn_often_enough() -> None:
    found = due(1)
    assert found.grants_claim("p0")
    assert not found.grants_claim("another")


def test_few_hold_claims_at_a_time_and_the_next_follows_when_one_has_ended() -> None:
    most = int(CLAIMED_SHARE * BATCH)
    found = due(most + 1)
    assert [found.grants_claim(f"p{number}") for number in range(most + 1)] == [True] * most + [
        False
    ]
    found.ended("p0")
    assert found.grants_claim(f"p{most}")


def test_a_prompt_that_has_ended_begins_anew_when_it_comes_again() -> None:
    found = due(1)
    found.ended("p0")
    assert not found.grants_claim("p0")


def test_nothing_is_known_of_withdrawals_after_another_trainer_has_begun() -> None:
    found = due(1)
    found.forget()
    assert not found.grants_claim("p0")


def test_a_claim_that_was_withdrawn_all_the_same_holds_nobody_up_and_is_made_again() -> None:
    found = Withdrawals(1)  # one claim at a time
    for name in ("a", "b"):
        for _ in range(CLAIM_AFTER):
            found.withdrawn(name)
    assert found.grants_claim("a")
    found.withdrawn("a")
    assert found.grants_claim("b")
    found.ended("b")
    assert found.grants_claim("a")
