"""The owner thread: one thread for all calls, given up when it does not answer."""

from __future__ import annotations

import threading

import pytest

from sluice.concurrency.threads import OwnerThread
from sluice.errors import DeadlineError, WeightSyncError
from tests.support.retired_threads import wait_for_retired_threads


@pytest.fixture(autouse=True)
def _threads_of_other_tests_are_gone() -> None:
    """Other tests leave threads inside torch's destructors; the counts below are of all threads."""
    assert wait_for_retired_threads(60) == 0


def _never() -> str | None:
    return None


def test_all_calls_run_in_one_thread_that_is_not_the_callers() -> None:
    owner = OwnerThread("owner")

    def ident() -> int:
        return threading.get_ident()

    idents = {
        owner.run(ident, timeout_s=60, stop_reason=_never, peer="p", phase="asking")
        for _ in range(3)
    }
    assert len(idents) == 1
    assert threading.get_ident() not in idents
    owner.retire(lambda: None, within_s=60)
    assert wait_for_retired_threads(60) == 0


def test_an_error_in_the_call_is_raised_in_the_caller() -> None:
    owner = OwnerThread("owner")

    def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        owner.run(fail, timeout_s=60, stop_reason=_never, peer="p", phase="failing")
    owner.retire(lambda: None, within_s=60)


def test_a_call_that_hangs_is_left_behind_at_the_deadline() -> None:
    owner, release = OwnerThread("owner"), threading.Event()
    with pytest.raises(DeadlineError, match=r"peer-1: no answer within 0.05 s while hanging"):
        owner.run(release.wait, timeout_s=0.05, stop_reason=_never, peer="peer-1", phase="hanging")
    release.set()
    owner.retire(lambda: None, within_s=60)
    assert wait_for_retired_threads(60) == 0


def test_a_call_that_hangs_is_left_behind_when_there_is_reason_to_stop() -> None:
    owner, release = OwnerThread("owner"), threading.Event()
    with pytest.raises(WeightSyncError, match="the channel closed"):
        owner.run(
            release.wait,
            timeout_s=60,
            stop_reason=lambda: "the channel closed",
            peer="p",
            phase="hanging",
        )
    release.set()
    owner.retire(lambda: None, within_s=60)


def test_the_last_call_runs_after_a_hanging_one_without_blocking_its_caller() -> None:
    owner, release, order = OwnerThread("owner"), threading.Event(), list[str]()

    def hang() -> None:
        release.wait()
        order.append("hung")

    with pytest.raises(DeadlineError):
        owner.run(hang, timeout_s=0.01, stop_reason=_never, peer="p", phase="hanging")
    owner.retire(lambda: order.append("destroyed"), within_s=60)
    assert order == []
    assert wait_for_retired_threads(0.01) == 1
    release.set()
    assert wait_for_retired_threads(60) == 0
    assert order == ["hung", "destroyed"]


def test_a_call_after_retirement_ends_at_once() -> None:
    owner = OwnerThread("owner")
    owner.retire(lambda: None, within_s=60)
    assert wait_for_retired_threads(60) == 0
    with pytest.raises(WeightSyncError, match="retired"):
        owner.run(lambda: None, timeout_s=60, stop_reason=_never, peer="p", phase="calling")


async def test_calls_that_are_submitted_or_awaited_run_in_order_in_the_thread() -> None:
    owner, seen = OwnerThread("owner"), list[str]()

    def fail() -> None:
        raise ValueError("broken")

    first = owner.submit(lambda: seen.append("first"))
    with pytest.raises(ValueError, match="broken"):
        await owner.call(fail)
    assert first.done()
    assert await owner.call(lambda: threading.current_thread().name) == "owner"
    owner.submit(lambda: seen.append("last")).result(60)
    assert seen == ["first", "last"]
    owner.retire(lambda: None, within_s=60)
    assert wait_for_retired_threads(60) == 0
