"""What a process says it waits for."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.concurrency.waits import Waiting, deadline, merge_waits, present_waits, waiting_for
from sluice.errors import DeadlineError
from tests.support.clock import Clock


@pytest.fixture(autouse=True)
def _without_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.concurrency.waits._open", {})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(100.0)
    monkeypatch.setattr("sluice.concurrency.waits.time", SimpleNamespace(monotonic=clock))
    return clock


def test_a_wait_is_reported_while_its_block_runs_and_not_after(clock: Clock) -> None:
    with waiting_for("rollout-1", "staging version 7"):
        clock.now_s += 34.0
        assert present_waits() == (
            Waiting("rollout-1", "staging version 7", 34.0, 1, "MainThread"),
        )
    assert present_waits() == ()


def test_waits_for_the_same_are_one_line_with_the_longest_first(clock: Clock) -> None:
    with waiting_for("rollout-1", "generating"):
        clock.now_s += 10.0
        with waiting_for("rollout-1", "generating"), waiting_for("disk", "committing"):
            clock.now_s += 1.0
            assert [(w.peer, w.seconds, w.count) for w in present_waits()] == [
                ("rollout-1", 11.0, 2),
                ("disk", 1.0, 1),
            ]
            assert len(merge_waits(present_waits(), max_lines=1)) == 1


def test_what_came_restarts_the_wait(clock: Clock) -> None:
    with waiting_for("rollout-1", "generating") as wait:
        clock.now_s += 10.0
        wait.restart()
        clock.now_s += 2.0
        assert present_waits()[0].seconds == 2.0


async def test_a_wait_names_its_task() -> None:
    entered = asyncio.Event()

    async def wait_for_ever() -> None:
        with waiting_for("trainer", "announcing"):
            entered.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(wait_for_ever(), name="prompt data-3")
        await entered.wait()
        assert present_waits()[0].task == "prompt data-3"
        task.cancel()
    assert present_waits() == ()


def test_waits_of_many_threads_are_neither_lost_nor_left() -> None:
    num_threads = 8
    entered, leave = threading.Barrier(num_threads + 1), threading.Event()

    def work() -> None:
        for _ in range(200):
            with waiting_for("rank", "reducing"):
                present_waits()
        with waiting_for("rank", "reducing"):
            entered.wait(30)
            leave.wait(30)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    entered.wait(30)
    assert present_waits()[0].count == num_threads
    leave.set()
    for thread in threads:
        thread.join(30)
    assert present_waits() == ()


async def test_a_deadline_is_among_the_waits_of_the_process() -> None:
    async with deadline(30.0, peer="ledger's disk", phase="committing changes"):
        (found,) = (wait for wait in present_waits() if wait.peer == "ledger's disk")
    assert found.phase == "committing changes"
    assert not [wait for wait in present_waits() if wait.peer == "ledger's disk"]


async def test_a_deadline_that_ran_out_is_no_wait_any_more() -> None:
    with pytest.raises(DeadlineError):
        async with deadline(0.001, peer="nobody at all", phase="answering"):
            await asyncio.Event().wait()
    assert not [wait for wait in present_waits() if wait.peer == "nobody at all"]


WAITINGS = st.builds(
    Waiting,
    st.sampled_from(["trainer", "rollout-0", "disk"]),
    st.sampled_from(["generating", "staging"]),
    st.floats(0, 1e6),
    st.integers(1, 100),
)


@given(st.lists(WAITINGS))
def test_telling_waits_together_keeps_their_number_and_the_longest(found: list[Waiting]) -> None:
    reported = merge_waits(found)
    assert sum(wait.count for wait in reported) == sum(wait.count for wait in found)
    assert len({(wait.peer, wait.phase) for wait in reported}) == len(reported)
    assert [wait.seconds for wait in reported] == sorted(
        (w.seconds for w in reported), reverse=True
    )
    assert max((w.seconds for w in reported), default=0) == max(
        (w.seconds for w in found), default=0
    )
