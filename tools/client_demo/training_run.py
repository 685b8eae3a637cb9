"""The run that the demo's clients use while it trains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow.parquet as pq

from sluice.api.trainer.v1 import trainer_pb2
from sluice.client.async_client import AsyncClient
from sluice.client.run_address import address_of_run
from sluice.client.run_monitor import RunMonitor, RunSnapshot
from sluice.config.run import RunConfig
from sluice.errors import SluiceError
from sluice.rpc.client import open_channel, trainer_stub, unary_call
from tools.chaos.launched_run import LaunchedRun
from tools.chaos.preparation import SIZES, Size

__all__ = ["Pace", "RunUnderClients", "demo_size", "prompts_of"]

_POLL_S, _WAIT_S, _HOLD_S = 0.2, 180.0, 60.0


def demo_size(name: str, max_num_seqs: int, max_queued: int) -> Size:
    """A run without checkpoints, whose replicas refuse what they cannot queue.

    Args:
        name: of one of the sizes that chaos has.
        max_num_seqs: slots of a replica.
        max_queued: samples that wait at a replica before calls are refused.
    """
    base = SIZES[name]
    overrides = (
        *base.overrides,
        "trainer.save_freq=-1",
        f"actor_rollout_ref.rollout.max_num_seqs={max_num_seqs}",
        f"sluice.rollout.max_queued={max_queued}",
    )
    return Size(base.task, base.preparation, overrides, base.has_chance_scorer, base.window_s)


def prompts_of(config: RunConfig) -> list[list[dict[str, str]]]:
    """The conversations of the run's own training set."""
    files = config.data.train_files
    names = [files] if isinstance(files, str) else files or []
    rows = [row for name in names for row in pq.read_table(name, columns=["prompt"]).to_pylist()]
    return [row["prompt"] for row in rows]


@dataclass(frozen=True, slots=True)
class Pace:
    """How training got on for a while."""

    steps: int
    seconds: float

    @property
    def steps_per_minute(self) -> float:
        """The speed."""
        return 60 * self.steps / self.seconds if self.seconds else 0.0


class RunUnderClients:
    """What the demo asks of the run.

    Args:
        run: as it was launched.
    """

    def __init__(self, run: LaunchedRun) -> None:
        self._run = run

    async def until_step(self, step: int) -> None:
        """Waits until so many steps are done and the replicas serve."""

        def is_there(seen: RunSnapshot) -> bool:
            serving = sum(replica.state == "serving" for replica in seen.replicas)
            return seen.step >= step and serving >= self._run.config.sluice.rollout.replicas

        await self._until(is_there, f"step {step} with all replicas")

    async def step(self) -> int:
        """Steps done."""
        async with self._monitor() as monitor:
            return (await monitor.snapshot()).step

    async def pace(self, seconds: float) -> Pace:
        """Training's own speed for so long."""
        before, began_s = await self.step(), time.monotonic()
        await asyncio.sleep(seconds)
        return Pace(await self.step() - before, time.monotonic() - began_s)

    async def slots_left(self) -> int:
        """Samples in engines or waiting for one, once training is held and has what it wants."""
        async with self._monitor() as monitor, monitor.held(_HOLD_S):
            ends_s, busy = time.monotonic() + _HOLD_S, await self._busy()
            while busy and time.monotonic() < ends_s:
                await asyncio.sleep(_POLL_S)
                busy = await self._busy()
            return busy

    async def stop(self) -> int:
        """Ends the run as at its last step; the launcher's exit code."""
        address = address_of_run(self._run.run_dir)
        assert address.trainer is not None
        async with open_channel(address.trainer, max_message_bytes=1 << 20) as channel:
            await unary_call(
                trainer_stub(channel).Stop,
                trainer_pb2.StopRequest(reason="the clients have gone"),
                name="TrainerService/Stop",
                peer="trainer",
                phase="asking it to stop",
            )
        return await self._run.ended()

    async def _busy(self) -> int:
        async with self._monitor() as monitor:
            replicas = [each.address for each in (await monitor.snapshot()).replicas]
        address = address_of_run(self._run.run_dir)
        alone = type(address)(replicas=tuple(replicas), credentials=address.credentials)
        async with AsyncClient(alone) as client:
            return sum(replica.slots_busy for replica in await client.replicas())

    def _monitor(self) -> RunMonitor:
        address = address_of_run(self._run.run_dir)
        assert address.trainer is not None
        assert address.reward is not None
        return RunMonitor(address.trainer, address.reward, credentials=address.credentials)

    async def _until(self, condition: Callable[[RunSnapshot], bool], what: str) -> None:
        ends_s, last = time.monotonic() + _WAIT_S, "nothing was heard of it"
        while True:
            if self._run.up.returncode is not None:
                raise RuntimeError(f"the run ended with {self._run.up.returncode} before {what}")
            if time.monotonic() > ends_s:
                raise RuntimeError(f"within {_WAIT_S:g} s not {what}: {last}")
            try:
                async with self._monitor() as monitor:
                    snapshot = await monitor.snapshot()
            except SluiceError as error:  # it is starting
                last = str(error)
            else:
                if condition(snapshot):
                    return
                last = f"step {snapshot.step}, {snapshot.phase}"
            await asyncio.sleep(_POLL_S)
