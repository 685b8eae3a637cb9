"""Versions of a run, for reports and the page."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sluice.report import summary


def test_git_is_asked_once_by_a_process_however_often_a_page_asks_for_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[0])
        return subprocess.CompletedProcess(command, 0, stdout="0123456789ab\n")

    package = tmp_path / "sluice" / "report"
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(summary, "__file__", str(package / "summary.py"))
    monkeypatch.setattr(summary.subprocess, "run", run)
    summary._commit.cache_clear()
    try:
        answers = [summary.versions_of_run(tmp_path) for _ in range(3)]
    finally:
        summary._commit.cache_clear()
    assert [one["commit"] for one in answers] == ["0123456789ab"] * 3
    assert asked.count("git") == 1
