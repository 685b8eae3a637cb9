"""When a version that several trainer ranks hold can be read on rank 0, which starts transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.trainer.learner.policy_snapshots import PolicySnapshots
from services.trainer.learner.rank_command import RankLeader
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.tensor_layouts import TensorLayout, TensorShard
from sluice.errors import DeadlineError, InvalidRequestError, PeerError
from sluice.weights.snapshot import SnapshotBuffers


class HalfLearner:
    """Holds the first two of four rows; the other rank holds the rest."""

    untrained_names: frozenset[str] = frozenset()

    def __init__(self) -> None:
        pieces = (TensorShard((0,), (2,), (0,)), TensorShard((2,), (2,), (1,)))
        self.layouts = {"w": TensorLayout((4,), torch.float32, pieces)}
        self.rows = 2

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        return [("w", torch.zeros(4))]

    def parts(self, *_: object, **__: object) -> list[tuple[str, torch.Tensor]]:
        return [("w", torch.ones(self.rows))]


class OtherRank(ParallelContext):
    """Rank 0's end of two ranks; the other one answers a gathering by `freezes`."""

    world_size = 2

    def __init__(self, freezes: Callable[[], None]) -> None:
        super().__init__()
        self._freezes = freezes
        self.num_commands = 0

    def broadcast_bytes(self, payload: bytes | None, phase: str) -> bytes:
        self.num_commands += 1
        return payload or b""

    def all_gather(self, values: Sequence[float], phase: str) -> list[list[float]]:
        self._freezes()
        return [list(values)] * 2


class World:
    """A leader, and what could be read while the other rank froze."""

    def __init__(self) -> None:
        self.readable: list[int | None] = []
        self.error: PeerError | None = None
        self.learner: Any = HalfLearner()
        self.snapshots = PolicySnapshots(self.learner, 0, torch.float32, 0.1)
        self.parallel = OtherRank(self._freeze_there)
        samples: Any = SimpleNamespace(close=lambda: None)
        self.leader = RankLeader(self.learner, self.parallel, samples, self.snapshots)

    @property
    def buffers(self) -> SnapshotBuffers:
        return self.snapshots.buffers

    def _freeze_there(self) -> None:
        self.readable.append(self.buffers.version)
        if self.error is not None:
            raise self.error


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.leader.stop()


def test_a_version_is_readable_only_after_all_ranks_hold_it(world: World) -> None:
    for version in (1, 2):
        world.leader.freeze(version)
    assert world.readable == [None, 1]
    assert world.buffers.version == 2


def test_a_version_that_another_rank_did_not_freeze_is_never_readable(world: World) -> None:
    world.leader.freeze(1)
    world.error = PeerError("trainer rank 1", "freezing the weights", "it ended")
    with pytest.raises(PeerError, match="trainer rank 1"):
        world.leader.freeze(2)
    assert world.buffers.version == 1
    before = world.parallel.num_commands
    with pytest.raises(PeerError, match="sending stop: trainer rank 1"):
        world.leader.stop()
    assert world.parallel.num_commands == before, "it would wait for the deadline"


def test_weights_that_do_not_fit_here_do_not_leave_the_other_ranks_waiting(world: World) -> None:
    world.learner.rows = 3
    with pytest.raises(InvalidRequestError):
        world.leader.freeze(1)
    assert world.readable == [None]
    world.learner.rows = 2
    world.leader.freeze(2)  # the lock of commands is free
    assert world.buffers.version == 2


def test_other_ranks_get_no_command_while_the_buffer_is_read_here(world: World) -> None:
    world.leader.freeze(1)
    with world.buffers.read():
        world.leader.freeze(2)
        before = world.parallel.num_commands
        with pytest.raises(DeadlineError):
            world.leader.freeze(3)
    assert world.parallel.num_commands == before
