"""The recipes load, and their READMEs' commands do what they say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.cli.main import commands
from tests.support.documents import blocks
from tests.support.small_run import make_assets
from tests.support.source_tree import ROOT

CALCULATOR = ROOT / "recipes" / "calculator"


def test_the_run_of_the_calculator_has_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "calculator.py").write_text((CALCULATOR / "calculator.py").read_text())
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(CALCULATOR / "problems.py"))
    model = make_assets(tmp_path).folder / "model"
    # Its tokenizer has hardly more than bytes, and its context 512 tokens.
    small = [f"actor_rollout_ref.model.path={model}", "data.max_response_length=128"]
    run = str(CALCULATOR / "run.yaml")
    result = CliRunner().invoke(commands, ["config", "check", run, *small])
    assert result.exit_code == 0, result.output
    assert "No problems found" in result.output


def test_the_calculator_plays_the_episode_of_its_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CALCULATOR)
    shown = blocks(CALCULATOR / "README.md", "console")[0].splitlines()
    assert "$ python problems.py" in shown
    line = next(line for line in shown if "env check" in line)
    call = 'calc {"expression": "47 * 38 + 125"}'
    assert f"--call '{call}' --answer 1911 --truth 1911" in line
    arguments = ["calculator.py", "--call", call, "--answer", "1911", "--truth", "1911"]
    result = CliRunner().invoke(commands, ["env", "check", *arguments])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-4:] == [
        "tool: 1911",
        "assistant: 1911",
        "the episode is over",
        "score 1",
    ]
