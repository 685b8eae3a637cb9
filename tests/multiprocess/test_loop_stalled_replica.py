"""A replica is judged by its progress: one that hangs or stands still is out, and comes back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from sluice.api.trainer.v1 import trainer_pb2
from sluice.launch.processes.supervisor import Supervisor
from sluice.launch.service_spec import NO_RESTARTS, rollout_service
from tests.support.gated_replica import GATE_VARIABLE
from tests.support.preloaded import PreloadedHost
from tests.support.small_run import (
    ENDLESS,
    GRACE_S,
    SLOWLY,
    Assets,
    LiveRun,
    Record,
    run_to_end,
)

STEPS_WITHOUT = 3
NAME = "rollout-7"
HUNG = f"replica {NAME} out of use: work, but no token for"
SILENT = f"replica {NAME} dropped: no heartbeat for"


@dataclass
class Seen:
    """States and versions of the replica that hangs, then stands still."""

    states_while_hung: set[str] = field(default_factory=set)
    steps_while_hung: int = 0
    steps_while_stopped: int = 0
    instance_ids: set[str] = field(default_factory=set)
    versions: list[tuple[int, int]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


async def look(run: LiveRun) -> tuple[trainer_pb2.ReplicaStatus | None, int]:
    """The replica as the trainer sees it, and the step."""
    status = await run.status()
    found = [r for r in status.replicas if r.replica.name == NAME]
    return (found[0] if found else None), status.step


async def until_state(run: LiveRun, state: str | None) -> None:
    async def is_there() -> bool:
        replica, _ = await look(run)
        return (replica.state if replica else None) == state

    await run.until(is_there, f"{NAME} {state or 'gone'}")


async def until_it_samples(run: LiveRun, seen: Seen) -> None:
    """Waits until the replica serves and has work; notes who it is, and its version."""

    async def draws() -> bool:
        status = await run.status()
        found = [r for r in status.replicas if r.replica.name == NAME]
        draws = bool(found) and found[0].state == "serving" and found[0].slots_busy > 0
        if draws:
            seen.instance_ids.add(found[0].replica.instance_id)
            seen.versions.append((found[0].replica.policy_version, status.policy_version))
        return draws

    await run.until(draws, f"{NAME} at work")


async def steps_without(run: LiveRun, states: set[str]) -> int:
    """Steps that the run makes while the replica is out of use."""
    _, began = await look(run)

    async def has_advanced() -> bool:
        replica, step = await look(run)
        states.add(replica.state if replica else "gone")
        return step >= began + STEPS_WITHOUT

    await run.until(has_advanced, f"steps without {NAME}")
    return STEPS_WITHOUT


@asynccontextmanager
async def gated_replica(run: LiveRun, gate: Path, lines: list[str]) -> AsyncIterator[Supervisor]:
    folder = Path(run.config.sluice.run_dir)
    plain = rollout_service(run.config, folder / "config.yaml", 7)
    command = (sys.executable, "-m", "tests.support.gated_replica", *plain.command[3:])
    environment = {**plain.environment, GATE_VARIABLE: str(gate)}
    spec = replace(plain, command=command, environment=environment, restarts=NO_RESTARTS)
    supervisor = Supervisor(
        [spec], folder / "logs", lambda _, line: lines.append(line), GRACE_S, PreloadedHost()
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run(), name="replica")
        try:
            yield supervisor
        finally:
            running.cancel()


def has_logged(run: LiveRun, text: str) -> bool:
    log = Path(run.config.sluice.run_dir) / "logs" / "trainer.log"
    return text in log.read_text(encoding="utf-8")


async def hang_then_stop(run: LiveRun, gate: Path, seen: Seen) -> None:
    await run.until_step(1)
    async with gated_replica(run, gate, seen.lines) as supervisor:
        await until_it_samples(run, seen)
        # Weights that are on their way to it may be given up first; then it is tried again.
        while not has_logged(run, HUNG):
            gate.touch()
            await until_state(run, "stalled")
            seen.states_while_hung.add("stalled")
            seen.steps_while_hung = await steps_without(run, seen.states_while_hung)
            gate.unlink()
            await until_it_samples(run, seen)
        pid = supervisor.pid_of(NAME)
        assert pid is not None
        while not has_logged(run, SILENT):
            os.kill(pid, signal.SIGSTOP)
            try:
                await until_state(run, None)
                seen.steps_while_stopped = await steps_without(run, set())
            finally:
                os.kill(pid, signal.SIGCONT)
            await until_it_samples(run, seen)
    await run.trainer.Stop(trainer_pb2.StopRequest(reason="seen enough"), timeout=60)


@pytest.fixture(scope="module")
def stalled(small_assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Seen]:
    seen, folder = Seen(), tmp_path_factory.mktemp("stalled")
    record = run_to_end(
        small_assets,
        folder / "run",
        [
            *ENDLESS,
            SLOWLY,
            # Longer than a busy machine lets a process stand still.
            "sluice.trainer.replica_stall_s=12",
            "sluice.trainer.heartbeat_interval_s=0.2",
            "sluice.trainer.replica_ttl_s=12",
            "sluice.reward.stall_timeout_s=600",
            "sluice.weights.timeout_s=15",
            "sluice.weights.probe_timeout_s=12",
        ],
        lambda run: hang_then_stop(run, folder / "gate", seen),
    )
    return record, seen


def test_a_replica_that_lives_but_whose_engine_hangs_is_out_of_use_and_the_run_continues(
    stalled: tuple[Record, Seen],
) -> None:
    record, seen = stalled
    # Weights that were on their way to it when it hung drop it for a moment; then it registers.
    assert "stalled" in seen.states_while_hung <= {"stalled", "gone"}
    assert seen.steps_while_hung == STEPS_WITHOUT
    assert HUNG in record.log("trainer")


def test_a_replica_that_stands_still_is_dropped_and_the_run_continues(
    stalled: tuple[Record, Seen],
) -> None:
    record, seen = stalled
    assert seen.steps_while_stopped == STEPS_WITHOUT
    assert SILENT in record.log("trainer")


def test_what_gets_on_again_comes_back_as_the_same_process_with_present_weights(
    stalled: tuple[Record, Seen],
) -> None:
    record, seen = stalled
    assert (record.end.exit_code, record.end.failures) == (0, ())
    assert len(seen.instance_ids) == 1
    assert len(seen.versions) >= 3
    assert all(newest - served <= 1 for served, newest in seen.versions)
    assert f"replica {NAME} progresses again" in record.log("trainer")


def test_samples_of_a_hung_replica_are_moved_and_none_is_lost(
    stalled: tuple[Record, Seen],
) -> None:
    accounts = stalled[0].accounts
    assert accounts["dropped_failed"] == accounts["prompts_lost"] == 0
    assert re.search(f"replica {NAME}: streams of [0-9]+ groups moved", stalled[0].log("reward"))
