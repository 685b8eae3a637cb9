"""Secrets on disk: readable by their owner alone, never replaced by accident."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sluice.errors import ConfigError
from sluice.security.token_file import write_private


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_may_read_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_private(tmp_path / "certs", {"a": b"1", "b": b"2"}, replace=False)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "certs") == 0o700
    assert {mode_of(file) for file in (tmp_path / "certs").iterdir()} == {0o600}


def test_one_file_that_is_there_keeps_all_from_being_written(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"kept")
    with pytest.raises(ConfigError, match=r"holds b already, .* --out, .* --force"):
        write_private(tmp_path, {"a": b"1", "b": b"2"}, replace=False)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"b": b"kept"}


def test_a_replaced_file_becomes_private_and_a_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"kept")
    folder = tmp_path / "certs"
    folder.mkdir()
    (folder / "a").symlink_to(elsewhere)
    write_private(folder, {"a": b"1"}, replace=True)
    assert elsewhere.read_bytes() == b"kept"
    assert (folder / "a").read_bytes() == b"1"
    assert mode_of(folder / "a") == 0o600


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cannot be written: .*; name another folder"):
        write_private(tmp_path / "file" / "certs", {"a": b"1"}, replace=False)
