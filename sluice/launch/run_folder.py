"""Which folders sluice may clear: only those it has made itself, told by a marker file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sluice.errors import ConfigError

MARKER = ".sluice-run"
_TEXT = "Made by sluice, which replaces the results in this folder when it runs here again.\n"


def mark_run_folder(folder: Path) -> None:
    """Makes `folder` one that may be cleared: a missing or empty one, or one claimed before.

    Raises:
        ConfigError: it holds files that sluice did not put there, or is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run folder {folder}: is a file; give another folder")
    if not (folder / MARKER).is_file():
        if folder.is_dir() and (found := min((file.name for file in folder.iterdir()), default="")):
            raise ConfigError(
                f"run folder {folder}: holds {found!r} and no {MARKER}, so sluice did not make it "
                "and will not replace results in it; give a folder that is empty or does not "
                "exist, or delete this one"
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).write_text(_TEXT, encoding="utf-8")


def remove_results(folder: Path, patterns: Iterable[str]) -> None:
    """Deletes files of a claimed folder; links are deleted, never followed.

    Args:
        folder: the run's.
        patterns: globs relative to it.

    Raises:
        ConfigError: the folder was not claimed.
    """
    if not (folder / MARKER).is_file():
        raise ConfigError(f"run folder {folder}: holds no {MARKER}; nothing is deleted there")
    for pattern in patterns:
        for file in folder.glob(pattern):
            file.unlink()
