"""A pool of channels: none closes while a call uses it, none stays open without a user."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import ClassVar

import pytest

from sluice.rpc import client
from sluice.rpc.client import ChannelPool

ADDRESSES = "abc"


class Channel:
    """Notes its users, and fails when it is closed under one."""

    opened: ClassVar[set[Channel]] = set()

    def __init__(self) -> None:
        self.num_users = 0
        self.opened.add(self)

    async def close(self) -> None:
        assert self.num_users == 0, "closed under a call"
        self.opened.discard(self)
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _scripted_channels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(client, "open_channel", lambda _address, **_: Channel())
    yield
    Channel.opened.clear()


async def use(pool: ChannelPool, chosen: random.Random) -> None:
    for _ in range(40):
        address = chosen.choice(ADDRESSES)
        channel = pool.acquire(address)
        assert channel in Channel.opened
        channel.num_users += 1  # type: ignore[attr-defined]
        try:
            for _ in range(chosen.randint(0, 4)):
                await asyncio.sleep(0)
        finally:
            channel.num_users -= 1  # type: ignore[attr-defined]
            await pool.release(address)


@pytest.mark.parametrize("seed", range(20))
async def test_no_channel_closes_in_use_and_none_stays_without_a_user(seed: int) -> None:
    chosen, pool = random.Random(seed), ChannelPool(1)
    async with asyncio.TaskGroup() as tasks:
        users = [tasks.create_task(use(pool, chosen)) for _ in range(6)]
        for _ in range(25):
            await pool.retain(chosen.sample(ADDRESSES, chosen.randint(0, 3)))
            await asyncio.sleep(0)
            if chosen.random() < 0.1:
                chosen.choice(users).cancel()
    await pool.retain(())
    assert Channel.opened == set()


async def test_a_retained_channel_is_the_same_for_every_call() -> None:
    pool = ChannelPool(1)
    await pool.retain(("a",))
    first = pool.acquire("a")
    await pool.release("a")
    assert pool.acquire("a") is first


async def test_a_closed_pool_retains_nothing() -> None:
    pool = ChannelPool(1)
    await pool.retain(("a",))
    pool.acquire("a")
    await pool.release("a")
    await pool.close()
    pool.acquire("a")
    await pool.release("a")
    assert Channel.opened == set()
