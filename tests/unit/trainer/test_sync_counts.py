"""What deliveries of weights take, and where they fail, is counted as they happen."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.trainer.fleet.delivery import SyncCounts, SyncPhase
from sluice.errors import PeerError
from tests.support.publisher_fleet import TIMEOUT_S, Trainer, weights


@pytest.fixture
async def trainer() -> AsyncIterator[Trainer]:
    trainer = Trainer(TIMEOUT_S, sends_changes=True)
    yield trainer
    await trainer.publisher.close()
    for replica in trainer.replicas.values():
        replica.end()


def counts_of(trainer: Trainer) -> SyncCounts:
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
    assert all(counts.seconds[phase] > 0.0 for phase in SyncPhase)


async def test_newcomers_are_counted_apart_from_the_fleet(trainer: Trainer) -> None:
    trainer.add("a")
    await publish(trainer, 0)
    trainer.add("b")
    await trainer.publisher.seed_newcomers()
    assert counts_of(trainer).updates == {"fleet": 1, "newcomers": 1}


@pytest.mark.parametrize(
    ("call", "phase"),
    [("join", SyncPhase.FORM), ("stage", SyncPhase.STAGE), ("commit", SyncPhase.COMMIT)],
)
async def test_a_failure_is_counted_under_its_phase(
    trainer: Trainer, call: str, phase: SyncPhase
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
