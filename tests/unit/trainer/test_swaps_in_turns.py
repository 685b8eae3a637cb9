"""Replicas swap in turns, so that the others sample meanwhile; real transfers over Gloo."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from sluice.algorithm.publishing import swaps_at_once
from sluice.errors import PeerError
from tests.support.publisher_fleet import TIMEOUT_S, Trainer

_TURNS = 20


class _Swaps:
    """Counts the replicas that swap at the same time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def __call__(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(_TURNS):  # others begin meanwhile, if they may
            await asyncio.sleep(0)
        self.now -= 1


@asynccontextmanager
async def _fleet(names: str, at_once: Callable[[int], int]) -> AsyncIterator[Trainer]:
    trainer = Trainer(TIMEOUT_S, swaps_at_once=at_once)
    for name in names:
        trainer.add(name)
    try:
        yield trainer
    finally:
        await trainer.publisher.close()
        for replica in trainer.replicas.values():
            replica.end()


def _count_swaps(trainer: Trainer) -> _Swaps:
    swaps = _Swaps()
    for replica in trainer.replicas.values():
        replica.faults["commit"] = swaps
    return swaps


@pytest.mark.parametrize(("staleness", "most"), [(0, 3), (1, 1), (2, 1)])
async def test_replicas_that_serve_swap_one_by_one_unless_the_run_is_synchronous(
    staleness: int, most: int
) -> None:
    async with _fleet("abc", partial(swaps_at_once, max_staleness=staleness)) as trainer:
        await trainer.publish(0)
        swaps = _count_swaps(trainer)
        await trainer.publish(1)
        assert swaps.most == most
        assert trainer.serving() == {"a": 1, "b": 1, "c": 1}


async def test_replicas_that_serve_nothing_yet_swap_together() -> None:
    async with _fleet("abc", lambda _: 1) as trainer:
        swaps = _count_swaps(trainer)
        await trainer.publish(0)
        assert swaps.most == 3


async def test_a_replica_that_dies_in_its_turn_leaves_the_others_theirs_and_no_base() -> None:
    async with _fleet("abc", lambda _: 1) as trainer:
        await trainer.publish(0)
        await trainer.publish(1)

        async def dies() -> Any:
            raise PeerError("b", "committing version 2", "UNAVAILABLE")

        trainer.replicas["b-1"].faults["commit"] = dies
        report = await trainer.publish(2)
        assert (report.replicas, report.attempts) == (2, 1)
        assert trainer.serving() == {"a": 2, "c": 2}
        # One of the group may hold another version: the next one is sent whole.
        report = await trainer.publish(3)
        assert report.sent_bytes == report.dense_bytes
        assert trainer.serving() == {"a": 3, "c": 3}
