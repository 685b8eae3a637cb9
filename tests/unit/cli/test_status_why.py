"""`sluice status --why` of runs that go on, and of those that do not."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.concurrency.process import marked_process
from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config

# Ports on which nothing of ours can listen.
NOWHERE = ("sluice.trainer.endpoint.port=1", "sluice.reward.endpoint.port=1")


def why(run_dir: Path, *arguments: str) -> str:
    result = CliRunner().invoke(commands, ["status", "--why", str(run_dir), *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_of_a_run_without_processes_it_says_how_far_it_came(tmp_path: Path) -> None:
    write_config(load_config(None, NOWHERE), tmp_path / "config.yaml")
    assert f"{tmp_path}: not running; 0 steps finished" in why(tmp_path)


def test_a_process_that_lives_and_does_not_answer_is_no_past_run(tmp_path: Path) -> None:
    write_config(load_config(None, NOWHERE), tmp_path / "config.yaml")
    with marked_process(tmp_path, "trainer", "127.0.0.1:1"):
        found = json.loads(why(tmp_path, "--json"))
        shown = why(tmp_path)
    assert found["root"] == "trainer"
    assert found["services"][0]["process"] == "alive"
    assert shown.startswith("trainer does not answer (its process")
