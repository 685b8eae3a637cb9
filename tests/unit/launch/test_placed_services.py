"""A launcher on a cluster, with hosts of this process in the place of Ray's actors."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.config.loading.loader import load_config, read_run
from sluice.config.loading.yaml_text import write_config
from sluice.errors import ConfigError
from sluice.launch.cluster import placed_services
from sluice.launch.cluster.placed_services import PlacedServices, SharedConfig
from sluice.launch.cluster.placement import NodeCapacity, PlacedProcess, PlacementPlan
from sluice.launch.cluster.ray_run import RayOptions, placed_run
from sluice.launch.processes import supervisor as supervisor_module
from sluice.launch.processes.supervisor import RunEnd, Supervisor
from sluice.launch.service_spec import RestartPolicy, ServiceSpec
from tests.support.in_process_cluster import InProcessCluster, InProcessHost
from tests.support.scripted_children import POLITE, WAIT_S, until_gone

NODE, OTHER = "127.0.0.1", "127.0.0.2"
CPU = {"CPU": 4.0}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(placed_services, "_SILENCE_S", 0.05)
    monkeypatch.setattr(placed_services, "_RETRY_S", 0.01)
    monkeypatch.setattr(placed_services, "_LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(placed_services, "_REMIND_S", 0.05)


def node_capacities(count: int) -> list[NodeCapacity]:
    return [NodeCapacity(NODE, CPU, CPU)] * count


def plan_of(name: str) -> PlacementPlan:
    kind = "rollout" if name.startswith("rollout") else name
    demand = {"CPU": 1.0}
    return PlacementPlan(name, kind, (demand,), "PACK", (PlacedProcess(name, 0, demand),))  # type: ignore[arg-type]


class World:
    """A supervisor over hosts, with scripts in the services' place."""

    def __init__(
        self, folder: Path, num_nodes: int, *specs: ServiceSpec, patience_s: float = WAIT_S
    ) -> None:
        self.folder = folder
        self.cluster = InProcessCluster(node_capacities(num_nodes))
        self.services = PlacedServices(self.cluster, plan_of, patience_s)
        self.lines: list[tuple[str, str]] = []
        self.pids: set[int] = set()
        self.specs = specs
        self.supervisor = Supervisor(
            specs, folder / "logs", self._on_line, grace_s=WAIT_S, host=self.services
        )

    def _on_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        pid = self.supervisor.pid_of(name)
        if pid is not None:
            self.pids.add(pid)

    async def prepare(self) -> None:
        config = load_config(
            None, [f"actor_rollout_ref.model.path={self.folder}", f"sluice.run_dir={self.folder}"]
        )
        file, mark = self.folder / "config.yaml", self.folder / "mark"
        write_config(config, file)
        mark.touch()
        await self.services.place([plan_of(spec.name) for spec in self.specs])
        await self.services.prepare(SharedConfig(config, file, mark, {"SLUICE_TOKEN": "t"}))

    def said(self, name: str) -> list[str]:
        return [line for who, line in self.lines if who == name]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[RunEnd]]:
        async with asyncio.timeout(3 * WAIT_S), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.supervisor.run())
            yield task
        self.services.close()
        await until_gone(*self.pids)


def spec(name: str, script: str, **policy: object) -> ServiceSpec:
    # The words that a replica's specification ends with are the script's own.
    made = ServiceSpec(name, (sys.executable, "-c", script), restarts=RestartPolicy(2, True))
    return replace(made, **policy)  # type: ignore[arg-type]


def polite(name: str, **policy: object) -> ServiceSpec:
    return spec(name, POLITE.format(code=0), **policy)


async def test_processes_run_with_the_launchers_variables_and_end_in_order_with_the_run(
    tmp_path: Path,
) -> None:
    script = "import os; print(os.environ['SLUICE_TOKEN'], os.environ['SLUICE_RESTARTS'])"
    world = World(tmp_path, 2, polite("reward"), spec("trainer", script, ends_run=True))
    await world.prepare()
    async with world.running() as run:
        pass
    assert run.result() == RunEnd(0, ())
    assert world.said("trainer") == ["t 0"]
    assert (tmp_path / "logs" / "trainer.log").read_text(encoding="utf-8") == "t 0\n"
    assert sorted(world.cluster.given_back) == ["reward", "trainer"]


async def test_a_process_whose_host_was_lost_is_started_again_where_the_host_comes_back(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, 2, polite("trainer"), polite("rollout-0"))
    await world.prepare()
    async with world.running() as run:
        await world.until(lambda: len(world.lines) == 2)
        first = world.supervisor.pid_of("rollout-0")
        world.cluster.hosts["rollout-0"].lose()
        world.cluster.hosts["rollout-0"].come_back(OTHER)
        await world.until(lambda: len(world.said("rollout-0")) == 2)
        assert world.supervisor.pid_of("rollout-0") not in (None, first)
        world.supervisor.end()
    assert run.result() == RunEnd(130, ())


async def test_a_replica_that_finds_no_capacity_waits_is_reported_and_leaves_the_run_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, 1, polite("trainer"))
    await world.prepare()
    async with world.running() as run:
        await world.until(lambda: len(world.lines) == 1)
        with caplog.at_level(logging.WARNING):
            world.supervisor.add(polite("rollout-0"))
            await world.until(lambda: "rollout-0 waits for capacity" in caplog.text)
        assert [state.name for state in world.supervisor.services()] == ["trainer", "rollout-0"]
        world.cluster.hosts["rollout-0"].come_back(NODE)
        await world.until(lambda: world.said("rollout-0") == ["ready"])
        world.supervisor.end()
    assert run.result() == RunEnd(130, ())


async def test_a_replica_that_waits_for_capacity_leaves_at_once_and_gives_its_claim_back(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, 1, polite("trainer"))
    await world.prepare()
    async with world.running() as run:
        await world.until(lambda: len(world.lines) == 1)
        world.supervisor.add(polite("rollout-0"))
        await world.until(lambda: "rollout-0" in world.cluster.hosts)
        world.supervisor.dismiss("rollout-0")
        await world.until(lambda: world.cluster.given_back == ["rollout-0"])
        assert [state.name for state in world.supervisor.services()] == ["trainer"]
        world.supervisor.end()
    assert run.result() == RunEnd(130, ())


async def test_the_end_of_a_run_does_not_wait_for_capacity(tmp_path: Path) -> None:
    world = World(tmp_path, 1, polite("trainer"))
    await world.prepare()
    async with world.running() as run:
        await world.until(lambda: len(world.lines) == 1)
        world.supervisor.add(polite("rollout-0"))
        await world.until(lambda: "rollout-0" in world.cluster.hosts)
        world.supervisor.end()
    assert run.result() == RunEnd(130, ())


async def test_a_crash_loop_ends_the_run_with_the_last_lines(tmp_path: Path) -> None:
    fails = spec("rollout-0", "print('port 7 is in use'); raise SystemExit(3)")
    world = World(tmp_path, 2, polite("trainer"), fails)
    await world.prepare()
    async with world.running() as run:
        pass
    assert run.result().exit_code == 1
    (failure,) = run.result().failures
    assert failure == "rollout-0 ended with code 3 after 2 restarts:\n" + "\n".join(
        ["  port 7 is in use"] * 3
    )


async def test_a_trainer_whose_node_is_lost_ends_the_run_since_nobody_would_find_it(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, 2, polite("trainer"), polite("rollout-0"))
    await world.prepare()
    async with world.running() as run:
        await world.until(lambda: len(world.lines) == 2)
        world.cluster.hosts["trainer"].lose()
        world.cluster.hosts["trainer"].come_back(OTHER)
    (failure,) = run.result().failures
    assert f"its node {NODE} is lost, and on {OTHER}" in failure
    assert "trainer.resume_mode=auto" in failure


@pytest.mark.parametrize("name", ["trainer", "reward"])
async def test_a_host_that_others_know_ends_the_run_with_the_reason_once_it_is_dead_permanently(
    tmp_path: Path, name: str
) -> None:
    world = World(tmp_path, 2, polite(name), polite("rollout-0"))
    await world.prepare()
    async with world.running() as run:
        await world.until(lambda: len(world.lines) == 2)
        world.cluster.hosts[name].is_dead = True
        world.cluster.hosts[name].lose()
    (failure,) = run.result().failures
    assert "it is dead" in failure


async def test_a_replica_whose_host_is_dead_permanently_is_placed_again_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, 3, polite("trainer"), polite("rollout-0"))
    await world.prepare()
    async with world.running() as run:
        await world.until(lambda: len(world.lines) == 2)
        first = world.cluster.hosts["rollout-0"]
        first.is_dead = True
        first.lose()
        await world.until(lambda: world.said("rollout-0") == ["ready", "ready"])
        assert world.cluster.given_back == ["rollout-0"]
        assert world.cluster.hosts["rollout-0"] is not first
        world.supervisor.end()
    assert run.result() == RunEnd(130, ())
    assert "it is dead; rollout-0 is placed again" in caplog.text


async def test_a_replica_that_its_node_cannot_start_is_placed_again_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, 2, polite("trainer"))
    await world.prepare()
    call = InProcessHost.call
    failing = ["Cannot allocate memory"]

    async def fails_once(host: InProcessHost, method: str, /, *arguments: object) -> Any:
        if method == "start" and host.name == "rollout-0" and failing:
            return 0, failing.pop()
        return await call(host, method, *arguments)

    monkeypatch.setattr(InProcessHost, "call", fails_once)
    async with world.running() as run:
        await world.until(lambda: len(world.lines) == 1)
        world.cluster.node_capacities.append(world.cluster.node_capacities[0])
        world.supervisor.add(polite("rollout-0"))
        await world.until(lambda: world.said("rollout-0") == ["ready"])
        assert world.cluster.given_back == ["rollout-0"]
        world.supervisor.end()
    assert run.result() == RunEnd(130, ())
    assert f"{NODE}: failed while starting rollout-0: Cannot allocate memory" in caplog.text


async def test_a_run_without_capacity_does_not_begin_and_reports_what_lacks(tmp_path: Path) -> None:
    world = World(tmp_path, 1, polite("trainer"), polite("rollout-0"), patience_s=0.2)
    with pytest.raises(ConfigError, match=r"no capacity in the Ray cluster within .* s: rollout-0"):
        await world.prepare()


async def test_nodes_without_the_model_are_named_with_the_path_before_anything_starts(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    config = load_config(
        None,
        [f"actor_rollout_ref.model.path={model}", f"sluice.run_dir={tmp_path / 'run'}",
         "sluice.rollout.replicas=2", "trainer.device=cpu", "sluice.rollout.device=cpu"],
    )  # fmt: skip
    cluster = InProcessCluster(node_capacities(4))
    file = tmp_path / "run" / "config.yaml"
    with pytest.raises(ConfigError, match="nodes are not ready") as refused:
        async with placed_run(config, file, RayOptions(), cluster):
            pass
    reported = str(refused.value).splitlines()[1:]
    assert reported == [
        f"  {NODE} ({name}): actor_rollout_ref.model.path = {model} does not exist"
        for name in ("trainer", "rollout-0", "rollout-1")
    ]
    assert sorted(cluster.given_back) == ["reward", "rollout-0", "rollout-1", "trainer"]
    assert not any("start" in host.log for host in cluster.hosts.values())


async def test_a_placed_run_is_found_at_its_nodes_and_leaves_no_mark(tmp_path: Path) -> None:
    config = load_config(
        None,
        [f"actor_rollout_ref.model.path={tmp_path}", f"sluice.run_dir={tmp_path / 'run'}",
         "sluice.rollout.replicas=1", "trainer.n_gpus_per_node=2",
         "sluice.reward.endpoint.port=7002", "trainer.device=cpu", "sluice.rollout.device=cpu"],
    )  # fmt: skip
    cluster = InProcessCluster([NodeCapacity(address, CPU, CPU) for address in (NODE, OTHER, NODE)])
    file = tmp_path / "run" / "config.yaml"
    async with placed_run(config, file, RayOptions(), cluster) as plan:
        assert load_config(file, ()) == plan.config
        reward, trainer = plan.config.sluice.reward.endpoint, plan.config.sluice.trainer.endpoint
        assert (reward.host, reward.port) == (NODE, 7002)
        assert trainer.host == OTHER
        assert trainer.port > 0
        names = [each.name for each in plan.specs]
        assert names == ["reward", "trainer", "trainer-1", "rollout-0"]
        rank = plan.specs[2].environment
        assert rank["MASTER_ADDR"] == OTHER
        assert int(rank["MASTER_PORT"]) != trainer.port
        assert plan.make_replica(5).name == "rollout-5"
        assert list((tmp_path / "run" / "launch").iterdir()) != []
    assert list((tmp_path / "run" / "launch").iterdir()) == []
    assert sorted(cluster.given_back) == ["reward", "rollout-0", "trainer"]


async def test_the_devices_of_a_cluster_are_divided_before_they_are_placed(tmp_path: Path) -> None:
    run = read_run(
        None,
        [f"actor_rollout_ref.model.path={tmp_path}", f"sluice.run_dir={tmp_path / 'run'}",
         "trainer.n_gpus_per_node=2"],
    )  # fmt: skip
    gpu = {"CPU": 4.0, "GPU": 1.0}
    cluster = InProcessCluster([NodeCapacity(address, gpu, gpu) for address in (NODE, OTHER, NODE)])
    file = tmp_path / "run" / "config.yaml"
    async with placed_run(run.config, file, RayOptions(keys=run.keys), cluster) as plan:
        assert [each.name for each in plan.specs] == ["reward", "trainer", "rollout-0"]
        assert cluster.plans["trainer"].bundles == ({"CPU": 1.0, "GPU": 1.0},)
        written = load_config(file, ())
        assert (written.trainer.n_gpus_per_node, written.sluice.rollout.replicas) == (1, 1)


@pytest.mark.parametrize("kind", ["GPU", "NPU"])
async def test_a_cluster_that_stays_too_small_is_an_error_with_the_split_that_fits(
    tmp_path: Path, kind: str
) -> None:
    run = read_run(
        None,
        [f"actor_rollout_ref.model.path={tmp_path}", f"sluice.run_dir={tmp_path / 'run'}",
         "trainer.n_gpus_per_node=8"],
    )  # fmt: skip
    has = {"CPU": 8.0, kind: 3.0}
    cluster = InProcessCluster([NodeCapacity(NODE, has, has)])
    options = RayOptions(keys=run.keys, patience_s=0.2)
    with pytest.raises(ConfigError) as refused:
        async with placed_run(run.config, tmp_path / "run" / "config.yaml", options, cluster):
            pass
    lines = str(refused.value).splitlines()
    assert lines[0].startswith("no capacity in the Ray cluster within 0.2 s: ")
    assert lines[-1].startswith(f"the launch takes 8 {kind}s (4 train, 4 generate in 4 replicas)")
    assert "; 3 would do with trainer.nnodes=1 trainer.n_gpus_per_node=1 " in lines[-1]


async def test_a_killed_process_counts_as_killed_by_that_signal(tmp_path: Path) -> None:
    end = "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    fails = spec("trainer", end, restarts=RestartPolicy(0, False), is_needed=True)
    world = World(tmp_path, 1, fails)
    await world.prepare()
    async with world.running() as run:
        pass
    assert run.result().failures == (f"trainer ended with {signal.SIGSEGV.name}:\n  x",)
