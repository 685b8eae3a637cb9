"""The life of a group: transitions, counts, ages, and who hears of an event when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.group_table import (
    IN_FLIGHT,
    PENDING_STATES,
    TRANSITIONS,
    CancelReason,
    EventKind,
    Group,
    GroupEnding,
    GroupEvent,
    GroupState,
    GroupTable,
    IllegalTransitionError,
)
from services.reward.ledger.ledger import PromptLedger
from services.reward.records.statistics import prompts_lost
from sluice.algorithm.groups.staleness import RESERVE_AFTER, GroupAges, reserves_slot
from sluice.algorithm.sampling.attempt import Attempt
from sluice.errors import InvalidRequestError
from sluice.types import DataProgress, GradedGroup, Prompt, PromptEnd, RolloutGroup, Scored
from tests.support.client_prompt import client_prompt
from tests.support.scripted_rollout import rollout_of

RIGHT = Scored(1.0, 1.0, {})


class World:
    """Groups whose events are noted."""

    def __init__(
        self, batch_size: int = 1, max_staleness: int = 1, ledger: PromptLedger | None = None
    ) -> None:
        self.ledger = ledger or PromptLedger()
        self.ages = GroupAges(batch_size, max_staleness, "wait")
        self.groups = GroupTable(self.ledger, {"": self.ages})
        self.groups.policy_version = 5
        self.heard: list[EventKind] = []
        self.groups.observe(self.hear)

    def hear(self, event: GroupEvent) -> None:
        is_pending = self.ledger.prompts.get(event.group.prompt_id) is not None
        assert is_pending == (event.group.state is not GroupState.ENDED)  # the ledger is first
        self.heard.append(event.kind)

    def accept(self, name: str) -> Group:
        prompt = client_prompt(prompt_id=name)
        return self.groups.accept(prompt)

    def start(self, name: str, version: int | None = None, *, reserves: bool = False) -> Group:
        known = {group.prompt_id: group for group in self.groups}
        group = known.get(name) or self.accept(name)
        self.groups.admit(group, Attempt(name, 1, None, 4), 4, reserves_slot=reserves)
        self.groups.set_oldest_version(group, version)
        return group

    def keep(self, group: Group, version: int = 5) -> None:
        self.groups.note_generated(group)
        self.groups.keep(group, graded(group.prompt, version))

    def waited_for(self) -> tuple[int, ...]:
        return self.ages.decide(5).waiting_for


def graded(prompt: Prompt, version: int = 5) -> GradedGroup:
    rollout = rollout_of("text", 0, version, 1, 3)
    return GradedGroup(RolloutGroup(prompt, np.zeros(1, np.uint32), (rollout,)), (RIGHT,))


EVENTS: dict[EventKind, Callable[[World, Group], None]] = {
    EventKind.ADMITTED: lambda world, group: world.groups.admit(group, Attempt("k", 1, None, 4), 4),
    EventKind.GENERATED: lambda world, group: world.groups.note_generated(group),
    EventKind.GRADED: lambda world, group: world.groups.note_graded(group, graded(group.prompt)),
    EventKind.CONTINUED: lambda world, group: world.groups.note_more(group, is_sure=True),
    EventKind.KEPT: lambda world, group: world.groups.keep(group, graded(group.prompt)),
    EventKind.LEASED: lambda world, group: world.groups.lease("batch", 5, [group]),
    EventKind.REQUEUED: lambda world, group: world.groups.requeue(group, CancelReason.NO_SLOT),
    EventKind.ENDED: lambda world, group: world.groups.end(group, GroupEnding(PromptEnd.TRAINED)),
}
TO_STATE = {
    GroupState.WAITING: (),
    GroupState.GENERATING: (EventKind.ADMITTED,),
    GroupState.GRADING: (EventKind.ADMITTED, EventKind.GENERATED),
    GroupState.KEPT: (EventKind.ADMITTED, EventKind.GENERATED, EventKind.KEPT),
    GroupState.LEASED: (
        EventKind.ADMITTED,
        EventKind.GENERATED,
        EventKind.KEPT,
        EventKind.LEASED,
    ),
    GroupState.ENDED: (EventKind.ENDED,),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", GroupState)
def test_an_event_that_the_table_does_not_allow_changes_nothing(
    state: GroupState, event: EventKind
) -> None:
    world = World()
    group = world.accept("p")
    for each in TO_STATE[state]:
        EVENTS[each](world, group)
    heard = len(world.heard)
    sources, targets = TRANSITIONS[event]
    if state in sources:
        EVENTS[event](world, group)
        assert group.state in targets
        assert world.heard[heard:] == [event]
    else:
        with pytest.raises(IllegalTransitionError, match="may not lead from"):
            EVENTS[event](world, group)
        assert (group.state, len(world.heard)) == (state, heard)
        assert world.ledger.num_submitted == 1
    assert prompts_lost(world.ledger, world.groups, 1) >= 0


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(list(EVENTS))), max_size=40))
def test_counts_follow_the_groups_whatever_happens(steps: list[tuple[int, EventKind]]) -> None:
    world = World()
    groups = [world.accept(f"p{number}") for number in range(4)]
    for number, event in steps:
        group = groups[number]
        is_leasable = world.ledger.open_lease is None or event is not EventKind.LEASED
        if group.state in TRANSITIONS[event][0] and is_leasable:
            EVENTS[event](world, group)
    found = Counter(group.state for group in world.groups)
    assert {state: world.groups.counts[state] for state in PENDING_STATES} == {
        state: found[state] for state in PENDING_STATES
    }
    running = [group for group in groups if group.state in IN_FLIGHT]
    assert world.groups.num_in_flight == len(running)
    assert world.groups.of_source[""].num_sure == sum(group.is_sure for group in running)
    assert world.groups.num_unrequested == sum(group.num_unrequested for group in running)
    assert len(world.groups) == world.ledger.num_pending


def test_a_refused_prompt_leaves_no_group_and_nobody_hears_of_it() -> None:
    world = World()
    world.accept("p")
    with pytest.raises(InvalidRequestError, match="used before"):
        world.accept("p")
    assert (len(world.groups), world.heard) == (1, [EventKind.ACCEPTED])


def test_a_requeued_group_begins_like_a_new_one_but_knows_how_often_it_was_preempted() -> None:
    world = World()
    group = world.start("p", 5)
    group.progress.num_received = 7
    world.groups.requeue(group, CancelReason.PREEMPTED)
    assert (group.state, group.progress.num_received, group.oldest_version) == ("waiting", 0, None)
    assert (group.version, group.num_preemptions) == (None, 1)


def test_pending_prompts_of_an_earlier_service_wait_or_are_leased(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with PromptLedger(path) as ledger:
        first = World(ledger=ledger)
        for name in ("leased", "kept", "waiting"):
            first.accept(name)
        for name in ("leased", "kept"):
            first.keep(first.start(name, 5))
        first.groups.lease("batch", 5, [first.groups["leased"]])
    with PromptLedger(path) as ledger:
        again = GroupTable(ledger, {"": first.ages})
    assert {group.prompt_id: group.state for group in again} == {
        "leased": GroupState.LEASED,
        "kept": GroupState.WAITING,
        "waiting": GroupState.WAITING,
    }
    heard: list[tuple[EventKind, str]] = []
    again.observe(lambda event: heard.append((event.kind, event.group.prompt_id)))
    assert sorted(heard) == [
        (EventKind.ACCEPTED, "kept"),
        (EventKind.ACCEPTED, "leased"),
        (EventKind.ACCEPTED, "waiting"),
        (EventKind.LEASED, "leased"),
    ]


def test_rows_that_are_forgotten_may_be_issued_again_under_the_same_id() -> None:
    world = World()
    row = client_prompt(prompt_id="data-0")
    values = {name: getattr(row, name) for name in row.__slots__}
    prompt = Prompt(**{**values, "origin": "dataset", "position": 0})
    world.groups.accept(prompt)
    world.groups.forget_data()
    assert (len(world.groups), world.ledger.num_submitted) == (0, 0)
    assert world.ledger.restart_data(DataProgress(0)) == DataProgress(0)
    world.groups.accept(prompt)


# ---------------------------------------------------------------------------------------- ages


def full_world() -> World:
    """One kept group of version 5 fills the batch of version 5; S is 1."""
    world = World()
    world.keep(world.start("kept", 5))
    return world


def test_a_group_counts_from_its_start_until_it_ends() -> None:
    world = full_world()
    group = world.start("late")
    assert world.waited_for() == ()
    world.groups.set_oldest_version(group, 4)
    assert world.waited_for() == (4,)
    world.groups.end(group, GroupEnding(PromptEnd.DROPPED_FAILED))
    assert world.waited_for() == ()
    world.groups.set_oldest_version(group, 4)  # reported after the end
    assert world.waited_for() == ()


@pytest.mark.parametrize("version", [None, 5])
def test_a_group_that_lost_its_tokens_holds_no_batch_back(version: int | None) -> None:
    world = full_world()
    group = world.start("late", 4)
    world.groups.set_oldest_version(group, version)
    assert world.waited_for() == ()


def test_a_group_that_was_just_kept_has_no_slot_to_lose() -> None:
    world = full_world()
    kept = world.start("just kept", 3)
    world.start("other", 3)
    assert set(world.ages.without_slot(5)) == {"just kept", "other"}
    world.keep(kept, 5)
    assert world.ages.without_slot(5) == ("other",)


def test_a_reserved_slot_counts_before_the_group_holds_tokens_and_after_its_probes() -> None:
    world = World(batch_size=2, max_staleness=0)
    reserved = world.start("reserved", reserves=True)
    world.start("other", 5)
    world.keep(world.start("kept", 5))
    assert world.ages.without_slot(5) == ("other",)  # both slots are taken
    world.groups.set_oldest_version(reserved, 5)
    world.groups.set_oldest_version(reserved, None)  # its replica is gone
    assert world.ages.without_slot(5) == ("other",)
    world.groups.note_more(reserved, is_sure=False)
    counts = world.groups.of_source[""]
    assert (counts.num_sure, counts.num_reserved) == (1, 1)
    world.groups.end(reserved, GroupEnding(PromptEnd.DROPPED_FAILED))
    assert (counts.num_sure, counts.num_reserved, world.ages.without_slot(5)) == (0, 0, ())


@pytest.mark.parametrize(
    ("num_preemptions", "num_reserved", "batch_size", "expected"),
    [
        (RESERVE_AFTER, 0, 1, True),
        (RESERVE_AFTER - 1, 0, 1, False),
        (RESERVE_AFTER, 1, 8, False),
        (RESERVE_AFTER + 5, 1, 16, True),
    ],
)
def test_a_prompt_that_was_preempted_often_reserves_one_of_a_few_slots(
    num_preemptions: int, num_reserved: int, batch_size: int, expected: bool
) -> None:
    assert reserves_slot(num_preemptions, num_reserved, batch_size) is expected


def test_a_group_that_ends_another_way_begins_to_count_its_preemptions_again() -> None:
    world = World()
    group = world.start("p", 5)
    world.groups.requeue(group, CancelReason.PREEMPTED)
    world.start("p", 5)
    world.groups.requeue(group, CancelReason.TAKEN_OVER)
    assert group.num_preemptions == 0
