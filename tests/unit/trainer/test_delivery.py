"""A delivery of weights: joint calls, groups of replicas that answer, and counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import pytest

from services.trainer.fleet.delivery import DeliveryCounts, DeliveryPhase, TransferSession, fan_out
from sluice.errors import DeadlineError, PeerError, SluiceError, leaves
from sluice.types import ReplicaInfo
from tests.support.publisher_fleet import TIMEOUT_S, Trainer, weights

INFO = ReplicaInfo("rollout-0", "1", "host:1", 8)


class HangingSender:
    """Its part of the group's formation does not look at `stop`."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def form_group(
        self, epoch: int, names: list[str], tensors: Any, shares: dict[str, Any]
    ) -> dict[str, None]:
        return dict.fromkeys(names)

    def join(self, stop: threading.Event) -> None:
        self.released.wait(30)

    def abandon(self, reason: str) -> None:
        """Nothing was received."""


class RefusingReplica:
    async def probe(self, timeout_s: float) -> None:
        """It answers."""

    async def join(self, spec: Any) -> None:
        raise PeerError("rollout-0", "joining", "gone")

    async def abort(self, epoch: int, reason: str) -> None:
        """It has nothing."""

    async def close(self) -> None:
        """It has no connection."""


async def test_our_own_part_that_does_not_end_after_a_failure_is_an_error_that_says_so() -> None:
    sender: Any = HangingSender()
    replica: Any = RefusingReplica()
    session = TransferSession(
        sender,
        lambda _: replica,
        (),
        lambda: 1,
        leave_timeout_s=0.05,
        probe_timeout_s=1.0,
        signs_of_life=dict,
        read=nullcontext,
        read_again=None,
        counts=DeliveryCounts(),
        swaps_at_once=len,
    )
    try:
        with pytest.raises(ExceptionGroup) as caught:
            await session.deliver((INFO,))
    finally:
        sender.released.set()
    (error,) = leaves(caught.value)
    assert isinstance(error, DeadlineError)
    assert str(error) == "trainer: no answer within 0.05 s while leaving a failed epoch"


def broken(peer: str) -> SluiceError:
    return PeerError(peer, "testing", "broken")


async def test_every_peer_is_in_exactly_one_of_answered_and_failed() -> None:
    async def call(peer: str) -> str:
        if peer == "b":
            raise broken(peer)
        return peer.upper()

    answers = await fan_out(["a", "b", "c"], call)
    assert answers.answered == {"a": "A", "c": "C"}
    assert list(answers.failed) == ["b"]


async def test_peers_are_called_at_the_same_time() -> None:
    everyone = asyncio.Barrier(3)
    async with asyncio.timeout(60):
        answers = await fan_out("abc", lambda _: everyone.wait())
    assert len(answers.answered) == 3


async def test_the_first_failure_is_acted_on_once_while_others_are_under_way() -> None:
    released = asyncio.Event()
    reactions = []

    async def call(peer: str) -> None:
        if peer != "a":
            await released.wait()
        raise broken(peer)

    async def react() -> None:
        reactions.append("reaction")
        released.set()

    async with asyncio.timeout(60):
        answers = await fan_out("abc", call, on_failure=react)
    assert reactions == ["reaction"]
    assert sorted(answers.failed) == ["a", "b", "c"]


async def test_a_call_that_still_runs_after_the_reaction_is_cancelled() -> None:
    was_cancelled = False

    async def call(peer: str) -> None:
        nonlocal was_cancelled
        if peer == "a":
            raise broken(peer)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    async def react() -> None:
        """Does not help."""

    async with asyncio.timeout(60):
        answers = await fan_out("ab", call, on_failure=react)
    assert was_cancelled
    assert isinstance(answers.failed["b"], PeerError)
    assert "given up: another failed" in str(answers.failed["b"])


async def test_the_trainers_own_part_that_is_given_up_has_its_name() -> None:
    async def call(peer: str | None) -> None:
        if peer is not None:
            raise broken(peer)
        await asyncio.Event().wait()

    async def react() -> None:
        """Does not help."""

    async with asyncio.timeout(60):
        answers = await fan_out((None, "b"), call, on_failure=react)
    assert str(answers.failed[None]).startswith("trainer: ")


async def test_without_a_failure_nothing_is_reacted_to() -> None:
    async def call(peer: str) -> str:
        return peer

    async def react() -> None:
        raise AssertionError("nothing failed")

    answers = await fan_out("ab", call, on_failure=react)
    assert not answers.failed


async def test_cancelling_the_caller_cancels_every_call() -> None:
    running: set[str] = set()

    async def call(peer: str) -> None:
        running.add(peer)
        try:
            await asyncio.Event().wait()
        finally:
            running.discard(peer)

    async with asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(fan_out("ab", call, on_failure=_nothing))
        while len(running) < 2:
            await asyncio.sleep(0)
        calling.cancel()
    assert calling.cancelled()
    assert not running


async def test_a_defect_is_not_taken_for_a_failing_peer() -> None:
    async def call(peer: str) -> None:
        raise KeyError(peer)

    with pytest.raises(ExceptionGroup) as caught:
        await fan_out("a", call, on_failure=_nothing)
    assert caught.group_contains(KeyError)


async def _nothing() -> None:
    """No reaction."""


@pytest.fixture
async def trainer() -> AsyncIterator[Trainer]:
    trainer = Trainer(TIMEOUT_S, sends_changes=True)
    yield trainer
    await trainer.publisher.close()
    for replica in trainer.replicas.values():
        replica.end()


def counts_of(trainer: Trainer) -> DeliveryCounts:
    return trainer.publisher._counts


async def publish(trainer: Trainer, version: int) -> None:
    changing = weights(0)
    changing["a"].view(-1)[version::100] = 3.5
    trainer.snapshots.write(changing.items(), version, 1.0)
    await trainer.publisher.publish(version)


async def test_whole_weights_and_changes_are_counted_apart(trainer: Trainer) -> None:
    trainer.add("a")
    await publish(trainer, 0)
    counts = counts_of(trainer)
    assert counts.updates == {"fleet": 1}
    assert counts.dense_bytes == counts.whole_bytes > 0
    assert counts.sparse_bytes == 0
    await publish(trainer, 1)
    assert counts.updates == {"fleet": 2}
    assert 0 < counts.sparse_bytes < counts.dense_bytes
    assert counts.whole_bytes == 2 * counts.dense_bytes
    assert counts.stall_s == 2 * 0.25
    assert not counts.failures
    assert all(counts.seconds[phase] > 0.0 for phase in DeliveryPhase)


async def test_newcomers_are_counted_apart_from_the_fleet(trainer: Trainer) -> None:
    trainer.add("a")
    await publish(trainer, 0)
    trainer.add("b")
    await trainer.publisher.seed_newcomers()
    assert counts_of(trainer).updates == {"fleet": 1, "newcomers": 1}


@pytest.mark.parametrize(
    ("call", "phase"),
    [
        ("join", DeliveryPhase.FORM),
        ("stage", DeliveryPhase.STAGE),
        ("commit", DeliveryPhase.COMMIT),
    ],
)
async def test_a_failure_is_counted_under_its_phase(
    trainer: Trainer, call: str, phase: DeliveryPhase
) -> None:
    trainer.add("a")
    broken = trainer.add("b")

    async def fall_silent() -> None:
        broken.faults["probe"] = fall_silent
        raise PeerError("b", call, "broken")

    broken.faults[call] = fall_silent
    await publish(trainer, 0)
    counts = counts_of(trainer)
    assert counts.failures == {phase: 1}
    assert counts.updates == {"fleet": 1}
