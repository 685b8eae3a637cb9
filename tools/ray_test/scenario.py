"""A run on a simulated cluster: scaling, kills, a lost node, and its result."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sluice.config.addresses import split_host_port
from sluice.config.loading.loader import load_config
from sluice.report.run_record import read_progress
from tools.commands import output_of
from tools.launched_run import SHORT_DEADLINES, SLUICE, LaunchedRun, launched_run, prepare_run
from tools.phases import PhaseError, Phases
from tools.ray_test.cluster import HEAD, MarkedProcesses, SimulatedCluster, is_service, send

WORKERS, _SPARE = ("127.0.0.2", "127.0.0.3"), "127.0.0.4"
FROM_NODES = (
    "sluice.trainer.endpoint.port=0",
    "sluice.reward.endpoint.port=0",
    "trainer.device=cpu",
    "sluice.rollout.device=cpu",
    "trainer.save_freq=20",
)
# Trainer and reward service stay on the head, so that each other node may be lost.
PLACES = ("trainer=head:1", "reward=head:1", "rollout=NPU:1")
_GONE_S, _END_S, _SCALE_S = 60.0, 600.0, 300.0
_TWO_NODES = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1", "sluice.rollout.replicas=1")
# Of a replica that serves: its process and its node.
Serving = tuple[int, str]


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

    def report(self) -> dict[str, object]:
        """Return the outcome by the keys of the last line."""
        return {
            "scaled": self.scaled,
            "killed_and_recovered": self.recovered,
            "steps": self.steps,
            "exit_code": self.exit_code,
            "nodes": self.nodes,
        }

    def problems(self, steps: int) -> list[str]:
        """Return what is wrong at the end; a scaling or a kill that fails raises before."""
        found = []
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
            self._cluster.start_head(serves_jobs=False)
            for address in WORKERS:
                self._cluster.start_worker(address)
        with self._phases.phase("model and data"):
            _, file = prepare_run(self._folder, "tiny", [SHORT_DEADLINES], host=HEAD)
            # The run has to outlast what is done to it, on any machine; then it may end quickly.
            self._slow.touch()
        with self._training(file, (f"trainer.total_training_steps={steps}",), PLACES) as run:
            with self._phases.phase("up, first step"):
                await self._served(run, 2)
            self.outcome.scaled.append(2)
            self.outcome.nodes = [node for _, node in (await _serving(run)).values()]
            await self._lose_actor(run)
            await self._lose_trainer(run)
            await self._scale(run, 3)
            await self._lose_node(run)
            await self._scale(run, 1)
            await self._finish(run)
        await self._kill_driver(file)

    @contextmanager
    def _training(
        self, file: Path, settings: Sequence[str], places: Sequence[str]
    ) -> Iterator[LaunchedRun]:
        overrides = (*FROM_NODES, *settings)
        options = (
            *(*overrides, "--on", "ray", "--ray-address", self._cluster.address),
            *("--capacity-timeout", "60"),
            *(word for place in places for word in ("--resources", place)),
        )
        config = load_config(file, overrides)
        with launched_run(config, file, options, self._cluster.environment) as run:
            yield run

    async def _lose_actor(self, run: LaunchedRun) -> None:
        """Kill the actor of a replica: its service ends with it, and both start again."""
        with self._phases.phase("kill actor"):
            name, (before, _) = next(iter((await _serving(run)).items()))
            send(self._cluster.actor_worker_of(before), signal.SIGKILL)
            await self._until_serving(
                run, f"{name} serving again", lambda now: now.get(name, (before, ""))[0] != before
            )
            if before in self._processes.running():
                raise PhaseError(f"{name}: process {before} has outlived its actor")
            await self._served(run, 2)
        self.outcome.recovered.append("actor")

    async def _lose_trainer(self, run: LaunchedRun) -> None:
        with self._phases.phase("kill trainer"):
            before = (await run.processes())["trainer"]
            send(before.pid, signal.SIGKILL)

            async def is_back() -> bool:
                return (await run.processes()).get("trainer", before).pid != before.pid

            await run.until("the trainer started again", is_back, self._patience_s)
            await self._served(run, 2)
        self.outcome.recovered.append("trainer")

    async def _scale(self, run: LaunchedRun, replicas: int) -> None:
        """Run `sluice scale rollout`, which waits until the change is done."""
        with self._phases.phase(f"scale to {replicas}"):
            await asyncio.to_thread(
                output_of,
                *(*SLUICE, "scale", "rollout", str(replicas), "--run", str(run.run_dir)),
                timeout_s=_SCALE_S,
                environment=self._cluster.environment,
            )
            await self._served(run, replicas)
        self.outcome.scaled.append(replicas)

    async def _lose_node(self, run: LaunchedRun) -> None:
        """Lose a node: its replica waits for capacity, and a node that joins has it."""
        with self._phases.phase("kill node"):
            lost = WORKERS[0]
            self._cluster.kill_node(lost)
            await self._until_serving(
                run,
                f"no replica serving on {lost}",
                lambda now: lost not in {node for _, node in now.values()},
            )
            self._cluster.start_worker(_SPARE)
            await self._until_serving(
                run,
                f"a replica serving on {_SPARE}",
                lambda now: _SPARE in {node for _, node in now.values()},
            )
            await self._served(run, 3)
        self.outcome.recovered.append("node")

    async def _finish(self, run: LaunchedRun) -> None:
        with self._phases.phase("training to the end"):
            self._slow.unlink()
            self.outcome.exit_code = await asyncio.to_thread(run.up.wait, _END_S)
        self.outcome.steps = len(read_progress(run.run_dir).steps)
        running = self._processes.running().items()
        if left := {pid: command for pid, command in running if is_service(command)}:
            raise PhaseError(f"the run has ended, and there are {left}")

    async def _kill_driver(self, file: Path) -> None:
        """Train on two nodes; actors and services end with the driver, also if it is killed."""
        folder = f"sluice.run_dir={self._folder / 'second'}"
        with self._training(file, (folder, *_TWO_NODES), ()) as run:
            with self._phases.phase("trainer on two nodes"):
                await self._served(run, 1)
            with self._phases.phase("kill driver"):
                run.up.kill()
                run.up.wait()
                self.outcome.left_by_killed_driver = self._processes.left_after(_GONE_S, is_service)

    async def _served(self, run: LaunchedRun, replicas: int) -> None:
        """Return after a step that so many replicas served."""
        before = len(read_progress(run.run_dir).steps)

        async def is_served() -> bool:
            steps = read_progress(run.run_dir).steps[before:]
            return any(row.get("rollout/replicas") == replicas for row in steps)

        await run.until(f"a step served by {replicas} replicas", is_served, self._patience_s)

    async def _until_serving(
        self, run: LaunchedRun, what: str, holds: Callable[[Mapping[str, Serving]], bool]
    ) -> None:
        async def now_holds() -> bool:
            return holds(await _serving(run))

        await run.until(what, now_holds, self._patience_s)


async def _serving(run: LaunchedRun) -> dict[str, Serving]:
    """Return replicas that serve, by name; none while the trainer is away."""
    processes, seen = await run.processes(), await run.snapshot()
    return {
        one.name: (processes[one.name].pid, split_host_port(one.address)[0])
        for one in (seen.replicas if seen else ())
        if one.state == "serving" and one.name in processes
    }
