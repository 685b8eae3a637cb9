"""`sluice quickstart`: its folder, and the progress that it shows."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from sluice.cli.run import quickstart as quickstart_module
from sluice.cli.run.quickstart import quickstart, show_preparation
from sluice.cli.running_run import folder_setting
from sluice.config.loading.loader import load_config
from sluice.doctor import files
from sluice.errors import ConfigError
from sluice.quickstart.settings import PrepareProgress


def test_a_quickstart_refuses_a_folder_that_sluice_did_not_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(
        quickstart_module, "asset_maker", lambda: lambda *given, **_: made.append(given)
    )
    theirs = tmp_path / "metrics.jsonl"
    theirs.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="sluice did not make it"):
        quickstart(None, task="quickstart", seed=0, run_dir=tmp_path)
    assert made == []
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    with pytest.raises(ConfigError) as refused:
        quickstart(None, task="quickstart", seed=0, run_dir=tmp_path / "mine")
    assert str(refused.value) == (
        f"run folder {tmp_path}/mine: cannot be written by this user; give the right to "
        f"{tmp_path}, or give another folder"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["2026", "1e3", "true", "null", "two words", "[1]", "it's", "/tmp/a\\b", r"a\,b"]
)
def test_any_name_is_a_folder_of_a_run(name: str) -> None:
    assert load_config(None, [folder_setting(Path(name))]).sluice.run_dir == name


def shown(*progress: tuple[float, PrepareProgress], terminal: bool = False) -> str:
    """Output for progress that comes at given seconds."""
    file = io.StringIO()
    now_s = [0.0]
    console = Console(file=file, force_terminal=terminal, width=80)
    with show_preparation(console, clock=lambda: now_s[0]) as show:
        for seconds, each in progress:
            now_s[0] = seconds
            show(each)
    return file.getvalue()


def warm(done: int, loss: float | None = 1.5) -> PrepareProgress:
    return PrepareProgress("warm-start", done, 600, loss)


def test_without_a_terminal_a_line_comes_every_few_seconds_and_at_the_end() -> None:
    steps = [(0.1 * done, warm(done)) for done in (1, 2, 30, 49, 51, 80, 99, 101, 110)]
    lines = shown(*steps, (11.5, warm(600, 0.25))).splitlines()
    assert lines == [
        "supervised warm start (loss 1.500): 1/600",
        "supervised warm start (loss 1.500): 51/600",
        "supervised warm start (loss 1.500): 101/600",
        "supervised warm start (loss 0.250): 600/600",
    ]


def test_files_that_are_there_already_are_one_line() -> None:
    assert shown((0.0, PrepareProgress("reused", 1, 1))) == "model and data are there: 1/1\n"


def test_a_terminal_gets_a_bar() -> None:
    assert "600/600" in shown((0.0, warm(600)), terminal=True)
