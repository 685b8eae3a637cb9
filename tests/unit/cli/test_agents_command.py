"""`sluice agents run` before its run is up, and after it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sluice.cli.main import commands
from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.errors import ConfigError, NotReadyError
from tests.support.run_folder import run_folder

# Ports on which nothing of ours can listen.
NOWHERE = ("sluice.trainer.endpoint.port=1", "sluice.reward.endpoint.port=1")


def agents(run: Path, *more: str) -> Result:
    return CliRunner().invoke(commands, ["agents", "run", str(run), "--command", "true", *more])


def started(folder: Path) -> Path:
    write_config(load_config(None, NOWHERE), folder / "config.yaml")
    return folder


@pytest.mark.parametrize(
    ("is_started", "reason"),
    [(False, "nothing was started there yet"), (True, "the run is not active")],
)
def test_the_command_says_for_what_it_waits_and_gives_up_in_time(
    tmp_path: Path, is_started: bool, reason: str
) -> None:
    run = started(tmp_path) if is_started else tmp_path / "none"
    result = agents(run, "--wait-s", "0.5")
    assert f"for {run}: {reason}" in result.stdout
    assert len(result.stdout.splitlines()) == 1
    assert isinstance(result.exception, NotReadyError)
    assert f"not up within --wait-s 0.5: {reason}" in str(result.exception)


def test_a_run_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    run_folder(started(tmp_path))
    result = agents(tmp_path)
    assert isinstance(result.exception, NotReadyError)
    assert "finished after 2 steps" in str(result.exception)


def test_a_program_that_does_not_exist_is_refused_before_any_wait(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        commands, ["agents", "run", str(tmp_path), "--command", "no-such-agent"]
    )
    assert isinstance(result.exception, ConfigError)
    assert "no such program" in str(result.exception)
