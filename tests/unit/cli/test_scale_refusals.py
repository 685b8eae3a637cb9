"""What `sluice scale` says when it cannot scale."""

from __future__ import annotations

import io
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sluice.api.launch.v1 import launch_pb2_grpc
from sluice.cli.main import commands
from sluice.cli.run.scale import scale_rollout
from sluice.client.run_address import locate_run
from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.errors import ConfigError, InvalidRequestError, NotReadyError
from sluice.launch.service_spec import with_ports
from sluice.launch.servicer import LAUNCHER_NAME, LauncherAddress, write_launcher


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = with_ports(load_config(None, [f"sluice.run_dir={tmp_path}"]))
    write_config(config, tmp_path / "config.yaml")
    return tmp_path


def scale(*arguments: str) -> None:
    CliRunner().invoke(commands, ["scale", "rollout", *arguments], catch_exceptions=False)


def test_a_folder_in_which_nothing_was_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.yaml; give the folder of a started"):
        scale("2", "--run-dir", str(tmp_path))


def test_a_run_that_no_launcher_of_ours_keeps(run_dir: Path) -> None:
    with pytest.raises(NotReadyError, match="no launcher runs there"):
        scale("2", "--run-dir", str(run_dir))


def test_a_launcher_that_was_killed(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (run_dir / LAUNCHER_NAME).write_text(
        f'{{"address": "127.0.0.1:{port}", "secret": "a-secret-of-a-launcher"}}', encoding="utf-8"
    )
    with pytest.raises(NotReadyError, match="does not answer; it has ended"):
        scale("2", "--run-dir", str(run_dir))


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
        scale(count, "--run-dir", str(run_dir))
