"""A small run of `sluice up --on ray` in a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sluice.client.run_address import locate_run
from sluice.client.run_monitor import ReplicaSnapshot, RunMonitor
from sluice.config.addresses import split_host_port
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.errors import SluiceError
from tools.chaos.launched_run import LaunchedRun
from tools.commands import output_of
from tools.compose_test.run_record import RunRecord, read_metrics

FROM_NODES = (
    "sluice.trainer.endpoint.port=0",
    "sluice.reward.endpoint.port=0",
    "trainer.device=cpu",
    "sluice.rollout.device=cpu",
    "trainer.save_freq=20",
)
_ASK_S, _SCALE_S = 10.0, 300.0


@dataclass(frozen=True, slots=True)
class Serving:
    """A replica that serves: its process and its node."""

    pid: int
    node: str


class Training:
    """One run.

    Args:
        config: as it was prepared.
        up: the process of `sluice up`.
        environment: of the commands that are run beside it.
    """

    def __init__(
        self,
        config: RunConfig,
        up: asyncio.subprocess.Process,
        environment: Mapping[str, str],
    ) -> None:
        self._launched, self._environment = LaunchedRun(config, up), environment
        self.up, self.run_dir = up, Path(config.sluice.run_dir)

    def record(self) -> RunRecord:
        """Return what has been trained."""
        return read_metrics(self.run_dir / "metrics.jsonl")

    async def pids(self) -> dict[str, int]:
        """Return process ids of its services, by name."""
        return {name: one.pid for name, one in (await self._launched.processes()).items()}

    async def serving(self) -> dict[str, Serving]:
        """Return replicas that serve, by name; none while the trainer is away."""
        pids = await self.pids()
        return {
            one.name: Serving(pids[one.name], split_host_port(one.address)[0])
            for one in await self._fleet()
            if one.state == "serving" and one.name in pids
        }

    async def scale(self, replicas: int) -> None:
        """Run `sluice scale rollout`, which waits until the change is done."""
        await asyncio.to_thread(
            output_of,
            *(sys.executable, "-m", "sluice.cli.main", "scale", "rollout", str(replicas)),
            *("--run-dir", str(self.run_dir)),
            timeout_s=_SCALE_S,
            environment=self._environment,
        )

    async def _fleet(self) -> tuple[ReplicaSnapshot, ...]:
        with suppress(SluiceError, TimeoutError):
            location = locate_run(self.run_dir)
            monitor = RunMonitor(location.trainer, location.reward)
            async with asyncio.timeout(_ASK_S), monitor:
                return (await monitor.snapshot()).replicas
        return ()


@asynccontextmanager
async def training(
    config_file: Path,
    settings: Sequence[str],
    places: Sequence[str],
    address: str,
    environment: Mapping[str, str],
) -> AsyncIterator[Training]:
    """Start a run; what is left of its launcher is killed with the block.

    Args:
        config_file: as it was prepared.
        settings: ``key=value``, on top of it.
        places: resources of each service.
        address: of the cluster's head.
        environment: on top of this process's.
    """
    overrides = (*FROM_NODES, *settings)
    config = load_config(config_file, overrides)
    command = [
        *(sys.executable, "-m", "sluice.cli.main", "up", str(config_file), *overrides),
        *("--on", "ray", "--ray-address", address, "--capacity-timeout", "60"),
        *(word for place in places for word in ("--resources", place)),
    ]
    with (config_file.parent / "up.log").open("ab") as log:
        up = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment, "COLUMNS": "400"},
            start_new_session=True,
        )
    try:
        yield Training(config, up, environment)
    finally:
        if up.returncode is None:
            up.kill()
            await up.wait()
