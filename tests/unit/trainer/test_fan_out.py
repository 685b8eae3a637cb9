"""One call to many peers: all are asked, all are accounted for, nobody is waited for in vain."""

from __future__ import annotations

import asyncio

import pytest

from services.trainer.fleet.delivery import fan_out
from sluice.errors import PeerError, SluiceError


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
    async with asyncio.timeout(5):
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

    async with asyncio.timeout(5):
        answers = await fan_out("abc", call, on_failure=react)
    assert reactions == ["reaction"]
    assert sorted(answers.failed) == ["a", "b", "c"]


async def test_a_call_that_goes_on_after_the_reaction_is_given_up() -> None:
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

    async with asyncio.timeout(5):
        answers = await fan_out("ab", call, on_failure=react)
    assert was_cancelled
    assert isinstance(answers.failed["b"], PeerError)
    assert "given up: another failed" in str(answers.failed["b"])


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
