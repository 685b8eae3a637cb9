"""Settled accounts: the two services' counts add up, or prompts are lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.loop.accounting import settled_accounts

# 22 = 8 trained + 5 filtered + 3 dropped + 2 skipped + 4 pending
ACCOUNTS = {
    "submitted": 22.0,
    "trained": 8.0,
    "filtered_all_right": 5.0,
    "dropped_stale": 3.0,
    "skipped": 2.0,
    "pending": 4.0,
    "groups_acknowledged": 8.0,
    "prompts_lost": 0.0,
}


def lost(changes: dict[str, float], *, trained: int = 8, before: float = 0.0) -> float:
    accounts = {**ACCOUNTS, **changes}
    found = settled_accounts(accounts, groups_trained=trained, acknowledged_before=before)
    return found["prompts_lost"]


def test_prompts_without_an_end_and_what_the_service_itself_has_lost_are_added_up() -> None:
    assert lost({"submitted": 25.0}) == 3
    assert lost({"submitted": 20.0}) == 2
    assert lost({"submitted": 25.0, "prompts_lost": 1.0}, trained=12) == 3 + 1 + 4


@given(trained=st.integers(0, 100), acknowledged=st.integers(0, 100), before=st.integers(0, 100))
def test_nothing_is_lost_if_and_only_if_the_counts_are_equal(
    trained: int, acknowledged: int, before: int
) -> None:
    found = lost({"groups_acknowledged": float(acknowledged)}, trained=trained, before=before)
    assert found == abs(acknowledged - before - trained)
