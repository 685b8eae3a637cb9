"""The files of a run that hold samples, and the new lines in them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sluice.dashboard.line_tail import Line, LineTail
from sluice.dashboard.sample_lines import SampleSource
from sluice.telemetry.samples import FOLDER_NAME

_EXAMPLES = "validation"
# A second change within one tick of the file system's clock, at most a second, is not visible.
_SETTLED_S = 2.0


@dataclass(frozen=True, slots=True)
class SampleFolders:
    """The folders with a run's samples; ``None``: the run does not write them.

    `trained` is read only without an archive, which holds the same groups and more.
    """

    archive: Path
    trained: Path | None
    validation: Path | None


@dataclass(frozen=True, slots=True)
class FileNews:
    """The changes of one file.

    Attributes:
        number: identifies the file as long as it exists.
        kind: the writer of the file.
        is_gone: the file was deleted or replaced: earlier lines are void.
        lines: its new lines; none of a deleted file.
        is_whole: the file was read to its end.
    """

    number: int
    kind: SampleSource
    is_gone: bool = False
    lines: list[Line] = field(default_factory=list)
    is_whole: bool = False


@dataclass(slots=True)
class _FolderStamp:
    changed_ns: int
    seen_s: float
    is_settled: bool = False


@dataclass(slots=True)
class _Known:
    number: int
    tail: LineTail
    stamp: tuple[int, int] | None = None  # inode and size when it was last read to its end


class SampleFiles:
    """The files with samples in the folders of a run.

    Files of the archive grow. Dumps are replaced whole; they are read only while their folder
    changes, and for `_SETTLED_S` afterwards.

    Args:
        folders: the folders with the files.
        clock: seconds, monotonic.
    """

    def __init__(self, folders: SampleFolders, clock: Callable[[], float] = time.monotonic) -> None:
        self._folders = folders
        self._clock = clock
        self._num_left_out_of_gone = 0
        self._known: dict[tuple[SampleSource, Path], _Known] = {}
        self._paths: dict[int, tuple[SampleSource, Path]] = {}
        self._folder_stamps: dict[Path, _FolderStamp] = {}
        self._next = 0

    def news(self) -> Iterator[FileNews]:
        """Yield the changes since the last call, file by file, oldest first.

        A caller may stop before the end; the next call yields the rest.

        Raises:
            OSError: a folder or file exists and cannot be read.
        """
        has_archive = self._folders.archive.is_dir()
        yield from self._folder(SampleSource.ARCHIVE, self._folders.archive, grows=True)
        if self._folders.trained is not None:
            if has_archive:
                yield from self._forget_folder(SampleSource.TRAINED, set())
            else:
                yield from self._folder(SampleSource.TRAINED, self._folders.trained, grows=False)
        if self._folders.validation is not None:
            yield from self._folder(SampleSource.VALIDATION, self._folders.validation, grows=False)

    @property
    def num_left_out(self) -> int:
        """Lines that were too long to read."""
        present = (known.tail.num_left_out for known in self._known.values())
        return self._num_left_out_of_gone + sum(present)

    def place(self, number: int) -> tuple[SampleSource, Path] | None:
        """Return kind and path of a file by its number; ``None``: it is gone."""
        return self._paths.get(number)

    def _folder(self, kind: SampleSource, folder: Path, *, grows: bool) -> Iterator[FileNews]:
        seen = None if grows else self._seen(folder)
        if seen is not None and seen.is_settled:
            return
        began_s, found = self._clock(), _numbered(folder)
        yield from self._forget_folder(kind, {path for path, _ in found})
        for path, file_stamp in found:
            yield from self._file(kind, path, file_stamp)
        if seen is not None:
            seen.is_settled = began_s - seen.seen_s >= _SETTLED_S

    def _seen(self, folder: Path) -> _FolderStamp | None:
        """Return when the folder got its stamp, by our clock: a file server's may differ."""
        changed_ns, seen = _changed_at(folder), self._folder_stamps.get(folder)
        if changed_ns is None:
            self._folder_stamps.pop(folder, None)
            return None
        if seen is None or seen.changed_ns != changed_ns:
            seen = self._folder_stamps[folder] = _FolderStamp(changed_ns, self._clock())
        return seen

    def _file(self, kind: SampleSource, path: Path, stamp: tuple[int, int]) -> Iterator[FileNews]:
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
            if taken.is_reset or taken.lines:
                yield FileNews(known.number, kind, taken.is_reset, taken.lines)
        known.stamp = stamp
        yield FileNews(known.number, kind, is_whole=True)

    def _forget_folder(self, kind: SampleSource, present: set[Path]) -> Iterator[FileNews]:
        gone = [(k, path) for k, path in self._known if k is kind and path not in present]
        for key in gone:
            known = self._known.pop(key)
            self._paths.pop(known.number, None)
            self._num_left_out_of_gone += known.tail.num_left_out
            yield FileNews(known.number, kind, is_gone=True)


def folders_of_run(
    run_dir: Path, rollout_data_dir: str | None, validation_data_dir: str | None
) -> SampleFolders:
    """Return the folders with samples, from the run's folder and its configuration.

    Without a folder for all validation samples the trainer writes examples of each validation.
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
    """Return ``<number>.jsonl`` by number, with inode and size; none without a folder."""
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return []
    found = []
    with entries as inside:
        for entry in inside:
            stem, suffix = os.path.splitext(entry.name)
            if suffix == ".jsonl" and stem.isascii() and stem.isdigit():
                try:
                    seen = entry.stat()
                except FileNotFoundError:  # deleted meanwhile, like the oldest of the archive
                    continue
                found.append((int(stem), Path(entry.path), (seen.st_ino, seen.st_size)))
    return [(path, stamp) for _, path, stamp in sorted(found, key=lambda one: one[0])]
