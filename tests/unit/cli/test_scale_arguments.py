"""`sluice scale`: what it refuses, and what it waits for."""

from __future__ import annotations

import io
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.launch.v1 import launch_pb2_grpc
from sluice.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from sluice.cli.main import commands
from sluice.cli.run.control import scale_rollout
from sluice.client.launcher import LaunchedProcess, Launcher, Scaling
from sluice.client.run_address import locate_run
from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.errors import (
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    NotReadyError,
    PeerError,
)
from sluice.launch.processes.supervisor import ServiceState
from sluice.launch.service_spec import ServiceSpec, replica_name, with_ports
from sluice.launch.servicer import (
    LAUNCHER_NAME,
    LauncherAddress,
    ReplicaScale,
    launch_service,
    write_launcher,
)

pytestmark = pytest.mark.usefixtures("tries_follow_at_once")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = with_ports(load_config(None, [f"sluice.run_dir={tmp_path}"]))
    write_config(config, tmp_path / "config.yaml")
    return tmp_path


def scale(*arguments: str) -> None:
    CliRunner().invoke(commands, ["scale", "rollout", *arguments], catch_exceptions=False)


def test_a_folder_in_which_nothing_was_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.yaml; give the folder of a started"):
        scale("2", "--run", str(tmp_path))


def test_a_run_that_no_launcher_of_ours_keeps(run_dir: Path) -> None:
    with pytest.raises(NotReadyError, match="no launcher runs there"):
        scale("2", "--run", str(run_dir))


def test_a_launcher_that_was_killed(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (run_dir / LAUNCHER_NAME).write_text(
        f'{{"address": "127.0.0.1:{port}", "secret": "a-secret-of-a-launcher"}}', encoding="utf-8"
    )
    with pytest.raises(NotReadyError, match="does not answer; it has ended"):
        scale("2", "--run", str(run_dir))


async def test_what_took_the_port_of_a_killed_launcher_gets_no_token_of_the_run(
    tmp_path: Path,
) -> None:
    heard: list[str] = []

    class Impostor(launch_pb2_grpc.LaunchServiceServicer):
        async def SetReplicas(self, request: Any, context: Any) -> Any:
            heard.extend(str(value) for _, value in context.invocation_metadata())
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no")

    server = grpc.aio.server()
    launch_pb2_grpc.add_LaunchServiceServicer_to_server(Impostor(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    (tmp_path / "run.tokens").write_text("a-token-of-the-run-0123")
    (tmp_path / "run.tokens").chmod(0o600)
    settings = [f"sluice.run_dir={tmp_path}", f"sluice.security.token_file={tmp_path}/run.tokens"]
    write_config(with_ports(load_config(None, settings)), tmp_path / "config.yaml")
    write_launcher(tmp_path, LauncherAddress(f"127.0.0.1:{port}", "a-secret-of-a-launcher"))
    with pytest.raises(NotReadyError, match="does not answer"):
        await scale_rollout(2, locate_run(tmp_path), 5.0, Console(file=io.StringIO()))
    await server.stop(0)
    assert "Bearer a-secret-of-a-launcher" in heard
    assert not [text for text in heard if "a-token-of-the-run" in text]


@pytest.mark.parametrize(("count", "message"), [("0", "0 is below 1; a run"), ("1025", "above")])
def test_a_number_that_no_run_can_have(run_dir: Path, count: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        scale(count, "--run", str(run_dir))


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Each time it is asked, one more replica serves, up to `most`."""

    def __init__(self, most: int) -> None:
        self.most, self.num_asked = most, 0

    async def GetStatus(self, request: Any, context: Any) -> Any:
        self.num_asked += 1
        serving = min(self.num_asked, self.most)
        return trainer_pb2.GetStatusResponse(
            replicas=[
                trainer_pb2.ReplicaStatus(
                    replica=common.Replica(name=replica_name(number)), state="serving"
                )
                for number in range(serving)
            ]
        )


class Processes:
    """Two replicas that an earlier command has started, and one it has asked to leave."""

    def __init__(self, num_looks: int) -> None:
        self.num_looks = num_looks

    def services(self) -> tuple[ServiceState, ...]:
        self.num_looks -= 1
        staying = [ServiceState(replica_name(n), 1, 0, is_draining=False) for n in range(2)]
        leaving = [ServiceState(replica_name(2), 1, 0, is_draining=True)]
        return (*staying, *(leaving if self.num_looks > 0 else []))

    def add(self, spec: ServiceSpec) -> None:
        raise AssertionError

    def dismiss(self, name: str) -> None:
        raise AssertionError


async def said(folder: Path, trainer: Trainer, processes: Processes, timeout_s: float) -> str:
    console = Console(file=io.StringIO(), record=True)
    await scaled(folder, trainer, processes, timeout_s, console)
    return console.export_text()


async def scaled(
    folder: Path,
    trainer: Trainer,
    processes: Processes,
    timeout_s: float,
    console: Console | None = None,
) -> Scaling:
    server = grpc.aio.server()
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ports = [f"sluice.trainer.endpoint.port={port}", "sluice.reward.endpoint.port=1"]
    write_config(load_config(None, ports), folder / "config.yaml")
    scale = ReplicaScale(processes, lambda number: ServiceSpec(replica_name(number), ("true",)))
    shown = console or Console(file=io.StringIO())
    try:
        async with launch_service(folder, scale):
            return await scale_rollout(2, locate_run(folder), timeout_s, shown)
    finally:
        await server.stop(0)


async def test_a_change_that_was_begun_earlier_is_waited_for(tmp_path: Path) -> None:
    trainer, processes = Trainer(most=2), Processes(num_looks=3)
    assert (await said(tmp_path, trainer, processes, 60.0)).endswith("done: 2 replicas\n")
    assert trainer.num_asked >= 2
    assert processes.num_looks <= 0


async def test_a_launcher_that_answers_late_once_does_not_end_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, services = list[None](), Launcher.services

    async def late_once(launcher: Launcher) -> tuple[LaunchedProcess, ...]:
        asked.append(None)
        if len(asked) == 2:  # the first look is not a wait
            raise DeadlineError("launcher", "asking for its processes", 5.0)
        return await services(launcher)

    monkeypatch.setattr(Launcher, "services", late_once)
    text = await said(tmp_path, Trainer(most=2), Processes(num_looks=3), 60.0)
    assert text.endswith("done: 2 replicas\n")
    assert len(asked) > 2


async def test_a_launcher_that_ends_during_the_wait_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, services = list[None](), Launcher.services

    async def gone(launcher: Launcher) -> tuple[LaunchedProcess, ...]:
        asked.append(None)
        if len(asked) > 1:  # the first look is not a wait
            raise PeerError("launcher", "asking for its processes", "connection refused")
        return await services(launcher)

    monkeypatch.setattr(Launcher, "services", gone)
    with pytest.raises(NotReadyError, match="does not answer; it has ended"):
        await said(tmp_path, Trainer(most=1), Processes(num_looks=0), 5.0)


async def test_the_change_is_returned_for_programs(tmp_path: Path) -> None:
    change = await scaled(tmp_path, Trainer(most=2), Processes(num_looks=3), 60.0)
    assert change == Scaling((), ())


async def test_only_when_all_serve_there_is_nothing_to_do(tmp_path: Path) -> None:
    trainer = Trainer(most=2)
    trainer.num_asked = 1
    text = await said(tmp_path, trainer, Processes(num_looks=0), 60.0)
    assert text == "2 replicas already; nothing to do\n"


async def test_a_replica_that_never_serves_ends_the_wait_by_its_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match="scaling to 2 replicas"):
        await said(tmp_path, Trainer(most=1), Processes(num_looks=0), 1.0)
