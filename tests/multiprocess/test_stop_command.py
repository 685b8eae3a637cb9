"""`sluice scale`, `sluice runs` and `sluice stop` on a run of `sluice up`, each in a process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.client.run_address import locate_run
from sluice.client.run_monitor import RunMonitor
from sluice.errors import SluiceError
from sluice.launch.servicer import LAUNCHER_NAME, launcher_of
from tests.support.small_run import ENDLESS, SLOWLY, WAIT_S, Assets, processes_naming

SLUICE = (sys.executable, "-m", "sluice")
OUTPUT = "up.log"
ENVIRONMENT = {**os.environ, "COLUMNS": "400"}


@contextmanager
def running(assets: Assets, run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    arguments = [
        f"sluice.run_dir={run_dir}",
        *ENDLESS,
        SLOWLY,
        # So slow that it never learns the scorer: a policy that is always right ends the run.
        "actor_rollout_ref.actor.optim.lr=0.00001",
    ]
    # A file, since a pipe that is not read is full after 300 steps, and then the launcher waits.
    with (run_dir.parent / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            [*SLUICE, "up", str(assets.config), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
        )
    with process:
        try:
            yield process
        finally:
            process.terminate()


def sluice(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SLUICE, *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env=ENVIRONMENT,
    )


async def serving_after_step(
    process: subprocess.Popen[bytes], run_dir: Path, step: int
) -> list[str]:
    """Names of replicas that serve, once the run has made `step` steps."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if process.poll() is not None:
                raise AssertionError((run_dir.parent / OUTPUT).read_text(encoding="utf-8"))
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
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def listed(folder: Path) -> list[tuple[str, str]]:
    runs = json.loads(sluice("runs", str(folder), "--json").stdout)["runs"]
    return [(one["run"], one["state"]) for one in runs]


def stopped(run_dir: Path, *options: str) -> dict[str, object]:
    ended = sluice("stop", str(run_dir), "--json", *options)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, object] = json.loads(ended.stdout)
    assert found["resume"] == f"sluice up {run_dir / 'config.yaml'}"
    return found


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("global_step_*"))


def test_replicas_start_and_drain_while_a_run_continues_and_it_stops_with_a_checkpoint(
    small_assets: Assets, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with running(small_assets, run_dir) as process:
        assert asyncio.run(serving_after_step(process, run_dir, 1)) == ["rollout-0"]
        assert is_healthy(launcher_of(run_dir).address)
        up = sluice("scale", "rollout", "3", "--run", str(run_dir))
        assert (up.returncode, up.stderr) == (0, "")
        assert "starting rollout-1, rollout-2" in up.stdout
        assert up.stdout.endswith("done: 3 replicas\n")
        three = asyncio.run(serving_after_step(process, run_dir, 2))
        assert three == ["rollout-0", "rollout-1", "rollout-2"]
        down = sluice("scale", "rollout", "1", "--run", str(run_dir))
        assert (down.returncode, down.stderr) == (0, "")
        assert "draining rollout-2, rollout-1" in down.stdout
        assert len([line for line in processes_naming(run_dir) if "rollout-" in line]) == 1
        assert asyncio.run(serving_after_step(process, run_dir, 3)) == ["rollout-0"]
        assert listed(tmp_path) == [(str(run_dir), "running")]
        found = stopped(run_dir)
        assert process.wait(WAIT_S) == 0, (tmp_path / OUTPUT).read_text(encoding="utf-8")
    assert checkpoints(run_dir) == [f"global_step_{found['step']}"]
    assert not (run_dir / LAUNCHER_NAME).exists()
    assert not processes_naming(run_dir)
    assert listed(tmp_path) == [(str(run_dir), "stopped")]
    again = sluice("stop", str(run_dir))
    assert again.stderr.endswith("is not active; there is nothing to stop\n")


def test_a_run_that_is_stopped_now_ends_without_a_checkpoint_and_leaves_no_process(
    small_assets: Assets, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with running(small_assets, run_dir) as process:
        asyncio.run(serving_after_step(process, run_dir, 1))
        assert stopped(run_dir, "--now")["step"] is None
        assert process.wait(WAIT_S) == 130
    assert checkpoints(run_dir) == []
    assert not processes_naming(run_dir)
    assert listed(tmp_path) == [(str(run_dir), "stopped")]
