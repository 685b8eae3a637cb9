"""Running groups are entered beside the kept ones for as long as they hold tokens."""

from __future__ import annotations

import pytest

from services.reward.groups.admission import StaleGroups
from services.reward.groups.batcher import Batcher, BatchRules
from services.reward.groups.group import InFlightItem, InFlightTable
from services.reward.records.statistics import Discard
from sluice.algorithm.groups.staleness import RESERVE_AFTER, GroupAges
from sluice.algorithm.sampling.attempt import Attempt
from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from tests.support.client_prompt import client_prompt


class Running:
    """One kept group of version 5 fills the batch of version 5; S is 1."""

    def __init__(self) -> None:
        self.batcher = Batcher(BatchRules(1, 1, "wait"))
        self.table = InFlightTable(self.batcher.ages)
        self.stale = StaleGroups(
            self.batcher, self.table, SamplingRules(StrategyName.STREAM, 1, 1, 4)
        )
        self.batcher.ages.keep("kept", 5, 0)

    def start(self, name: str, version: int | None) -> InFlightItem:
        item = self.table.add(client_prompt(prompt_id=name), Attempt(name, 1, None, 4), 4)
        item.start_version = version
        return item

    def waited_for(self) -> tuple[int, ...]:
        return self.batcher.ages.decide(5).waiting_for


def test_a_group_counts_from_its_start_until_it_ends() -> None:
    running = Running()
    item = running.start("late", None)
    assert running.waited_for() == ()
    item.start_version = 4
    assert running.waited_for() == (4,)
    running.table.remove(item)
    assert running.waited_for() == ()
    assert item.start_version == 4  # still told of in the log


@pytest.mark.parametrize("version", [None, 5])
def test_a_group_that_lost_its_tokens_holds_no_batch_back(version: int | None) -> None:
    running = Running()
    item = running.start("late", 4)
    item.start_version = version
    assert running.waited_for() == ()


def test_a_start_told_after_the_end_is_not_entered() -> None:
    running = Running()
    item = running.start("late", 4)
    running.table.remove(item)
    item.start_version = 4
    assert running.waited_for() == ()


def test_a_group_that_was_just_kept_is_not_cancelled_for_the_want_of_a_place() -> None:
    running = Running()
    items = {name: running.start(name, 3) for name in ("just kept", "other")}
    running.stale.check(5, but_for="just kept")
    assert running.stale.left(items["other"], is_cancelled=True)
    assert not running.stale.left(items["just kept"], is_cancelled=True)


def test_a_claimed_place_counts_before_the_group_holds_tokens_and_after_its_probes() -> None:
    ages = GroupAges(2, 0, "wait")
    table = InFlightTable(ages)
    item = table.add(
        client_prompt(prompt_id="claimed"), Attempt("claimed", 1, None, 2), 2, reserved_for=5
    )
    other = table.add(client_prompt(prompt_id="other"), Attempt("other", 2, None, 2), 2)
    other.start_version = 5
    ages.keep("kept", 5, 0)
    assert ages.expired(5) == ("other",)  # both places are taken
    item.start_version = 5
    item.start_version = None  # its replica is gone
    assert ages.expired(5) == ("other",)
    table.continue_group(item, is_sure=False)
    assert table.num_sure == 1
    table.remove(item)
    assert (table.num_sure, ages.expired(5)) == (0, ())


def test_a_group_that_ended_before_its_cancellation_reached_it_was_not_withdrawn() -> None:
    batcher = Batcher(BatchRules(1, 0, "wait"))
    table = InFlightTable(batcher.ages)
    rules = SamplingRules(StrategyName.STREAM, 1, 0, 4, on_policy_fill="expected")
    stale = StaleGroups(batcher, table, rules)
    for is_cancelled in (False, True):
        for _ in range(RESERVE_AFTER):
            item = table.add(client_prompt(prompt_id="p"), Attempt("p", 1, None, 4), 4)
            item.start_version = 0
            stale.cancel(["p"], 0)
            table.remove(item)
            found = stale.left(item, is_cancelled=is_cancelled)
            assert found is (Discard.PREEMPTED if is_cancelled else None)
        assert stale.reserves_slot("p") is is_cancelled
