"""How long failures in a row are borne."""

from __future__ import annotations

import pytest

from sluice.errors import (
    AccessDeniedError,
    DeadlineError,
    ExhaustedError,
    HandshakeError,
    NotReadyError,
    PeerDefectError,
    PeerError,
    SluiceError,
)
from sluice.rpc.retries import Retries, RetryPolicy, is_transient
from tests.support.clock import Clock

GONE = PeerError("reward", "scoring", "gone")


async def test_patience_ends_with_the_failure_itself_and_progress_starts_it_again() -> None:
    clock = Clock()
    retries = Retries(RetryPolicy(first_s=0.0, patience_s=10.0), clock=clock)
    for clock.now_s in (0.0, 9.0):
        await retries.wait_after(GONE)
    retries.note_progress()
    for clock.now_s in (10.0, 19.0):
        await retries.wait_after(GONE)
    clock.now_s = 20.0
    with pytest.raises(PeerError, match="gone"):
        await retries.wait_after(GONE)


async def test_no_patience_is_no_second_try() -> None:
    with pytest.raises(PeerError, match="gone"):
        await Retries(RetryPolicy(patience_s=0.0)).wait_after(GONE)


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (GONE, True),
        (NotReadyError("no replica"), True),
        (ExhaustedError("the queue is full"), True),
        (HandshakeError("reward", "scoring", "certificates"), False),
        (AccessDeniedError("token"), False),
        (DeadlineError("reward", "scoring", 1.0), False),
    ],
)
def test_only_absence_is_worth_another_try(error: SluiceError, is_retried: bool) -> None:
    assert is_transient(error) is is_retried


def test_a_passed_deadline_names_the_whole_time() -> None:
    clock = Clock()
    retries = Retries(RetryPolicy(), "fleet", "generating", deadline_s=5.0, clock=clock)
    assert retries.remaining_s() == 5.0
    clock.now_s = 5.0
    with pytest.raises(DeadlineError, match="fleet: no answer within 5 s while generating"):
        retries.remaining_s()


FULL = ExhaustedError("4352 samples would be under way")


async def test_a_full_service_is_asked_until_the_deadline_whatever_the_patience() -> None:
    clock = Clock()
    retries = Retries(RetryPolicy(first_s=0.0, patience_s=10.0), deadline_s=100.0, clock=clock)
    for clock.now_s in (0.0, 9.0, 30.0, 99.0):
        await retries.wait_after(FULL)
    clock.now_s = 100.0
    with pytest.raises(DeadlineError, match=r"within 100 s .*ended with: 4352 samples"):
        retries.remaining_s()


async def test_waiting_for_capacity_is_no_part_of_the_patience_for_other_failures() -> None:
    clock = Clock()
    retries = Retries(RetryPolicy(first_s=0.0, patience_s=10.0), deadline_s=1000.0, clock=clock)
    for clock.now_s in (0.0, 5.0, 50.0):
        await retries.wait_after(FULL)
    for clock.now_s in (60.0, 69.0):
        await retries.wait_after(GONE)
    clock.now_s = 69.5
    await retries.wait_after(FULL)
    for clock.now_s in (75.0, 84.0):
        await retries.wait_after(GONE)
    clock.now_s = 85.0
    with pytest.raises(PeerError, match="gone"):
        await retries.wait_after(GONE)


async def test_a_full_service_without_a_deadline_is_borne_for_the_patience() -> None:
    clock = Clock()
    retries = Retries(RetryPolicy(first_s=0.0, patience_s=10.0), clock=clock)
    await retries.wait_after(FULL)
    clock.now_s = 10.0
    with pytest.raises(ExhaustedError, match="4352"):
        await retries.wait_after(FULL)


async def test_no_patience_is_no_second_try_for_a_full_service_either() -> None:
    with pytest.raises(ExhaustedError, match="4352"):
        await Retries(RetryPolicy(patience_s=0.0), deadline_s=1e12).wait_after(FULL)


async def test_the_deadline_does_not_name_a_failure_before_progress() -> None:
    clock = Clock()
    retries = Retries(RetryPolicy(first_s=0.0), deadline_s=5.0, clock=clock)
    await retries.wait_after(FULL)
    retries.note_progress()
    clock.now_s = 5.0
    with pytest.raises(DeadlineError) as reported:
        retries.remaining_s()
    assert "4352" not in str(reported.value)


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_deadline_that_passed_before_a_try_was_taken_up_is_caused_by_the_failure_before(
    resumed: bool,
) -> None:
    full, late = ExhaustedError("the queue is full"), DeadlineError("replica", "generating", 1.0)
    retries = Retries(RetryPolicy(first_s=0.0))
    await retries.wait_after(full)
    if resumed:
        retries.note_accepted()
    with pytest.raises(DeadlineError) as caught:
        await retries.wait_after(late)
    assert caught.value.__cause__ is (None if resumed else full)


async def test_progress_of_the_peer_starts_the_patience_again_and_standstill_ends_it() -> None:
    clock, seen = Clock(), iter([1, 2, 2, 2])

    async def fail() -> None:
        clock.now_s += 6.0
        raise GONE

    async def progress() -> object:
        return next(seen)

    retries = Retries(RetryPolicy(first_s=0.0, patience_s=10.0), "reward", "filling", clock=clock)
    with pytest.raises(DeadlineError, match=r"reward: no answer within 10 s while filling; .*gone"):
        await retries.call(fail, progress)
    assert clock.now_s == 24.0  # two tries with progress, then two without


async def test_a_peer_that_does_not_answer_is_not_called_until_it_does() -> None:
    answers: list[object] = [None, None, "up"]
    tries: list[int] = []

    async def fail_once() -> int:
        tries.append(len(answers))
        if len(tries) == 1:
            raise GONE
        return len(tries)

    async def progress() -> object:
        return answers.pop(0)

    assert await Retries(RetryPolicy(first_s=0.0)).call(fail_once, progress) == 2
    assert tries == [3, 0]


async def test_too_many_defects_in_a_row_are_the_last_error() -> None:
    broken, tries = PeerDefectError("reward", "scoring", "INTERNAL"), []

    async def fail() -> None:
        tries.append(1)
        raise GONE if len(tries) == 2 else broken

    with pytest.raises(PeerDefectError):
        await Retries(RetryPolicy(first_s=0.0), max_defects=3).call(fail)
    assert len(tries) == 5
