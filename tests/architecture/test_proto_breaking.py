"""A proto change that breaks clients of the previous commit is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT

MESSAGES = Path("proto/sluice/api/common/v1/common.proto")
NEUTRAL_GIT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
}


def git(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, **NEUTRAL_GIT}
    subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, check=True, capture_output=True
    )


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--message", "x")


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PROTO_BASE"}
    script = [sys.executable, "tools/check_proto_breaking.py"]
    return subprocess.run(
        script, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "check_proto_breaking.py", tmp_path / "tools")
    git(tmp_path, "init", "--quiet")
    return tmp_path


def edit(repository: Path, old: str, new: str) -> None:
    path = repository / MESSAGES
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_without_an_earlier_commit_one_line_says_that_nothing_can_break(repository: Path) -> None:
    before = check(repository)
    commit(repository)
    after = check(repository)
    for done in (before, after):
        assert done.returncode == 0
        assert done.stdout.startswith("skipped: no earlier commit")


def test_a_changed_type_is_refused_before_and_after_it_is_committed(repository: Path) -> None:
    commit(repository)
    edit(repository, "string content = 2", "bytes content = 2")
    uncommitted = check(repository)
    commit(repository)
    committed = check(repository)
    for done in (uncommitted, committed):
        assert done.returncode != 0
        assert 'changed type from "string" to "bytes"' in done.stdout


def test_an_added_field_passes(repository: Path) -> None:
    commit(repository)
    edit(repository, "string content = 2;", "string content = 2;\n  // New.\n  string name = 99;")
    assert check(repository).returncode == 0
