"""Accounts that are read one by one while tokens keep flowing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.accounting import ReplicaCounters, TokenReading

counts = st.integers(0, 1000)


class Flow:
    """One replica and one reward service, with tokens sampled, sent, and lost on the way."""

    def __init__(self) -> None:
        self.sampled = self.sent = self.lost = 0

    def advance(self, sampled: int, sent: int, lost: int = 0) -> None:
        self.sampled += sampled
        sent = min(sent, self.sampled - self.sent)
        self.sent += sent
        self.lost += min(lost, sent)

    def fleet(self) -> ReplicaCounters:
        return ReplicaCounters(
            generated_tokens=self.sampled, running_tokens=self.sampled - self.sent
        )

    def received(self) -> dict[str, float]:
        return {"pending": float(self.sent - self.lost)}


@given(st.lists(st.tuples(counts, counts), min_size=3, max_size=3))
def test_tokens_that_flow_while_all_are_asked_leave_no_residual(
    steps: list[tuple[int, int]],
) -> None:
    flow = Flow()
    flow.advance(*steps[0])
    before = flow.received()
    flow.advance(*steps[1])
    fleet = flow.fleet()
    flow.advance(*steps[2])
    account = TokenReading(before, fleet, flow.received()).account()
    assert account.residual == 0
    assert account.parts["pending"] == flow.sent
    assert min(account.parts.values()) >= 0
    assert fleet.generated_tokens <= account.total <= flow.sampled


@given(st.lists(st.tuples(counts, counts), min_size=3, max_size=3), counts)
def test_lost_tokens_are_in_the_residual_but_for_those_that_moved(
    steps: list[tuple[int, int]], lost: int
) -> None:
    flow = Flow()
    flow.advance(*steps[0], lost)
    before = flow.received()
    flow.advance(*steps[1])
    fleet = flow.fleet()
    flow.advance(*steps[2])
    reading = TokenReading(before, fleet, flow.received())
    assert flow.lost - reading.moved_tokens <= reading.account().residual <= flow.lost


@pytest.mark.parametrize("unsent", [1, 40])
def test_tokens_that_were_received_and_never_sent_are_in_the_residual(unsent: int) -> None:
    """As of a replica that was killed: its last word is older than what it had sent."""
    fleet = ReplicaCounters(generated_tokens=100, running_tokens=10)
    before = {"trained": 90.0 + unsent}
    quiet = TokenReading(before, fleet, before)
    assert quiet.account().residual == -unsent
    moving = TokenReading(before, fleet, {"trained": 95.0 + unsent})
    assert (moving.moved_tokens, moving.account().residual) == (5, -unsent)


def test_a_service_that_counts_less_than_before_moves_nothing() -> None:
    reading = TokenReading({"pending": 9.0}, ReplicaCounters(generated_tokens=9), {"pending": 4.0})
    assert (reading.moved_tokens, reading.account().residual) == (0, 5)
    late = replace(reading, after={"pending": 9.0})
    assert late.account().residual == 0
