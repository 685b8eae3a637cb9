"""A run on a simulated cluster: scaling, kills, a lost node, and its result."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from tools.chaos.preparation import SIZES, prepare_run
from tools.phases import PhaseError, Phases
from tools.ray_test.marked_processes import MarkedProcesses, send
from tools.ray_test.simulated_cluster import HEAD, SimulatedCluster
from tools.ray_test.training import Serving, Training, training

WORKERS, SPARE = ("127.0.0.2", "127.0.0.3"), "127.0.0.4"
COUNTS = (2, 3, 1)
KILLED = ("replica", "actor", "trainer", "node")
NODE = {"CPU": 4.0, "NPU": 1.0}
_POLL_S, _GONE_S, _END_S = 0.5, 60.0, 600.0
_SEED = 0
# Trainer and reward service stay on the head, so that each other node may be lost.
PLACES = ("trainer=head:1", "reward=head:1", "rollout=NPU:1")
_FOREVER = "trainer.total_training_steps=1000000"
_TWO_NODES = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1", "sluice.rollout.replicas=1")
# The run has to outlast what is done to it, on any machine; then it may end quickly.
_SCORER = """
import time
import zlib
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if Path({slow!r}).exists():
        time.sleep(0.08)
    right = float(zlib.crc32(solution_str.encode()) & 1)
    return {{"score": right, "acc": right}}
"""


@dataclass(slots=True)
class Outcome:
    """What was seen."""

    scaled: list[int] = field(default_factory=list)
    recovered: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    steps: int = 0
    exit_code: int | None = None
    left: dict[int, str] = field(default_factory=dict)
    left_by_killed_driver: dict[int, str] = field(default_factory=dict)

    def problems(self, steps: int) -> list[str]:
        """Return what is not as it has to be."""
        found = []
        if tuple(self.scaled) != COUNTS:
            found.append(f"replica counts seen: {self.scaled}, wanted: {list(COUNTS)}")
        if missing := [name for name in KILLED if name not in self.recovered]:
            found.append(f"killed and not back: {', '.join(missing)}")
        if self.steps != steps or self.exit_code != 0:
            found.append(f"step {self.steps} of {steps}, exit code {self.exit_code}")
        if len(set(self.nodes)) < 2:
            found.append(f"replicas were not spread: {self.nodes}")
        for whose, left in (("", self.left), ("a killed driver's ", self.left_by_killed_driver)):
            if left:
                found.append(f"{whose}processes that are left: {left}")
        return found


class Scenario:
    """Drives one run on one cluster.

    Args:
        cluster: nothing of it runs yet.
        processes: with the test's mark.
        phases: take the seconds.
        folder: for the run's files.
        patience_s: most seconds for each wait.
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        processes: MarkedProcesses,
        phases: Phases,
        folder: Path,
        patience_s: float,
    ) -> None:
        self._cluster, self._processes, self._phases = cluster, processes, phases
        self._folder, self._patience_s = folder, patience_s
        self._slow = folder / "slow"
        self.outcome = Outcome()

    async def drive(self, steps: int) -> None:
        """Run all of it."""
        with self._phases.phase("cluster"):
            self._cluster.start_head({**NODE, "CPU": 8.0, "head": 4.0})
            for address in WORKERS:
                self._cluster.start_worker(address, NODE)
        with self._phases.phase("model and data"):
            file = await asyncio.to_thread(self._prepare)
        total = f"trainer.total_training_steps={steps}"
        async with self._training(file, (total,), PLACES) as run:
            await self._first_step(run)
            await self._lose_process(run, "replica", lambda serving: serving.pid)
            await self._lose_process(
                run, "actor", lambda serving: self._cluster.actor_worker_of(serving.pid)
            )
            await self._lose_trainer(run)
            await self._scale(run, 3)
            await self._lose_node(run)
            await self._scale(run, 1)
            await self._finish(run)
        await self._kill_driver(file)

    def stop(self) -> None:
        """End the cluster."""
        with self._phases.phase("stop"):
            self._cluster.stop()
        self.outcome.left = self._processes.running()

    def _training(
        self, file: Path, settings: Sequence[str], places: Sequence[str]
    ) -> AbstractAsyncContextManager[Training]:
        cluster = self._cluster
        return training(file, settings, places, cluster.address, cluster.environment)

    def _prepare(self) -> Path:
        _, file = prepare_run(self._folder, SIZES["tiny"], seed=_SEED, host=HEAD)
        self._slow.touch()
        scorer = _SCORER.format(slow=str(self._slow))
        (self._folder / "scorer.py").write_text(scorer, encoding="utf-8")
        return file

    async def _first_step(self, run: Training) -> None:
        with self._phases.phase("up, first step"):
            await self._served(run, 2)
        self.outcome.scaled.append(2)
        self.outcome.nodes = [one.node for one in (await run.serving()).values()]

    async def _lose_process(
        self, run: Training, what: str, pid_of: Callable[[Serving], int]
    ) -> None:
        with self._phases.phase(f"kill {what}"):
            name, before = next(iter((await run.serving()).items()))
            send(pid_of(before), signal.SIGKILL)

            async def is_back() -> bool:
                now = (await run.serving()).get(name)
                return now is not None and now.pid != before.pid

            await self._until(run, f"{name} serving again", is_back)
            if before.pid in self._processes.running():
                raise PhaseError(f"{name}: process {before.pid} has outlived its {what}")
            await self._served(run, 2)
        self.outcome.recovered.append(what)

    async def _lose_trainer(self, run: Training) -> None:
        with self._phases.phase("kill trainer"):
            before = (await run.pids())["trainer"]
            send(before, signal.SIGKILL)

            async def is_back() -> bool:
                return (await run.pids()).get("trainer", before) != before

            await self._until(run, "the trainer started again", is_back)
            await self._served(run, 2)
        self.outcome.recovered.append("trainer")

    async def _scale(self, run: Training, replicas: int) -> None:
        with self._phases.phase(f"scale to {replicas}"):
            await run.scale(replicas)
            await self._served(run, replicas)
        self.outcome.scaled.append(replicas)

    async def _lose_node(self, run: Training) -> None:
        """Lose a node: its replica waits for capacity, and a node that joins has it."""
        with self._phases.phase("kill node"):
            lost = WORKERS[0]
            self._cluster.kill_node(lost)

            async def is_gone() -> bool:
                return lost not in {one.node for one in (await run.serving()).values()}

            await self._until(run, f"no replica serving on {lost}", is_gone)
            self._cluster.start_worker(SPARE, NODE)

            async def is_back() -> bool:
                return SPARE in {one.node for one in (await run.serving()).values()}

            await self._until(run, f"a replica serving on {SPARE}", is_back)
            await self._served(run, 3)
        self.outcome.recovered.append("node")

    async def _finish(self, run: Training) -> None:
        with self._phases.phase("training to the end"):
            self._slow.unlink()
            try:
                async with asyncio.timeout(_END_S):
                    self.outcome.exit_code = await run.up.wait()
            except TimeoutError as error:
                raise PhaseError(f"the run did not end within {_END_S:g} s") from error
        self.outcome.steps = run.record().step
        left = self._services()
        if left:
            raise PhaseError(f"the run has ended, and there are {left}")

    async def _kill_driver(self, file: Path) -> None:
        """Train on two nodes; actors and services end with the driver, also if it is killed."""
        folder = f"sluice.run_dir={self._folder / 'second'}"
        async with self._training(file, (folder, _FOREVER, *_TWO_NODES), ()) as run:
            with self._phases.phase("trainer on two nodes"):
                await self._served(run, 1)
            with self._phases.phase("kill driver"):
                run.up.kill()
                await run.up.wait()
                self.outcome.left_by_killed_driver = self._processes.left_after(_GONE_S, is_service)

    def _services(self) -> dict[int, str]:
        return {pid: line for pid, line in self._processes.running().items() if is_service(line)}

    async def _served(self, run: Training, replicas: int) -> None:
        """Return after a step that so many replicas served."""
        before = len(run.record().replicas)

        async def is_served() -> bool:
            return replicas in run.record().replicas[before:]

        await self._until(run, f"a step served by {replicas} replicas", is_served)

    async def _until(
        self, run: Training, what: str, holds: Callable[[], Awaitable[object]]
    ) -> None:
        until_s = time.monotonic() + self._patience_s
        while not await holds():
            if run.up.returncode is not None:
                raise PhaseError(
                    f"{what}: the run ended first with code {run.up.returncode}; if that is 0, "
                    "give it more --steps"
                )
            if time.monotonic() > until_s:
                raise PhaseError(f"{what}: not within {self._patience_s:g} s")
            await asyncio.sleep(_POLL_S)


def is_service(command: str) -> bool:
    """Return whether it is a service of ours, or the actor that hosts one."""
    return " -m services." in command or "ray::RayServiceHost" in command
