"""What rank 0 still sends to the others after an error, and whether it closes their group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.trainer.learner.rank_command import RankLeader
from services.trainer.learner.ranks import ParallelContext
from sluice.errors import PeerError

FOLDER = Path("folder")
WAIT_S = 30.0


class TwoRanks(ParallelContext):
    """Rank 0's end of two; the other one is busy."""

    world_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.num_closed = 0

    def broadcast_bytes(self, payload: bytes | None, phase: str) -> bytes:
        self.sent.append(phase.rpartition(" ")[2])
        return payload or b""

    def close(self) -> None:
        self.num_closed += 1


class World:
    """A leader whose own work fails."""

    def __init__(self, error: Exception) -> None:
        def fail(*_: object) -> None:
            raise error

        learner: Any = SimpleNamespace(
            load=fail, save=fail, begin_save=fail, saves_in_background=True
        )
        self.closed = threading.Event()
        samples: Any = SimpleNamespace(close=self.closed.set)
        self.parallel = TwoRanks()
        self.leader = RankLeader(learner, self.parallel, samples)


def load(leader: RankLeader) -> None:
    leader.load(FOLDER)


def save(leader: RankLeader) -> None:
    leader.save(FOLDER)


def begin_save(leader: RankLeader) -> None:
    leader.begin_save(FOLDER)


@pytest.mark.parametrize("work", [load, save, begin_save])
def test_ranks_that_are_busy_after_a_defect_get_no_stop_command_that_would_wait_for_them(
    work: Callable[[RankLeader], None],
) -> None:
    world = World(AssertionError())
    with pytest.raises(AssertionError):
        work(world.leader)
    sent = list(world.parallel.sent)
    with pytest.raises(PeerError, match=r"sending stop: AssertionError\(\)"):
        world.leader.stop()
    assert world.parallel.sent == sent


@pytest.mark.parametrize("work", [save, begin_save])
def test_ranks_that_could_not_write_take_the_stop_command(
    work: Callable[[RankLeader], None],
) -> None:
    world = World(OSError("no space left"))
    with pytest.raises(OSError, match="no space left"):
        work(world.leader)
    world.leader.stop()
    assert world.parallel.sent == ["save", "stop"]


def test_a_stop_that_fails_still_closes_the_samples() -> None:
    world = World(RuntimeError("no memory left on the device"))
    with pytest.raises(RuntimeError):
        world.leader.load(FOLDER)
    with pytest.raises(PeerError):
        world.leader.stop()
    assert world.closed.wait(WAIT_S)


def test_a_group_is_closed_at_the_end_and_after_a_signal_but_not_after_an_error() -> None:
    parallel = TwoRanks()
    with parallel:
        pass
    assert parallel.num_closed == 1
    with pytest.raises(asyncio.CancelledError), parallel:
        raise asyncio.CancelledError
    assert parallel.num_closed == 2
    with pytest.raises(RuntimeError), parallel:
        raise RuntimeError("no memory left on the device")
    assert parallel.num_closed == 2
