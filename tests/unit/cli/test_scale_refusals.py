"""What `sluice scale` says when it cannot scale."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.config.dump import write_config
from sluice.config.loader import load_config
from sluice.errors import ConfigError, InvalidRequestError, NotReadyError
from sluice.launch.launcher_address import LAUNCHER_NAME
from sluice.launch.service_spec import with_ports


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
    (run_dir / LAUNCHER_NAME).write_text(f'{{"address": "127.0.0.1:{port}"}}', encoding="utf-8")
    with pytest.raises(NotReadyError, match="does not answer; it has ended"):
        scale("2", "--run-dir", str(run_dir))


@pytest.mark.parametrize(("count", "message"), [("0", "0 is below 1; a run"), ("1025", "above")])
def test_a_number_that_no_run_can_have(run_dir: Path, count: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        scale(count, "--run-dir", str(run_dir))
