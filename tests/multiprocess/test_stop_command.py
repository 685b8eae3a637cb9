"""`sluice scale`, `sluice runs` and `sluice stop` on a run of `sluice up`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
from click.testing import Result
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.client.run_address import locate_run
from sluice.client.run_monitor import RunMonitor
from sluice.concurrency.process import process_marks
from sluice.config.loading.loader import load_config
from sluice.errors import SluiceError
from sluice.launch.servicer import LAUNCHER_NAME, launcher_of
from tests.support.small_run import ENDLESS, SLOWLY, WAIT_S, Assets, is_running, processes_naming
from tests.support.threaded_launch import threaded_up

OUTPUT = "up.log"
SETTINGS = (
    *ENDLESS,
    SLOWLY,
    # So slow that it never learns the scorer: a policy that is always right ends the run.
    "actor_rollout_ref.actor.optim.lr=0.00001",
)


def sluice(*arguments: str) -> Result:
    return CliRunner().invoke(commands, arguments)


async def serving_after_step(
    run_dir: Path, step: int, exit_code: Callable[[], int | None]
) -> list[str]:
    """Names of replicas that serve, once the run has made `step` steps."""
    async with asyncio.timeout(WAIT_S):
        while True:
            assert exit_code() is None, (run_dir.parent / OUTPUT).read_text(encoding="utf-8")
            try:
                location = locate_run(run_dir)
                async with RunMonitor(location.trainer, location.reward) as monitor:
                    snapshot = await monitor.snapshot()
                if snapshot.step >= step:
                    return [each.name for each in snapshot.replicas if each.state == "serving"]
            except SluiceError:
                pass
            await asyncio.sleep(0.1)


def is_healthy(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="sluice.api.launch.v1.LaunchService")
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=240)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def listed(folder: Path) -> list[tuple[str, str]]:
    runs = json.loads(sluice("runs", str(folder), "--json").stdout)["runs"]
    return [(one["run"], one["state"]) for one in runs]


def stopped(run_dir: Path, *options: str) -> dict[str, object]:
    ended = sluice("stop", str(run_dir), "--json", *options)
    assert ended.exit_code == 0, ended.exception
    found: dict[str, object] = json.loads(ended.stdout)
    assert found["resume"] == f"sluice up {run_dir / 'config.yaml'}"
    return found


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("global_step_*"))


def test_replicas_start_and_drain_while_a_run_continues_and_it_stops_with_a_checkpoint(
    small_assets: Assets, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = load_config(small_assets.config, [f"sluice.run_dir={run_dir}", *SETTINGS])
    with threaded_up(config, tmp_path / OUTPUT) as run:

        def serving_after(step: int) -> list[str]:
            return asyncio.run(serving_after_step(run_dir, step, run.poll))

        assert serving_after(1) == ["rollout-0"]
        assert is_healthy(launcher_of(run_dir).address)
        up = sluice("scale", "rollout", "3", "--run", str(run_dir))
        assert (up.exit_code, up.stderr) == (0, "")
        assert "starting rollout-1, rollout-2" in up.stdout
        assert up.stdout.endswith("done: 3 replicas\n")
        assert serving_after(2) == ["rollout-0", "rollout-1", "rollout-2"]
        started = {mark.name: mark.pid for mark in process_marks(run_dir)}
        down = sluice("scale", "rollout", "1", "--run", str(run_dir))
        assert (down.exit_code, down.stderr) == (0, "")
        assert "draining rollout-2, rollout-1" in down.stdout
        assert {name for name, pid in started.items() if not is_running(pid)} == {
            "rollout-1",
            "rollout-2",
        }
        assert serving_after(3) == ["rollout-0"]
        assert listed(tmp_path) == [(str(run_dir), "running")]
        found = stopped(run_dir)
        assert run.wait() == 0, run.printed()
    assert checkpoints(run_dir) == [f"global_step_{found['step']}"]
    assert not (run_dir / LAUNCHER_NAME).exists()
    assert not any(map(is_running, started.values()))
    assert listed(tmp_path) == [(str(run_dir), "stopped")]
    again = sluice("stop", str(run_dir))
    assert str(again.exception).endswith("is not active; there is nothing to stop")


def test_a_run_that_is_stopped_now_ends_without_a_checkpoint_and_leaves_no_process(
    small_assets: Assets, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    command = (sys.executable, "-m", "sluice", "up", str(small_assets.config))
    with (
        # A file: a pipe that is not read is full after 300 steps, and then the launcher waits.
        (tmp_path / OUTPUT).open("wb") as output,
        subprocess.Popen(
            [*command, f"sluice.run_dir={run_dir}", *SETTINGS],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "COLUMNS": "400"},
        ) as process,
    ):
        try:
            asyncio.run(serving_after_step(run_dir, 1, process.poll))
            assert stopped(run_dir, "--now")["step"] is None
            assert process.wait(WAIT_S) == 130
        finally:
            process.terminate()
    assert checkpoints(run_dir) == []
    assert not processes_naming(run_dir)
    assert listed(tmp_path) == [(str(run_dir), "stopped")]
