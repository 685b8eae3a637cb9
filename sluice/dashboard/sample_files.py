"""Which files of a run hold samples, and what is new in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sluice.dashboard.line_tail import Line, LineTail
from sluice.dashboard.sample_lines import Kind
from sluice.telemetry.sample_archive import FOLDER_NAME

__all__ = ["FileNews", "SampleFiles", "SampleFolders", "folders_of_run"]

_EXAMPLES = "validation"


@dataclass(frozen=True, slots=True)
class SampleFolders:
    """Where a run's samples are; ``None``: not written.

    `trained` is read only where there is no archive, which holds the same groups and more.
    """

    archive: Path
    trained: Path | None
    validation: Path | None


@dataclass(frozen=True, slots=True)
class FileNews:
    """What became of one file.

    Attributes:
        number: names the file, the same for as long as it is there.
        is_gone: what was told of it before counts no more.
        lines: that came; nothing of a file that is gone for good.
    """

    number: int
    kind: Kind
    is_gone: bool = False
    lines: list[Line] = field(default_factory=list)


@dataclass(slots=True)
class _Known:
    number: int
    tail: LineTail
    stamp: tuple[int, int] | None = None  # inode and size when it was last read to its end


class SampleFiles:
    """Looks at the folders of a run.

    Files of the archive grow; those of dumps are replaced whole, and are looked at only when
    their folder has changed.
    """

    def __init__(self, folders: SampleFolders) -> None:
        self._folders = folders
        self._known: dict[tuple[Kind, Path], _Known] = {}
        self._paths: dict[int, tuple[Kind, Path]] = {}
        self._folder_stamps: dict[Path, int] = {}
        self._next = 0

    def news(self) -> Iterator[FileNews]:
        """What came since the last call, file by file, oldest first.

        A caller may stop before the end; what it did not take comes the next time.

        Raises:
            OSError: a folder or file is there and cannot be read.
        """
        has_archive = self._folders.archive.is_dir()
        yield from self._folder(Kind.ARCHIVE, self._folders.archive, grows=True)
        if self._folders.trained is not None:
            if has_archive:
                yield from self._forget_folder(Kind.TRAINED, set())
            else:
                yield from self._folder(Kind.TRAINED, self._folders.trained, grows=False)
        if self._folders.validation is not None:
            yield from self._folder(Kind.VALIDATION, self._folders.validation, grows=False)

    def place(self, number: int) -> tuple[Kind, Path] | None:
        """Kind and path of a file by its number; ``None``: it is gone."""
        return self._paths.get(number)

    def _folder(self, kind: Kind, folder: Path, *, grows: bool) -> Iterator[FileNews]:
        stamp = _changed_at(folder)
        if not grows and stamp is not None and self._folder_stamps.get(folder) == stamp:
            return
        found = _numbered(folder)
        yield from self._forget_folder(kind, {path for path, _ in found})
        for path, file_stamp in found:
            yield from self._file(kind, path, file_stamp)
        if stamp is not None:
            self._folder_stamps[folder] = stamp

    def _file(self, kind: Kind, path: Path, stamp: tuple[int, int]) -> Iterator[FileNews]:
        known = self._known.get((kind, path))
        if known is None:
            known = self._known[kind, path] = _Known(self._next, LineTail(path))
            self._paths[known.number] = (kind, path)
            self._next += 1
        if known.stamp == stamp:
            return
        has_more = True
        while has_more:
            taken = known.tail.take()
            has_more = taken.has_more
            if taken.is_anew or taken.lines:
                yield FileNews(known.number, kind, taken.is_anew, taken.lines)
        known.stamp = stamp

    def _forget_folder(self, kind: Kind, present: set[Path]) -> Iterator[FileNews]:
        gone = [(k, path) for k, path in self._known if k is kind and path not in present]
        for key in gone:
            known = self._known.pop(key)
            self._paths.pop(known.number, None)
            yield FileNews(known.number, kind, is_gone=True)


def folders_of_run(
    run_dir: Path, rollout_data_dir: str | None, validation_data_dir: str | None
) -> SampleFolders:
    """The folders, from the run's folder and its configuration.

    Without a folder for all validation samples there are the trainer's examples of each.
    """
    return SampleFolders(
        run_dir / FOLDER_NAME,
        None if rollout_data_dir is None else Path(rollout_data_dir),
        run_dir / _EXAMPLES if validation_data_dir is None else Path(validation_data_dir),
    )


def _changed_at(folder: Path) -> int | None:
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _numbered(folder: Path) -> list[tuple[Path, tuple[int, int]]]:
    """``<number>.jsonl`` by number, with inode and size; none without a folder."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                stem, suffix = os.path.splitext(entry.name)
                if suffix == ".jsonl" and stem.isascii() and stem.isdigit():
                    seen = entry.stat()
                    found.append((int(stem), Path(entry.path), (seen.st_ino, seen.st_size)))
    except FileNotFoundError:
        return []
    return [(path, stamp) for _, path, stamp in sorted(found, key=lambda one: one[0])]
