"""Publishing to a fleet: real transfers over Gloo in this process, scripted control calls."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from services.trainer.fleet.members import MemberState
from sluice.algorithm.accounting import ReplicaCounters
from sluice.errors import DeadlineError, InvalidRequestError, PeerError, WeightSyncError
from sluice.weight_share import Cut, WeightShare
from sluice.weights.sender import WeightSender
from tests.support.publisher_fleet import TIMEOUT_S, Replica, Trainer, weights
from tests.support.weight_digest import plain_digest


@pytest.fixture
def timeout_s() -> float:
    return TIMEOUT_S


@pytest.fixture
async def trainer(timeout_s: float) -> AsyncIterator[Trainer]:
    trainer = Trainer(timeout_s)
    yield trainer
    await trainer.publisher.close()
    for replica in trainer.replicas.values():
        replica.end()


def raising(error: Exception) -> Callable[[], Any]:
    async def fault() -> None:
        raise error

    return fault


def dead(name: str) -> dict[str, Callable[[], Any]]:
    """A replica whose calls all fail, like those to a killed process."""
    faults: dict[str, Callable[[], Any]] = defaultdict(
        lambda: raising(PeerError(name, "calling", "UNAVAILABLE"))
    )
    return {phase: faults[phase] for phase in ("join", "stage", "commit", "abort", "probe")}


def held(replica: Replica, version: int) -> bool:
    assert replica.served is not None
    return replica.served.digest == plain_digest(weights(version))


async def test_a_published_version_is_served_by_all_with_the_same_bytes(trainer: Trainer) -> None:
    first, second = trainer.add("a"), trainer.add("b")
    report = await trainer.publish(0)
    assert (report.replicas, report.attempts) == (2, 1)
    assert report.stall_s == 0.25
    assert trainer.serving() == {"a": 0, "b": 0}
    assert held(first, 0)
    assert held(second, 0)


async def test_replicas_that_divide_the_weights_in_different_ways_serve_in_one_epoch(
    trainer: Trainer,
) -> None:
    share = WeightShare((("a", (Cut(0, ((1000, 500),)),)),))
    whole, part = trainer.add("a"), trainer.add("b", share=share)
    for version in range(3):  # the second and third are changes
        report = await trainer.publish(version)
    assert (report.replicas, report.attempts) == (2, 1)
    assert held(whole, 2)
    assert part.served is not None
    assert part.served.digest != plain_digest(weights(2))
    assert torch.equal(part.served.tensors["a"], weights(2)["a"][1000:1500])
    assert torch.equal(part.served.tensors["b"], weights(2)["b"])
    part.faults["digest"] = raising(AssertionError())
    await trainer.publish(3)
    assert trainer.serving() == {"a": 3}, "another digest than its own version's is not served"


async def test_all_that_serve_are_let_sleep_and_one_that_fails_stays_a_member(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = trainer.add("a"), trainer.add("b")
    await trainer.publisher.sleep_replicas()  # nobody serves yet
    assert "sleep" not in first.calls
    await trainer.publish(0)
    second.faults["sleep"] = raising(PeerError("b", "falling asleep", "UNAVAILABLE"))
    await trainer.publisher.sleep_replicas()
    assert "sleep" in first.calls
    assert "b does not sleep and may keep its memory" in caplog.text
    await trainer.publish(1)
    assert trainer.serving() == {"a": 1, "b": 1}


async def test_the_shares_of_a_fleet_are_compared_outside_of_the_event_loop(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    form = WeightSender.form_group

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return form(*arguments)

    monkeypatch.setattr(WeightSender, "form_group", noted)
    trainer.add("a")
    await trainer.publish(0)
    assert threads
    assert threading.current_thread() not in threads


async def test_an_unchanged_fleet_stays_in_its_epoch(trainer: Trainer) -> None:
    replica = trainer.add("a")
    for version in range(3):
        await trainer.publish(version)
    assert len(replica.epochs) == 1
    assert replica.calls.count("commit") == 3
    assert held(replica, 2)


async def test_a_changed_fleet_forms_a_new_epoch(trainer: Trainer) -> None:
    first = trainer.add("a")
    await trainer.publish(0)
    second = trainer.add("b")
    await trainer.publish(1)
    assert first.epochs[-1] == second.epochs[-1] > first.epochs[0]
    trainer.fleet.expel(second.info, "gone")
    await trainer.publish(2)
    assert len(first.epochs) == 3
    assert trainer.serving() == {"a": 2}


async def test_nobody_to_publish_to_is_no_error(trainer: Trainer) -> None:
    assert (await trainer.publish(0)).replicas == 0


@pytest.mark.parametrize(("phase", "epochs"), [("join", 1), ("stage", 2)])
async def test_a_dead_member_is_dropped_and_the_others_get_the_version(
    trainer: Trainer, phase: str, epochs: int
) -> None:
    good, bad = trainer.add("good"), trainer.add("bad")
    if phase == "stage":
        await trainer.publish(0)
    bad.faults = dead("bad")
    report = await trainer.publish(1)
    assert (report.replicas, report.attempts) == (1, epochs)
    assert trainer.serving() == {"good": 1}
    assert len(good.epochs) == epochs
    assert held(good, 1)
    assert not [member for member in trainer.fleet.members() if member.info.name == "bad"]


async def test_a_group_is_formed_without_a_member_that_gives_no_sign_of_life(
    trainer: Trainer,
) -> None:
    trainer.add("good")
    silent = trainer.add("silent")
    silent.faults = {"probe": raising(DeadlineError("silent", "answering a probe", 1.0))}
    report = await trainer.publish(0)
    assert (report.replicas, report.attempts) == (1, 1)
    assert silent.epochs == []
    assert [member.info.name for member in trainer.fleet.members()] == ["good"]


async def test_a_member_whose_heartbeats_come_joins_though_it_answers_no_probe(
    trainer: Trainer,
) -> None:
    trainer.add("good")
    slow = trainer.add("slow")
    seconds = itertools.count(1)

    async def only_its_heart_beats() -> None:
        load = ReplicaCounters(slots_busy=8, queued=0, generated_tokens=0, busy_seconds=0.0)
        name, instance_id = slow.info.name, slow.info.instance_id
        now_s = float(next(seconds))
        trainer.fleet.heartbeat(name, instance_id, load, draining=False, now_s=now_s)
        raise DeadlineError("slow", "answering a probe", 1.0)

    slow.faults = {"probe": only_its_heart_beats}
    report = await trainer.publish(0)
    assert (report.replicas, report.attempts) == (2, 1)
    assert trainer.serving() == {"good": 0, "slow": 0}


async def test_one_late_answer_leaves_nobody_out(trainer: Trainer) -> None:
    late = trainer.add("late")
    errors = [DeadlineError("late", "answering a probe", 1.0)]

    async def once() -> None:
        if errors:
            raise errors.pop()

    late.faults = {"probe": once}
    report = await trainer.publish(0)
    assert (report.replicas, report.attempts) == (1, 1)


@pytest.mark.parametrize("timeout_s", [2.0])  # of the collective that it never enters
async def test_a_member_whose_call_hangs_is_given_up_once_the_transfer_has_failed(
    trainer: Trainer,
) -> None:
    trainer.add("good")
    bad = trainer.add("bad")
    await trainer.publish(0)
    never = asyncio.Event()
    silent = raising(DeadlineError("bad", "answering a probe", 1.0))
    bad.faults = {"stage": never.wait, "abort": silent, "probe": silent}
    report = await trainer.publish(1)
    assert report.replicas == 1
    assert trainer.serving() == {"good": 1}


async def test_a_member_that_answers_the_probe_stays_and_is_sent_to_again(
    trainer: Trainer,
) -> None:
    trainer.add("a")
    shaky = trainer.add("b")
    errors = [WeightSyncError("b", "stage", "connection reset")]

    async def once() -> None:
        if errors:
            raise errors.pop()

    shaky.faults = {"stage": once}
    report = await trainer.publish(0)
    assert (report.replicas, report.attempts) == (2, 2)
    assert held(shaky, 0)


async def test_a_member_that_received_other_bytes_is_dropped(trainer: Trainer) -> None:
    trainer.add("good")
    bad = trainer.add("bad")
    bad.faults = {"digest": raising(AssertionError("only a mark"))}
    report = await trainer.publish(0)
    assert (report.replicas, report.attempts) == (1, 2)
    assert bad.served is None
    assert trainer.serving() == {"good": 0}


async def test_a_member_that_cannot_commit_is_dropped_and_nothing_is_sent_again(
    trainer: Trainer,
) -> None:
    good, bad = trainer.add("good"), trainer.add("bad")
    bad.faults = {"commit": raising(WeightSyncError("bad", "commit", "serves something else"))}
    report = await trainer.publish(0)
    assert (report.replicas, report.attempts) == (1, 1)
    assert good.calls.count("stage") == 1
    assert trainer.serving() == {"good": 0}


async def test_a_member_that_refuses_the_weights_is_dropped_at_once_and_permanently(
    trainer: Trainer,
) -> None:
    trainer.add("good")
    bad = trainer.add("bad")
    bad.faults = {"join": raising(InvalidRequestError("3 weights differ from this model"))}
    report = await trainer.publish(0)
    assert (report.replicas, report.attempts) == (1, 2)
    assert bad.calls.count("join") == 1
    with pytest.raises(InvalidRequestError, match="3 weights differ from this model"):
        trainer.register(bad)
    trainer.add("bad", instance_id="2")


async def test_a_member_that_answers_but_never_receives_does_not_stop_the_others(
    trainer: Trainer,
) -> None:
    good, bad = trainer.add("good"), trainer.add("bad")
    bad.faults = {"stage": raising(WeightSyncError("bad", "stage", "no route"))}
    report = await trainer.publish(0)
    assert (report.replicas, report.attempts) == (1, 4)  # three with all, then one by one
    assert trainer.serving() == {"good": 0}
    assert held(good, 0)
    assert (await trainer.publish(1)).attempts == 1


async def test_a_version_that_nobody_can_take_is_an_error_that_names_them(
    trainer: Trainer,
) -> None:
    for name in ("a", "b"):
        error = WeightSyncError(name, "stage", "no route")
        trainer.add(name).faults = {"stage": raising(error)}
    with pytest.raises(WeightSyncError, match="weight sync with a, b failed in phase publish"):
        await trainer.publish(0)


async def test_a_newcomer_gets_the_newest_version_in_a_group_of_its_own(trainer: Trainer) -> None:
    old = trainer.add("old")
    await trainer.publish(0)
    new = trainer.add("new")
    await trainer.publisher.seed_newcomers()
    assert trainer.serving() == {"old": 0, "new": 0}
    assert len(old.epochs) == 1
    assert set(old.epochs).isdisjoint(new.epochs)


async def test_a_member_that_was_seeded_again_is_published_to_in_an_epoch_that_it_joins(
    trainer: Trainer,
) -> None:
    returned, other = trainer.add("a"), trainer.add("b")
    await trainer.publish(0)
    trainer.fleet.expel(returned.info, "no heartbeat")
    trainer.register(returned)
    await trainer.publisher.seed_newcomers()
    assert (await trainer.publish(1)).attempts == 1
    assert returned.epochs[-1] == other.epochs[-1]
    assert trainer.serving() == {"a": 1, "b": 1}


async def test_nothing_is_seeded_before_a_first_version_or_to_those_who_serve(
    trainer: Trainer,
) -> None:
    replica = trainer.add("a")
    await trainer.publisher.seed_newcomers()
    assert not replica.calls
    await trainer.publish(0)
    calls = list(replica.calls)
    await trainer.publisher.seed_newcomers()
    assert replica.calls == calls


async def test_publishing_continues_while_a_newcomer_is_seeded_and_the_newcomer_catches_up(
    trainer: Trainer,
) -> None:
    trainer.add("old")
    await trainer.publish(0)
    new = trainer.add("new")
    gate = asyncio.Event()
    new.faults = {"stage": gate.wait}
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        seeding = tasks.create_task(trainer.publisher.seed_newcomers())
        while "stage" not in new.calls:
            await asyncio.sleep(0.01)
        report = await trainer.publish(1)
        assert report.replicas == 1
        assert trainer.serving() == {"old": 1}
        gate.set()
        await seeding
    # What it got first was not the newest any more, so it was given the newest as well.
    assert trainer.serving() == {"old": 1, "new": 1}
    assert held(new, 1)
    assert (await trainer.publish(2)).replicas == 2


async def test_a_newcomer_that_receives_longer_than_a_step_delays_the_version_after_the_next(
    trainer: Trainer,
) -> None:
    trainer.add("old")
    await trainer.publish(0)
    new = trainer.add("new")
    gate = asyncio.Event()
    new.faults = {"stage": gate.wait}
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(trainer.publisher.seed_newcomers())
        while "stage" not in new.calls:
            await asyncio.sleep(0.01)
        await trainer.publish(1)
        publishing = tasks.create_task(trainer.publish(2))
        await asyncio.sleep(0.05)
        assert not publishing.done(), "version 0 is still being read"
        gate.set()
    assert trainer.serving() == {"old": 2, "new": 2}


async def test_a_newcomers_commit_delays_no_version(trainer: Trainer) -> None:
    trainer.add("old")
    await trainer.publish(0)
    new = trainer.add("new")
    gate = asyncio.Event()
    new.faults = {"commit": gate.wait}
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(trainer.publisher.seed_newcomers())
        while "commit" not in new.calls:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            await trainer.publish(1)
            await trainer.publish(2)
        assert trainer.serving() == {"old": 2}
        gate.set()
    assert trainer.serving() == {"old": 2, "new": 2}


@pytest.mark.parametrize("is_alone", [False, True])
async def test_a_newcomer_that_always_receives_longer_than_a_step_serves_all_the_same(
    trainer: Trainer, is_alone: bool
) -> None:
    old = trainer.add("old")
    await trainer.publish(0)
    new = trainer.add("new")
    versions = itertools.count(1)

    async def a_step() -> None:
        await trainer.publish(next(versions))

    new.faults = {"commit": a_step}
    await trainer.publisher.seed_newcomers()
    assert trainer.serving() == {"old": 3, "new": 2}, "it serves what it has"
    new.faults = {}
    await trainer.publisher.seed_newcomers()
    assert trainer.serving() == {"old": 3, "new": 2}, "the next version is published to it"
    if is_alone:
        trainer.fleet.expel(old.info, "gone")
        await trainer.publisher.seed_newcomers()
        assert trainer.serving() == {"new": 3}
    await trainer.publish(4)
    assert set(trainer.serving().values()) == {4}
    assert trainer.serving().keys() == ({"new"} if is_alone else {"old", "new"})


async def test_a_member_that_waits_for_its_turn_alone_is_not_seeded_as_well(
    trainer: Trainer,
) -> None:
    first, second, third = trainer.add("a"), trainer.add("b"), trainer.add("c")
    gate = asyncio.Event()

    async def until_alone() -> None:
        if first.calls.count("stage") > 3:
            await gate.wait()

    first.faults = {"stage": until_alone}
    third.faults = {"stage": raising(WeightSyncError("c", "stage", "no route"))}
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(trainer.publish(0))
        while first.calls.count("stage") <= 3:
            await asyncio.sleep(0.01)
        await trainer.publisher.seed_newcomers()
        gate.set()
    assert trainer.serving() == {"a": 0, "b": 0}
    assert len(second.epochs) == 4


async def test_a_member_that_is_being_published_to_is_not_seeded_as_well(
    trainer: Trainer,
) -> None:
    replica = trainer.add("a")
    gate = asyncio.Event()
    replica.faults = {"stage": gate.wait}
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        publishing = tasks.create_task(trainer.publish(0))
        while "stage" not in replica.calls:
            await asyncio.sleep(0.01)
        await trainer.publisher.seed_newcomers()
        gate.set()
        report = await publishing
    assert report.attempts == 1
    assert len(replica.epochs) == 1


async def test_a_newcomer_that_cannot_be_seeded_is_dropped_and_may_register_again(
    trainer: Trainer,
) -> None:
    trainer.add("old")
    await trainer.publish(0)
    new = trainer.add("new")
    new.faults = {"stage": raising(WeightSyncError("new", "stage", "no route"))}
    await trainer.publisher.seed_newcomers()
    assert trainer.serving() == {"old": 0}
    assert not trainer.fleet.in_state(MemberState.PENDING)
    new.faults = {}
    trainer.register(new)
    await trainer.publisher.seed_newcomers()
    assert trainer.serving() == {"old": 0, "new": 0}


@pytest.mark.parametrize("repeats", [False, True], ids=["leaves no thread", "can be repeated"])
async def test_a_cancelled_publish(trainer: Trainer, repeats: bool) -> None:
    replica = trainer.add("a")
    replica.faults = {"stage": asyncio.Event().wait}
    trainer.freeze(0)
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        publishing = tasks.create_task(trainer.publisher.publish(0))
        while "stage" not in replica.calls:
            await asyncio.sleep(0.01)
        publishing.cancel()
    assert publishing.cancelled()
    async with asyncio.timeout(TIMEOUT_S / 2):  # sooner than the collective's own deadline
        if repeats:
            replica.faults = {}
            assert (await trainer.publisher.publish(0)).replicas == 1
            assert held(replica, 0)
        else:
            await asyncio.get_running_loop().shutdown_default_executor()


async def test_closing_ends_all_control_calls(trainer: Trainer) -> None:
    replica = trainer.add("a")
    await trainer.publish(0)
    await trainer.publisher.close()
    assert replica.calls[-1] == "close"
