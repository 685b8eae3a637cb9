"""Updates that carry changes only, and updates that carry all weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from sluice.errors import WeightSyncError
from tests.support.publisher_fleet import TIMEOUT_S, Trainer, weights
from tests.support.weight_digest import plain_digest


def _version(number: int) -> dict[str, torch.Tensor]:
    """Return a version that differs from the others in one element of a hundred."""
    changing = weights(0)
    changing["a"].view(-1)[number::100] = 3.5
    return changing


@pytest.fixture
def sends_changes() -> bool:
    return True


@pytest.fixture
async def trainer(sends_changes: bool) -> AsyncIterator[Trainer]:
    trainer = Trainer(TIMEOUT_S, sends_changes=sends_changes)
    yield trainer
    await trainer.publisher.close()
    for replica in trainer.replicas.values():
        replica.end()


async def _publish(trainer: Trainer, number: int) -> tuple[bool, int]:
    """Publish; return whether all weights were sent, and the number of attempts."""
    trainer.snapshots.write(_version(number).items(), number, 1.0)
    report = await trainer.publisher.publish(number)
    expected = plain_digest(_version(number))
    for replica in trainer.replicas.values():
        if replica.info.name in trainer.serving():
            assert replica.served is not None
            assert (replica.served.version, replica.served.digest) == (number, expected)
            assert plain_digest(replica.served.tensors) == expected
    assert 0 < report.sent_bytes <= report.dense_bytes
    share = report.sent_bytes / report.dense_bytes
    assert share == 1 or share < 0.1
    assert report.metrics == {
        "weights/stall_s": report.stall_s,
        "timing_s/reshard": report.stall_s,
        "weights/delivery_s": report.seconds,
        "weights/bytes_sent": report.sent_bytes,
        "weights/bytes_share": share,
    }
    return report.sent_bytes == report.dense_bytes, report.attempts


async def test_after_the_first_version_of_an_epoch_only_changes_are_sent(trainer: Trainer) -> None:
    trainer.add("a")
    trainer.add("b")
    assert await _publish(trainer, 0) == (True, 1)
    for number in (1, 2, 3):
        assert await _publish(trainer, number) == (False, 1)


async def test_a_changed_fleet_gets_all_weights_and_then_changes_again(trainer: Trainer) -> None:
    trainer.add("a")
    await _publish(trainer, 0)
    trainer.add("b")
    assert await _publish(trainer, 1) == (True, 1)
    assert await _publish(trainer, 2) == (False, 1)


async def test_what_changes_much_is_sent_whole(trainer: Trainer) -> None:
    trainer.add("a")
    await _publish(trainer, 0)
    report = await trainer.publish(1)
    assert report.sent_bytes == report.dense_bytes
    # Also from such a version on.
    assert (await trainer.publish(2)).replicas == 1


@pytest.mark.parametrize("sends_changes", [False])
async def test_switched_off_all_weights_are_sent_and_no_replica_holds_them_twice(
    trainer: Trainer,
) -> None:
    replica = trainer.add("a")
    for number in range(3):
        assert await _publish(trainer, number) == (True, 1)
    assert replica.held is None


async def test_a_failure_among_changes_is_followed_by_all_weights(trainer: Trainer) -> None:
    trainer.add("a")
    shaky = trainer.add("b")
    await _publish(trainer, 0)
    shaky.faults = {"stage": _once(WeightSyncError("b", "stage", "connection reset"))}
    assert await _publish(trainer, 1) == (True, 2)
    assert await _publish(trainer, 2) == (False, 1)


async def test_a_member_that_does_not_hold_the_base_gets_all_weights_in_the_next_epoch(
    trainer: Trainer,
) -> None:
    trainer.add("a")
    forgetful = trainer.add("b")
    await _publish(trainer, 0)
    forgetful.forget()
    assert await _publish(trainer, 1) == (True, 2)
    assert trainer.serving() == {"a": 1, "b": 1}


async def test_a_member_that_failed_to_commit_and_comes_back_is_not_built_upon(
    trainer: Trainer,
) -> None:
    trainer.add("a")
    shaky = trainer.add("b")
    await _publish(trainer, 0)
    shaky.faults = {"commit": _once(WeightSyncError("b", "commit", "it did not swap"))}
    await _publish(trainer, 1)
    assert trainer.serving() == {"a": 1}
    trainer.register(shaky)
    assert await _publish(trainer, 2) == (True, 1)


async def test_a_base_that_was_overwritten_is_not_used(trainer: Trainer) -> None:
    trainer.add("a")
    await _publish(trainer, 0)
    trainer.snapshots.write(_version(1).items(), 1, 1.0)
    trainer.snapshots.write(_version(2).items(), 2, 1.0)
    assert await _publish(trainer, 3) == (True, 1)


async def test_two_snapshots_of_one_version_are_distinguished(trainer: Trainer) -> None:
    """After a resumed run the same number may stand for other weights."""
    replica = trainer.add("a")
    await _publish(trainer, 1)
    other = {name: tensor + 1 for name, tensor in _version(1).items()}
    for _ in range(2):
        trainer.snapshots.write(other.items(), 1, 1.0)
    report = await trainer.publisher.publish(1)
    assert report.attempts == 1
    assert replica.served is not None
    assert replica.served.digest == plain_digest(other)


def _once(error: Exception) -> Callable[[], Any]:
    errors = [error]

    async def fault() -> None:
        if errors:
            raise errors.pop()

    return fault
