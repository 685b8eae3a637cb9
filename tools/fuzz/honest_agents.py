"""Programs that work on leased samples as they should, so that the run trains."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sluice.client import AsyncClient
from sluice.client.leases import LeasedSample
from sluice.errors import SluiceError

_AT_ONCE, _WAIT_S, _AGAIN_S = 16, 1.0, 0.5


class HonestAgents:
    """Takes samples, asks for one answer each and posts a reward.

    Args:
        run_dir: of the run.

    Attributes:
        may_work: clear it while others shall get the samples.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.may_work = asyncio.Event()
        self.may_work.set()

    async def work(self) -> None:
        """Work until it is cancelled; wait for services that are away."""
        while True:
            try:
                async with AsyncClient.connect(self._run_dir) as client:
                    while True:
                        await self.may_work.wait()
                        await _work_on(client, await client.leases().take(_AT_ONCE, _WAIT_S))
            except SluiceError:
                await asyncio.sleep(_AGAIN_S)


async def _work_on(client: AsyncClient, samples: list[LeasedSample]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for sample in samples:
            tasks.create_task(_play(client, sample))


async def _play(client: AsyncClient, sample: LeasedSample) -> None:
    try:
        await client.leases().chat(sample.lease_id, "only", sample.messages, ())
        await client.leases().end(sample.lease_id, reward_value=float(sample.sample_index % 2))
    except SluiceError:
        return  # its time is over, and the sample has failed
