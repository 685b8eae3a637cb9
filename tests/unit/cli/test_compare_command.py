"""`sluice compare`: runs beside each other on the console."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.errors import DataError
from tests.support.dashboard_run import fill_run, make_run


def compare(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(commands, ["compare", *arguments])
    if isinstance(result.exception, DataError):
        return 1, str(result.exception)
    return result.exit_code, result.output


def a_run(folder: Path, *overrides: str) -> Path:
    folder.mkdir()
    fill_run(make_run(folder, *overrides))
    return folder


def test_figures_progress_and_differences_are_printed(tmp_path: Path) -> None:
    one, two = a_run(tmp_path / "one"), a_run(tmp_path / "two", "data.train_batch_size=7")
    code, text = compare(str(one), str(two))
    assert code == 0
    rows = [line.split() for line in text.splitlines()]
    assert ["one", "two"] in rows
    assert ["Steps", "3", "3"] in rows
    assert ["step", "3", "0.75", "0.75"] in rows
    assert ["data.train_batch_size", "1024", "7"] in rows


def test_runs_with_one_configuration_are_said_to_have_it(tmp_path: Path) -> None:
    code, text = compare(str(a_run(tmp_path / "one")), str(a_run(tmp_path / "two")))
    assert code == 0
    assert "The configurations are the same." in text


def test_json_is_what_the_page_shows(tmp_path: Path) -> None:
    one, two = a_run(tmp_path / "one"), a_run(tmp_path / "two")
    found = json.loads(compare(str(one), str(two), "--json")[1])
    assert set(found) == {"runs", "figures", "progress", "differences"}
    assert found["runs"][0]["axes"]["step"] == [1.0, 2.0, 3.0]


def test_a_name_cannot_command_the_terminal(tmp_path: Path) -> None:
    one, two = a_run(tmp_path / "on\x1b[31me"), a_run(tmp_path / "two")
    code, text = compare(str(one), str(two))
    assert code == 0
    assert "\x1b" not in text
    assert "on\\x1b[31me" in text


def test_one_run_or_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one")
    assert compare(str(one))[0] == 2
    code, text = compare(str(one), str(tmp_path))
    assert code == 1
    assert "metrics.jsonl" in text
    refused = CliRunner().invoke(commands, ["compare", str(one), f"{tmp_path}/ome"]).exception
    assert f"run: {tmp_path}/ome does not exist; did you mean" in str(refused)
